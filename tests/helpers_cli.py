"""A tiny set, and a run on it made by a real process; for the tests of the command line."""

from __future__ import annotations

from pathlib import Path

from tests.helpers_runs import train_py, write_text_set

TINY = (
    "tracker=none", "loader.seq_len=16", "loader.batch_size=4", "model.n_layer=1", "model.n_head=2",
    "model.n_embd=32", "schedule.total_steps=8", "schedule.warmup_steps=2", "trainer.max_steps=8",
    "trainer.log_batch_hash=true", "evaluation.tokens=200", "evaluation.sample_tokens=0",
    "checkpoint.interval=4",
)  # fmt: skip


def make_root(root: Path) -> Path:
    """What `data.root=` expects below it, with the preparation that the defaults ask for."""
    write_text_set(root / "npy-stream")
    return root


def make_run(folder: Path, root: Path) -> Path:
    """A run of eight steps, saved at 4 and 8, as `runs/one` below `folder`."""
    assert train_py(*TINY, f"data.root={root}", "run.name=one", cwd=folder).returncode == 0
    return folder / "runs" / "one"
