"""What is copied for a writer in the background is copied whole, into memory that is taken once."""

from __future__ import annotations

import io
import itertools
from typing import Any

import pytest
import torch

from harness.checkpoints.host_copy import HostCopy, packed, tensor_bytes


def values(factor: float) -> dict[str, Any]:
    """Tensors of every kind that a checkpoint has, in every kind of container."""
    state = {i: {"step": torch.tensor(factor), "exp_avg": torch.full((3, 5), factor)} for i in range(2)}
    return {
        "model": {"w": torch.arange(7.0) * factor, "half": torch.full((3,), factor).bfloat16()},
        "optimizer": {"state": state, "param_groups": [{"lr": 0.1, "betas": (0.9, torch.tensor(0.95))}]},
        "rng": [torch.full((5,), int(factor), dtype=torch.uint8), torch.empty(0), (torch.ones(2, 3).t(),)],
    }


def alike(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(alike(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return type(ours) is type(theirs) and all(map(alike, ours, theirs))
    return bool(torch.equal(ours, theirs)) if isinstance(ours, torch.Tensor) else bool(ours == theirs)


def test_a_copy_is_whole_and_stays_as_it_was_until_the_next() -> None:
    memory, original = HostCopy(), values(1.0)
    copy = memory.take(original)
    original["model"]["w"] += 1
    assert alike(copy, values(1.0))
    place = copy["model"]["w"].data_ptr()
    again = memory.take(values(2.0))
    assert alike(again, values(2.0))
    assert again["model"]["w"].data_ptr() == place
    more = values(3.0) | {"new": torch.ones(9)}
    more["model"]["w"] = torch.ones(3)
    assert alike(memory.take(more), more)


def test_each_copy_is_written_without_its_neighbours() -> None:
    copy = HostCopy().take({"a": torch.ones(1000), "b": torch.zeros(100_000)})
    file = io.BytesIO()
    torch.save({"a": copy["a"]}, file)
    assert len(file.getvalue()) < 8000
    assert tensor_bytes(copy) == 404_000


def test_copies_of_nothing_are_written_whatever_their_dtypes() -> None:
    empty = [torch.empty(0), torch.empty(0, dtype=torch.int64), torch.ones(2)]
    file = io.BytesIO()
    torch.save(HostCopy().take(empty), file)
    file.seek(0)
    assert alike(torch.load(file), empty)


@pytest.mark.parametrize("embedding", [50_257 * 1600 * 4, 2**26 + 4, 5000])
def test_pinned_memory_is_hardly_more_than_what_is_copied(embedding: int) -> None:
    """Of a model whose tensors are all a bit more than a power of two, and its optimizer's two moments."""
    one = [embedding, *([2**25 + 4, 2**23 + 4, 2**20 + 4, 6400, 4] * 48)]
    sizes = one * 3
    places, chunks = packed(sizes)
    pinned = sum(1 << (size - 1).bit_length() for size in chunks)
    assert sum(sizes) <= pinned < 1.15 * sum(sizes)
    taken = sorted((chunk, start, start + size) for (chunk, start), size in zip(places, sizes, strict=True))
    for (chunk, _, end), (later, start, _) in itertools.pairwise(taken):
        assert chunk < later or end <= start
    assert all(end <= chunks[chunk] for chunk, _, end in taken)
    assert packed([]) == ([], [])
