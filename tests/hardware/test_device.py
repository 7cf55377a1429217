"""Precision and compilation are what the configuration says, and `auto` is what suits the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.config import TrainConfig
from harness.hardware import device_feed
from harness.hardware.device import make_autocast, peak_flops, set_numerics, should_compile, uses_bf16

CPU, CUDA = torch.device("cpu"), torch.device("cuda")  # a name needs no device


def test_auto_is_bf16_where_a_gpu_has_the_units_and_compiled_on_any(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_units in (False, True):
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda *, including_emulation, has=has_units: has
        )
        assert [uses_bf16("auto", device) for device in (CPU, CUDA)] == [False, has_units]
        assert uses_bf16("bf16", CUDA)
    assert [uses_bf16(precision, CUDA) for precision in ("float32", "bf16")] == [False, True]
    assert [should_compile("auto", device) for device in (CPU, CUDA)] == [False, True]
    assert [should_compile(value, CUDA) for value in (True, False)] == [True, False]
    assert peak_flops(CPU) is None


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("auto", torch.float32)])
def test_bf16_is_what_products_are_computed_in_and_weights_stay_float32(
    precision: str, dtype: torch.dtype
) -> None:
    linear = nn.Linear(4, 4)
    with make_autocast(precision, CPU)():
        result = linear(torch.ones(2, 4))
        result.sum().backward()
    assert result.dtype == dtype
    assert linear.weight.grad is not None
    assert linear.weight.dtype == linear.weight.grad.dtype == torch.float32


def test_products_left_in_float32_are_tf32_on_cuda_and_determinism_is_taken_back() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        set_numerics(TrainConfig(), CPU)
        assert torch.get_float32_matmul_precision() == before
        set_numerics(TrainConfig(deterministic=True), CUDA)
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.are_deterministic_algorithms_enabled()
        set_numerics(TrainConfig(), CPU)
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_float32_matmul_precision(before)


def test_all_feeds_of_a_gpu_copy_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each evaluation makes a feed, and torch keeps the memory of a stream for that stream."""
    made = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "Stream", made.append)
    device_feed._stream.cache_clear()
    try:
        for number in (0, 0, 1, 0):
            device_feed.DeviceFeed(torch.device("cuda", number))
        assert made == [torch.device("cuda", 0), torch.device("cuda", 1)]
    finally:
        device_feed._stream.cache_clear()
