# Sourced by quickstart.sh and test.sh: makes .venv and installs the project in it, once.
# usage: ensure_venv EXTRA ("" or "dev")
# PYTHON=python3.12 picks the interpreter; SYSTEM_SITE=1 lets the venv see packages that are installed
# already, such as a GPU machine's own torch.

say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $1"; shift; for line in "$@"; do say "  $line"; done; exit 1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  fail "Python 3.11 or newer is needed, found: $(${PYTHON:-python3} --version 2>&1 | head -n 1)" \
    "Install it, or name it: PYTHON=/path/to/python3.12 bash $0"
}

check_space() {
  local free_mb
  free_mb=$(df -Pm . | awk 'NR == 2 {print $4}')
  [ "${free_mb:-0}" -ge "$1" ] || fail "$free_mb MB are free in $PWD, $1 MB are needed for the Python packages." \
    "Free some space or clone the project onto another disk."
}

ensure_venv() {
  local extra="$1" python stamp wanted
  stamp=".venv/.installed"
  wanted="$(cat pyproject.toml constraints.txt scripts/setup.sh | cksum) ${extra:-run}"
  if [ -x .venv/bin/python ] && [ -f "$stamp" ]; then
    # What the tests need includes what a run needs.
    case "$(cat "$stamp")" in "$wanted" | "${wanted% *} dev") return ;; esac
  fi
  python=$(find_python) || exit 1
  if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    rm -rf .venv # absent, or left half made by an interrupted start
    check_space 3000
    say "making .venv with $("$python" --version 2>&1)"
    "$python" -m venv ${SYSTEM_SITE:+--system-site-packages} .venv || {
      rm -rf .venv
      fail "$python cannot make a virtual environment." \
        "On Debian or Ubuntu: apt-get install python3-venv (or python3.12-venv for that version)"
    }
  fi
  say "installing the project and its packages (about a minute the first time) ..."
  local log=.venv/install.log constraint=(-c constraints.txt)
  [ -z "${SYSTEM_SITE:-}" ] || constraint=() # keep the torch that is there
  if ! .venv/bin/python -m pip install --quiet --disable-pip-version-check "${constraint[@]}" \
    -e ".${extra:+[$extra]}" >"$log" 2>&1; then
    tail -n 15 "$log" >&2
    fail "pip could not install the project; the whole log is $log." \
      "No network or no package index? pip needs one here: see pip config list." \
      "Disk full? $(df -Ph . | awk 'NR == 2 {print $4}') are free."
  fi
  printf '%s\n' "$wanted" >"$stamp"
}
