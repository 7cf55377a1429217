"""What a run would save, without the run."""

from __future__ import annotations

from typing import Any

import torch


def parts(step: int, weight: torch.Tensor | None = None, **trainer: Any) -> dict[str, Any]:
    """What a run would save at `step`: 40 kB of weights, equal to the step, and as much optimizer state."""
    model = {"w": torch.full((10_000,), float(step)) if weight is None else weight}
    return {
        "model": model,
        "optimizer": {"state": {0: {"exp_avg": torch.ones(10_000)}}, "param_groups": [{"betas": (0.9, 1)}]},
        "rng": {},
        "loader": {"position": step},
        "trainer": {
            "step": step, "epoch": 0, "tokens": step, "elapsed_s": 0.0, "val_loss": None,
            "best_val_loss": None, "best_step": None, "run_id": "ours", "parent": None, "vocab_size": 257,
            "metadata_sha256": "0", "content_sha256": None, **trainer,
        },
        "config": {},
    }  # fmt: skip
