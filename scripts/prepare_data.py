"""See `--help`; the work is done by harness.prepare.cli."""

from harness.prepare.cli import main

if __name__ == "__main__":
    main()
