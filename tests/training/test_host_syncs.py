"""Between logged steps the host never waits for a number of the device.

There is no GPU here: what would lie on it is followed from the batch, the weights and the optimizer through
every operation, and reading any of it as a Python value counts as a wait.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness import launch
from harness.loaders import Batch
from harness.training.run import Run
from tests.helpers_runs import run, tiny_config, write_pair_set, write_text_set

_aten = torch.ops.aten
# item(), bool(tensor) and float(tensor) are the first; the others have a result as large as the data says.
WAITS = {_aten._local_scalar_dense, _aten.nonzero, _aten.masked_select, _aten._unique2, _aten.equal}


class Watch(TorchDispatchMode):
    """Notes the steps in which something that comes from the device is read."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.steps = run, list[int]()
        self._device: dict[int, Tensor] = {id(tensor): tensor for tensor in run.model.parameters()}
        self._feed, run.feed = run.feed, self.fed  # type: ignore[assignment]

    def fed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        inputs, targets = (tensor.clone() for tensor in self._feed(batch))
        self._device |= {id(inputs): inputs, id(targets): targets}  # kept, so that no id comes twice
        return inputs, targets

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        result = function(*args, **(kwargs or {}))
        if any(id(tensor) in self._device for tensor in given):
            if function.overloadpacket in WAITS:
                self.steps.append(self.run.progress.step)
            made = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
            self._device |= {id(tensor): tensor for tensor in made}
        return result


@pytest.mark.parametrize("loader", ["sequential", "contrastive_rows"])
def test_the_host_waits_at_logged_steps_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: str
) -> None:
    write = write_text_set if loader == "sequential" else write_pair_set
    config = tiny_config(
        write(tmp_path / "set"),
        trainer__log_batch_hash=False,
        trainer__log_interval=4,
        trainer__micro_batch_size=2,
        trainer__max_steps=7,
        evaluation__interval=100,
        checkpoint__interval=100,
    )
    if loader == "contrastive_rows":
        from harness.config_groups import ContrastiveRowsConfig

        config.loader = ContrastiveRowsConfig(seq_len=16, batch_size=4)
    seen, train = list[int](), launch.train

    def watched(run: Run, stop: Any) -> bool:
        # A save copies, by design.
        monkeypatch.setattr("harness.training.trainer.save", lambda run, random=None: None)
        monkeypatch.setattr("harness.training.trainer.run_evaluation", lambda run, stop: None)
        with Watch(run) as watch:
            finished = train(run, stop)
        seen.extend(watch.steps)
        return finished

    monkeypatch.setattr(launch, "train", watched)
    run(config, tmp_path / "run")
    assert set(seen) == {4, 7}
