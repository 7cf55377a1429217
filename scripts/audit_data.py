"""See `--help`; the work is done by harness.auditing.audit_cli."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout need not be installed
    from harness.entry import audit

    audit()
