"""The parts of scripts/bench_slow_storage.py: a file system whose reads take a set time, and ways to read."""

BATCH_SIZE, SEQ_LEN = 32, 1024
