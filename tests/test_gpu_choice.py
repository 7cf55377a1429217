"""Where a run computes: what a process did before must not decide it."""

from __future__ import annotations

import pytest
import torch

from harness.config_groups import ModelConfig
from harness.distributed.parallel import has_inner_graphs, torch_release
from harness.errors import UserError
from harness.hardware.device import select_device
from harness.model import GPT


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that torch is told to use, on a machine that says it has two GPUs."""
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    return devices


@pytest.mark.parametrize(("name", "number"), [("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_gpu_has_its_number_whatever_the_process_used_before(
    taken: list[torch.device], name: str, number: int
) -> None:
    select_device("cuda:1")
    assert select_device(name) == taken[-1] == torch.device("cuda", number)


def test_a_gpu_that_is_not_there_is_refused_and_never_used(taken: list[torch.device]) -> None:
    with pytest.raises(UserError, match="device=cuda:2: torch sees 2 CUDA devices"):
        select_device("cuda:2")
    assert not taken


@pytest.mark.parametrize(
    ("config", "inner"),
    [
        (ModelConfig("nano", 1, 1, 8), False),
        (ModelConfig("nano", 1, 1, 8, activation_checkpointing=True), True),
        (ModelConfig("nano", 1, 1, 8, loss_chunk_tokens=4), False),
    ],
)
def test_what_a_compiled_loss_has_inside_is_known(config: ModelConfig, inner: bool) -> None:
    assert has_inner_graphs(GPT(config, vocab_size=5, seq_len=4)) is inner


def test_a_release_is_compared_by_number() -> None:
    assert torch_release("2.9.1") < torch_release("2.11.0+cu130") < torch_release("2.13.0a0+git12") == (2, 13)
