"""See `--help`; the work is done by harness.evaluation_cli."""

from harness.evaluation_cli import main

if __name__ == "__main__":
    main()
