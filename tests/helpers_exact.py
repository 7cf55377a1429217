"""What a run left, compared bit for bit with another; and stops that come at a chosen moment of a run."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from harness.checkpoints import checkpoint
from harness.model import Block
from harness.training.completion import with_evaluation
from tests.helpers_runs import rows

# Of trainer.json and its segments: what is not the same in two runs that trained the same.
_TIMES = ("elapsed_s", "train_s", "waited_s", "peak_memory_mb")
_OWN = ("run_id", "parent", "path", "data_path", *_TIMES)


class Difference(NamedTuple):
    """Where two runs part: `what` of which step, and both values."""

    what: str
    straight: Any
    resumed: Any

    def __str__(self) -> str:
        return f"{self.what}: straight {self.straight}, resumed {self.resumed}"


class Evidence(NamedTuple):
    """Everything by which a run is judged: its rows without times, and its last checkpoint."""

    rows: list[dict[str, Any]]
    state: dict[str, Any]


def evidence(path: Path, *before: dict[str, Any]) -> Evidence:
    """Of a finished run; `before` are the rows of the run that it branched from."""
    saved = checkpoint.open_checkpoint(checkpoint.find(path))
    trainer = _without_own(with_evaluation(saved).trainer)
    segments = trainer.pop("lineage")
    incidents = path / "incidents.jsonl"
    state = {
        "weights": saved.weights(),
        "model.safetensors": (saved.path / checkpoint.MODEL).read_bytes(),
        "optimizer": saved.optimizer_state(),
        "rng": saved.rng_state(),
        "loader": saved.loader,
        "trainer": trainer,
        "lineage": [_without_own(segment) for segment in (segments[:-1] if before else segments)],
        "incidents": incidents.read_text().splitlines() if incidents.exists() else [],
    }
    return Evidence([*before, *rows(path)], state)


def _without_own(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in _OWN}


def first_difference(straight: Evidence, resumed: Evidence, *, looks: bool = True) -> Difference | None:
    """The earliest thing in which two runs differ; None where every bit is the same.

    `looks` False is for runs that were not looked at in the same steps: it leaves out what evaluations say,
    and what the resumed run did not log.
    """
    if not looks:
        logged = {row["step"]: set(row) for row in resumed.rows if "loss" in row}
        straight, resumed = _only_training(straight, logged), _only_training(resumed, logged)
    for ours, theirs in zip(straight.rows, resumed.rows, strict=False):
        if ours["step"] != theirs["step"] or ("loss" in ours) != ("loss" in theirs):
            return Difference("row", _named(ours), _named(theirs))
        if (found := _difference(f"step {ours['step']}, ", *map(_data_first, (ours, theirs)))) is not None:
            return found
    if len(straight.rows) != len(resumed.rows):
        return Difference("rows", len(straight.rows), len(resumed.rows))
    return _difference("at the end, ", straight.state, resumed.state)


def _only_training(whole: Evidence, logged: dict[int, set[str]]) -> Evidence:
    trainer = {k: v for k, v in whole.state["trainer"].items() if "val_loss" not in k and k != "best_step"}
    kept = [
        {key: value for key, value in row.items() if key in logged[row["step"]]}
        for row in whole.rows
        if "loss" in row and row["step"] in logged
    ]
    return Evidence(kept, whole.state | {"trainer": trainer, "lineage": None})  # it says how data is read


def _data_first(row: dict[str, Any]) -> dict[str, Any]:
    """A wrong batch shows in every other value too: it is named as what it is."""
    data = {key: row[key] for key in ("epoch", "position", "batch_sha256") if key in row}
    return data | row


def _named(row: dict[str, Any]) -> str:
    return f"step {row['step']} ({'training' if 'loss' in row else 'evaluation'})"


def _difference(name: str, ours: Any, theirs: Any) -> Difference | None:
    """The first leaf in which two nested values differ, in type or in bits."""
    if type(ours) is not type(theirs):
        return Difference(name.rstrip("."), _short(ours), _short(theirs))
    if isinstance(ours, dict):
        if list(ours) != list(theirs):
            return Difference(f"{name}keys", list(ours), list(theirs))
        pairs = [(f"{name}{key}.", ours[key], theirs[key]) for key in ours]
    elif isinstance(ours, list | tuple):
        if len(ours) != len(theirs):
            return Difference(f"{name}length", len(ours), len(theirs))
        pairs = [(f"{name}{i}.", *both) for i, both in enumerate(zip(ours, theirs, strict=True))]
    elif isinstance(ours, torch.Tensor):
        return _tensor_difference(name.rstrip("."), ours, theirs)
    else:
        same = repr(ours) == repr(theirs)  # not ==: NaN is itself, and 0.0 is not -0.0
        return None if same else Difference(name.rstrip("."), _short(ours), _short(theirs))
    return next((found for pair in pairs if (found := _difference(*pair)) is not None), None)


def _tensor_difference(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> Difference | None:
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return Difference(name, (ours.shape, ours.dtype), (theirs.shape, theirs.dtype))
    flat = [tensor.detach().cpu().contiguous().view(-1) for tensor in (ours, theirs)]
    unequal = (flat[0].view(torch.uint8) != flat[1].view(torch.uint8)).view(len(flat[0]), -1).any(dim=1)
    if not unequal.any():
        return None
    at = int(unequal.nonzero()[0])
    return Difference(f"{name}[{at}]", flat[0][at].item(), flat[1][at].item())


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


class Stop(logging.Handler):
    """A context in which this process gets a SIGTERM once, at a moment that a run's own log marks.

    `words` begin the log line that is waited for. `within` None: the signal comes with that line. Else in the
    model's next forward pass: of a training step, or outside of training, so in an evaluation or a sample.
    """

    def __init__(self, words: str, *, within: Literal["training", "looking"] | None = None) -> None:
        super().__init__()
        self.words, self.within = words, within
        self.armed = self.sent = False

    @classmethod
    def after(cls, step: int) -> Stop:
        """As the line of a step is written: the step is done, what follows it is not."""
        return cls(f"step {step}/")

    @classmethod
    def during(cls, step: int) -> Stop:
        """In the forward pass of a step, which is finished and saved."""
        return cls("trains " if step == 1 else f"step {step - 1}/", within="training")

    @classmethod
    def restored(cls) -> Stop:
        """When a resumed run has its state back and is not in its loop yet: nothing is saved."""
        return cls("resumed ")

    @classmethod
    def before_a_step(cls) -> Stop:
        """In the evaluation that is missing and made first: what was restored is saved."""
        return cls("resumed ", within="looking")

    @classmethod
    def evaluating(cls, step: int) -> Stop:
        """In the middle of the evaluation after a step."""
        return cls(f"step {step}/", within="looking")

    @classmethod
    def sampling(cls, step: int, budget: int) -> Stop:
        """As the evaluation after a step has its loss, and draws a sample."""
        return cls(f"step {step}/{budget}: validation loss", within="looking")

    def emit(self, record: logging.LogRecord) -> None:
        if not self.armed and record.getMessage().startswith(self.words):
            self.armed = True
            if self.within is None:
                self._send()

    def _forward(self, module: nn.Module, arguments: object) -> None:
        mode = "training" if module.training else "looking"
        if self.armed and not self.sent and isinstance(module, Block) and mode == self.within:
            self._send()

    def _send(self) -> None:
        self.sent = True
        signal.raise_signal(signal.SIGTERM)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        logger = logging.getLogger("harness")
        hook = nn.modules.module.register_module_forward_pre_hook(self._forward)
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)
            hook.remove()
