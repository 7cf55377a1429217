"""What a step that is not finite leaves alone: everything, whoever notices it and whenever."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.errors import RunFailed
from harness.loaders import Batch
from harness.muon import MuonAdamW
from harness.run_files import incidents
from harness.training import guard as guard_module
from harness.training.guard import MOST_SKIPS, Guard
from tests.helpers_runs import tiny_config

Parameters = list[torch.nn.Parameter]
NAN, INF = math.nan, math.inf


def parameters() -> Parameters:
    generator = torch.Generator().manual_seed(5)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((40, 30), (7,))]


def set_gradients(values: Parameters, seed: int, times: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in values:
        parameter.grad = torch.randn(parameter.shape, generator=generator) * times


def batch(step: int) -> Batch:
    tokens = torch.full((4, 16), step)
    return Batch(tokens, tokens + 1, {"position": 64 * step, "split": "train"})


class Trained:
    """A few parameters under a guard, trained with gradients that the step's number decides."""

    def __init__(
        self, path: Path, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
    ):
        self.parameters = parameters()
        self.optimizer = optimizer(self.parameters, lr=1e-2, **options)
        self.path, self.step = path, 0

    def begin(self, on_nonfinite: str) -> Trained:
        config = tiny_config(self.path, trainer__on_nonfinite=on_nonfinite)
        self.guard = Guard(self.path, config, self.optimizer, torch.device("cpu"), step=self.step)
        return self

    def take(self, loss: float = 2.0, norm: float = 1.0, *, note: bool = True) -> None:
        self.step += 1
        spoilt = not math.isfinite(loss + norm)
        set_gradients(self.parameters, self.step, NAN if spoilt else 1.0)
        self.guard.step(torch.tensor(loss), torch.tensor(norm))
        if note:
            self.guard.note(self.step, 0, batch(self.step))

    def plain(self) -> None:
        """The same step without a guard."""
        self.step += 1
        set_gradients(self.parameters, self.step)
        self.optimizer.step()

    def tensors(self) -> list[Tensor]:
        states = [self.optimizer.state[parameter] for parameter in self.parameters]
        moments = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        return [tensor.detach().clone() for tensor in [*self.parameters, *moments]]


def take_many(trained: Trained, steps: int) -> None:
    for _ in range(steps):
        trained.take()


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def muon(parameters: Parameters, lr: float) -> MuonAdamW:
    matrices, others = parameters[:1], [{"params": parameters[1:]}]
    settings: dict[str, Any] = {"weight_decay": 0.1, "momentum": 0.95, "betas": (0.9, 0.95), "fused": True}
    return MuonAdamW(list(matrices), others, lr=lr, **settings)


KINDS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"fused": False}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (muon, {}),
]
EVERY_KIND = pytest.mark.parametrize(("kind", "options"), KINDS, ids=["fused", "foreach", "sgd", "muon"])
HELD_KINDS = pytest.mark.parametrize(("kind", "options"), [KINDS[0], KINDS[3]], ids=["fused", "muon"])


@EVERY_KIND
def test_finite_steps_are_those_of_the_optimizer_alone(tmp_path: Path, kind: Any, options: Any) -> None:
    guarded, alone = Trained(tmp_path, kind, **options).begin("stop"), Trained(tmp_path, kind, **options)
    for _ in range(6):
        guarded.take()
        alone.plain()
        assert same(guarded.tensors(), alone.tensors())
    assert not (tmp_path / incidents.FILE).exists()


@EVERY_KIND
@pytest.mark.parametrize(("loss", "norm"), [(NAN, NAN), (INF, 1.0), (2.0, INF), (2.0, NAN)])
def test_a_step_that_is_not_finite_changes_neither_weights_nor_optimizer(
    tmp_path: Path, kind: Any, options: Any, loss: float, norm: float
) -> None:
    trained = Trained(tmp_path, kind, **options).begin("skip")
    for _ in range(3):
        trained.take()
    before = trained.tensors()
    trained.take(loss, norm)
    assert same(trained.tensors(), before)
    trained.take()
    assert not any(map(torch.equal, trained.parameters, before))
    alone = Trained(tmp_path, kind, **options)
    for step in (0, 1, 2, 4):  # without the one that was skipped
        alone.step = step
        alone.plain()
    assert same(trained.tensors(), alone.tensors())


@HELD_KINDS
def test_a_first_step_that_is_skipped_leaves_the_moments_of_a_fresh_optimizer(
    tmp_path: Path, kind: Any, options: Any
) -> None:
    trained, alone = Trained(tmp_path, kind, **options).begin("skip"), Trained(tmp_path, kind, **options)
    trained.take(NAN, NAN)
    trained.take()
    alone.step = 1
    alone.plain()
    assert same(trained.tensors(), alone.tensors())


@HELD_KINDS
def test_after_a_bad_step_no_later_one_changes_anything_until_the_run_stops(
    tmp_path: Path, kind: Any, options: Any
) -> None:
    trained = Trained(tmp_path, kind, **options).begin("stop")
    trained.take()
    before = trained.tensors()
    trained.take(NAN, NAN, note=False)
    trained.take(note=False)  # its numbers are finite
    assert same(trained.tensors(), before)


def test_spikes_close_together_are_counted_in_the_next_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained = Trained(tmp_path, fused=True).begin("stop")
    spikes = [60, 61, 62, 150, 175]
    for step in range(1, 176):
        trained.take(9.0 if step in spikes else 2.0)
    assert [row["step"] for row in incidents.read(tmp_path)] == spikes
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in lines] == ["step 60", "step 175"]
    assert "more since" not in lines[0]
    assert "3 more since step 60" in lines[1]


class _Late:
    """A copy from the device that arrives when two more steps are under way."""

    waited_for = 0

    def __init__(self) -> None:
        self.looks = 0

    def query(self) -> bool:
        self.looks += 1
        return self.looks > 2

    def synchronize(self) -> None:
        self.looks = 9
        _Late.waited_for += 1


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> type[_Late]:
    """Numbers that come to the host as those of a GPU do, which a CPU cannot show."""
    monkeypatch.setattr(guard_module, "_to_host", lambda values: (values.clone(), _Late()))
    monkeypatch.setattr(_Late, "waited_for", 0)
    return _Late


def test_numbers_that_arrive_late_stop_the_run_for_the_step_they_belong_to(
    tmp_path: Path, late: type[_Late]
) -> None:
    trained = Trained(tmp_path, fused=True).begin("stop")
    trained.take()
    before = trained.tensors()
    trained.take(NAN, 7.0)
    trained.take()
    with pytest.raises(
        RunFailed, match=r"^step 2: the loss is nan, the gradient norm 7, at tokens \[64, 128\)"
    ):
        take_many(trained, 5)
    assert late.waited_for == 0
    assert same(trained.tensors(), before)
    with pytest.raises(RunFailed, match=r"^step 2: "):
        trained.guard.settle()  # nothing can be saved afterwards


def test_settling_waits_for_the_numbers_of_every_step(tmp_path: Path, late: type[_Late]) -> None:
    trained = Trained(tmp_path, fused=True).begin("stop")
    trained.take()
    trained.take(NAN, NAN)
    with pytest.raises(RunFailed, match=r"^step 2: "):
        trained.guard.settle()
    assert late.waited_for >= 1


def test_the_host_is_never_many_steps_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Never(_Late):
        def query(self) -> bool:
            return False

    monkeypatch.setattr(guard_module, "_to_host", lambda values: (values.clone(), Never()))
    trained = Trained(tmp_path, fused=True).begin("stop")
    trained.take(NAN, NAN)
    with pytest.raises(RunFailed, match=r"^step 1: "):
        take_many(trained, 20)
    assert trained.step <= 10


def test_a_few_steps_in_a_row_are_skipped_and_no_more(tmp_path: Path) -> None:
    trained = Trained(tmp_path, fused=True).begin("skip")
    trained.take()
    for _ in range(MOST_SKIPS):
        trained.take(NAN, NAN)
    trained.take()  # the count begins anew
    for _ in range(MOST_SKIPS):
        trained.take(NAN, NAN)
    with pytest.raises(RunFailed, match=f"The {MOST_SKIPS} steps before it were skipped"):
        trained.take(NAN, NAN)
    actions = [row["action"] for row in incidents.read(tmp_path)]
    assert actions == ["skip"] * (2 * MOST_SKIPS) + ["stop"]


def test_the_steps_skipped_before_a_resume_count(tmp_path: Path) -> None:
    trained = Trained(tmp_path, fused=True).begin("skip")
    for _ in range(MOST_SKIPS):
        trained.take(NAN, NAN)
    trained.begin("skip")
    with pytest.raises(RunFailed, match=f"^step {MOST_SKIPS + 1}: "):
        trained.take(NAN, NAN)


def test_an_optimizers_checkpoint_holds_nothing_of_the_guard(tmp_path: Path) -> None:
    trained, alone = Trained(tmp_path, fused=True).begin("stop"), Trained(tmp_path, fused=True)
    trained.take()
    alone.plain()
    ours, theirs = trained.optimizer.state_dict(), alone.optimizer.state_dict()
    assert ours.keys() == theirs.keys()
    assert ours["param_groups"] == theirs["param_groups"]
    assert [set(state) for state in ours["state"].values()] == [
        set(state) for state in theirs["state"].values()
    ]


@HELD_KINDS
def test_an_optimizer_that_was_restored_is_still_held_back(tmp_path: Path, kind: Any, options: Any) -> None:
    trained = Trained(tmp_path, kind, **options).begin("skip")
    trained.take()
    saved = trained.optimizer.state_dict()
    trained.optimizer.load_state_dict(saved)
    before = trained.tensors()
    trained.take(NAN, NAN)
    assert same(trained.tensors(), before)


def test_a_stop_that_cannot_be_written_is_said_all_the_same(tmp_path: Path) -> None:
    trained = Trained(tmp_path, fused=True).begin("stop")
    (tmp_path / incidents.FILE).mkdir()
    with pytest.raises(RunFailed, match=r"^step 1: the loss is nan") as failed:
        trained.take(NAN, NAN)
    assert "It could not be written to " in str(failed.value)
    assert "Written to" not in str(failed.value)
