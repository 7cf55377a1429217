"""Random numbers go on exactly where they were, or the run does not go on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.checkpoints import checkpoint, rng
from harness.checkpoints.checkpoint import RNG
from harness.distributed.ranks import Ranks
from harness.errors import UserError
from harness.files import sha256_file
from tests.helpers_runs import run, snapshot, tiny_config, write_text_set

CPU = torch.device("cpu")
SOURCE = Path("runs/one/checkpoints/step-00000004/rng.pt")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = rng.state(CPU)
    yield
    rng.restore(before, CPU, source=SOURCE, anew=0)


def draws() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand(())), float(np.random.normal())]


def restore(state: dict[str, Any], device: torch.device = CPU) -> list[str]:
    return rng.restore(state, device, source=SOURCE, anew=7)


def test_every_generator_goes_on_where_it_was(tmp_path: Path) -> None:
    rng.seed(3)
    draws()
    torch.save(rng.state(CPU), tmp_path / "rng.pt")
    expected = draws()
    rng.seed(4)
    assert restore(torch.load(tmp_path / "rng.pt", weights_only=True)) == []
    assert draws() == expected


def test_each_rank_goes_on_where_it_was() -> None:
    rng.seed(3)
    first = rng.state(CPU)
    expected = draws()
    second = rng.state(CPU)
    others_expected = draws()
    saved = first | {"others": [second]}
    for rank, numbers in enumerate([expected, others_expected]):
        assert rng.restore(saved, CPU, source=SOURCE, anew=7, ranks=Ranks(rank, 2)) == []
        assert draws() == numbers


def test_on_another_number_of_ranks_each_begins_a_sequence_of_its_own() -> None:
    saved, seen = rng.state(CPU), list[float]()
    for rank in (0, 1, 2, 0):
        (line,) = rng.restore(saved, CPU, source=SOURCE, anew=7, ranks=Ranks(rank, 3))
        assert "world_size 1 -> 3 (all random numbers begin anew" in line
        seen.append(draws()[2])
    assert seen[0] == seen[3]
    assert len(set(seen)) == 3


@pytest.mark.parametrize("others", ["x", [1]])
def test_states_of_others_that_are_none_are_refused(others: Any) -> None:
    with pytest.raises(UserError, match="its part others holds no states"):
        restore(rng.state(CPU) | {"others": others})


@pytest.mark.parametrize("part", ["python", "numpy", "torch", "cuda", "versions"])
def test_a_missing_part_is_refused(part: str) -> None:
    state = {key: value for key, value in rng.state(CPU).items() if key != part}
    with pytest.raises(UserError, match=rf"step-00000004/rng\.pt: it lacks the state of {part}.*init_from="):
        restore(state)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("python", (3, (1, 2, 3), None)),
        ("python", "x"),
        ("numpy", ["MT19937", [1, 2, 3], 0, 0, 0.0]),
        ("numpy", ["other", [0] * 624, 0, 0, 0.0]),
        ("numpy", None),
        ("torch", torch.zeros(10, dtype=torch.uint8)),
        ("torch", [1, 2]),
    ],
)
def test_what_is_no_state_of_its_generator_is_refused(part: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"its part {part} is no state of that generator"):
        restore(rng.state(CPU) | {part: value})


def test_another_kind_of_device_is_said() -> None:
    state = rng.state(CPU) | {"cuda": [torch.zeros(16, dtype=torch.uint8)]}
    (line,) = restore(state)
    assert "the checkpoint was trained on cuda, this run on cpu" in line
    assert "not bit-equal" in line


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[int, torch.Generator]:
    """Generators where torch looks for those of GPUs, by number; this machine need not have any."""
    generators = {number: torch.Generator().manual_seed(number) for number in range(3)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: generators[device.index].get_state())
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: generators[device.index].set_state(state)
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "one like the others")
    return generators


def test_of_a_gpu_its_own_generator_goes_on_whatever_others_a_host_has(
    gpus: dict[int, torch.Generator],
) -> None:
    saved = rng.state(torch.device("cuda:2"))
    expected = torch.rand(3, generator=gpus[2])
    assert restore(saved, torch.device("cuda:0")) == []  # the only one of another host, perhaps
    assert torch.equal(torch.rand(3, generator=gpus[0]), expected)


def test_of_a_checkpoint_with_the_state_of_every_gpu_the_run_s_own_counts(
    gpus: dict[int, torch.Generator],
) -> None:
    """As older versions wrote it."""
    saved = rng.state(CPU) | {"cuda": [gpus[number].get_state() for number in (0, 1)]}
    saved["versions"] = rng.state(torch.device("cuda:0"))["versions"]
    expected = torch.rand(3, generator=gpus[1])
    assert restore(saved, torch.device("cuda:1")) == []
    assert torch.equal(torch.rand(3, generator=gpus[1]), expected)
    with pytest.raises(UserError, match=r"of 2 CUDA devices, none of number 2: .*device=cuda:N.* 0 to 1"):
        restore(saved, torch.device("cuda:2"))


def test_other_versions_are_said() -> None:
    state = rng.state(CPU)
    state["versions"] = state["versions"] | {"torch": "1.0", "threads": "1000"}
    (line,) = restore(state)
    now = f"torch 1.0 -> {torch.__version__}, threads 1000 -> {torch.get_num_threads()}"
    assert line == f"changed since the checkpoint: {now} (the steps may not be bit-equal)"


def test_a_resume_whose_random_state_is_none_stops_before_it_writes(tmp_path: Path) -> None:
    data, path = write_text_set(tmp_path / "set"), tmp_path / "run"
    run(tiny_config(data, trainer__max_steps=4), path)
    folder = checkpoint.step_dir(path, 4)
    saved = checkpoint.open_checkpoint(folder)
    torch.save(saved.rng_state() | {"torch": torch.zeros(3, dtype=torch.uint8)}, folder / RNG)
    _index_again(folder)
    before = snapshot(path)
    with pytest.raises(UserError, match="its part torch is no state"):
        run(tiny_config(data, resume=str(path)), path)
    assert snapshot(path) == before


def _index_again(folder: Path) -> None:
    import json

    index = json.loads((folder / "checkpoint.json").read_text())
    file = folder / RNG
    index["files"][RNG] = {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
    (folder / "checkpoint.json").write_text(json.dumps(index))
