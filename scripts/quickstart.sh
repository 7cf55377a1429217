#!/usr/bin/env bash
# From a fresh clone to a GPT that has learnt real text: makes .venv, installs, prepares, trains, shows the result.
# Run it again and it trains at once. Extra words go to train.py: bash scripts/quickstart.sh trainer.max_steps=300
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
ensure_venv ""

export WANDB_MODE="${WANDB_MODE:-offline}" # a key that is there is not used unasked
name="quickstart-$(date +%Y%m%d-%H%M%S)"
.venv/bin/python train.py experiment=quickstart "run.name=$name" "$@"
.venv/bin/python scripts/show_run.py "runs/$name"
echo
echo "to type these commands as they stand:  source .venv/bin/activate"
