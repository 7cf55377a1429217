"""See `--help`; the work is done by harness.sample."""

from harness.sample import main

if __name__ == "__main__":
    main()
