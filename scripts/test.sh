#!/usr/bin/env bash
# Lint, types and tests. Makes .venv first if it is missing. Arguments go to pytest: bash scripts/test.sh -k resume
# (-m heavy --timeout 600: the trials of many processes, which are left out otherwise).
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
ensure_venv dev

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONDONTWRITEBYTECODE=1
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/mypy
.venv/bin/python -m pytest -n 3 --dist loadfile "$@"  # tests wait, too: three keep two cores busy
