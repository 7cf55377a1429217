"""Train a GPT on prepared tokens: `python train.py data=npy loader=sequential` (see --help)."""

from harness.entry import train

if __name__ == "__main__":
    train()
