"""Train a GPT on prepared tokens: `python train.py data=npy loader=sequential` (see --help)."""

from harness.cli import main

if __name__ == "__main__":
    main()
