"""DESIGN's contract of a loader, as checks that every strategy's tests call."""

from __future__ import annotations

import itertools
import json
import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from harness.errors import UserError
from harness.loaders import Batch, Loader, Prefetcher, prefetch

# Builds a fresh loader of one strategy; takes `rank`, `world_size` and `seed`, as the loaders do.
MakeLoader = Callable[..., Any]

_IN_EVERY_STATE = ["format_version", "position", "batch_size", "seq_len", "split", "metadata_sha256"]
_IN_SAMPLED_STATES = ["strategy", "epoch", "seed", "epoch_seed"]


def batches(loader: Loader) -> Iterator[Batch]:
    """What is left of the epoch."""
    while True:
        try:
            yield loader.next_batch()
        except StopIteration:
            return


def assert_same(first: list[Batch], second: list[Batch]) -> None:
    """The same batches and cursors, as often."""
    assert [batch.cursor for batch in first] == [batch.cursor for batch in second]
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.inputs, b.inputs)
        assert torch.equal(a.targets, b.targets)


def check_sampled_loader(make: MakeLoader, *, ranks: tuple[int, ...] = (1, 2, 4), parts: int = 1) -> None:
    """All checks below. `make` must give a loader of three batches of 4 samples or more, and a rest.

    `parts`: in how many equal blocks of rows a batch holds the samples (2 for pairs: the `pos` rows, then
    the `neg` rows).
    """
    check_epoch_is_a_pure_function(make)
    check_end_of_epoch(make)
    check_resume_at_every_batch(make)
    check_prefetch_changes_nothing(make)
    check_ranks_share_the_batch(make, ranks, parts)
    check_bad_states_are_refused(make)


def check_epoch_is_a_pure_function(make: MakeLoader) -> None:
    """Shapes, the same batches from another object and after `reset`, and batches that are never changed."""
    loader = make()
    epoch = list(batches(loader))
    copies = [Batch(b.inputs.clone(), b.targets.clone(), dict(b.cursor)) for b in epoch]
    for batch in epoch:
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert batch.inputs.shape == batch.targets.shape
        assert batch.inputs.shape[1] == loader.seq_len
    loader.reset()
    assert loader.position == 0
    assert_same(list(batches(loader)), epoch)
    loader.start_epoch(1)
    other = list(batches(loader))
    assert [batch.cursor["epoch"] for batch in other] == [1] * len(epoch)
    assert_same(epoch, copies)
    assert_same(list(batches(make())), epoch)
    assert_same(list(batches(_started(make(), 1))), other)


def check_end_of_epoch(make: MakeLoader) -> None:
    """`batches_per_epoch` of them, then StopIteration for ever, before anything is read or moved."""
    loader = make()
    epoch = list(batches(loader))
    assert len(epoch) == loader.batches_per_epoch > 0
    end = loader.state_dict()
    assert end == epoch[-1].cursor
    for _ in range(2):
        with pytest.raises(StopIteration):
            loader.next_batch()
        assert loader.state_dict() == end
    with pytest.raises(UserError, match="epoch=-1"):
        loader.start_epoch(-1)
    assert loader.state_dict() == end


def check_resume_at_every_batch(make: MakeLoader) -> None:
    """From each cursor of two epochs, their ends included, a fresh loader gives exactly the rest."""
    for epoch in (0, 1):
        loader = _started(make(), epoch)
        cursors = [loader.state_dict()]
        whole = []
        for batch in batches(loader):
            whole.append(batch)
            cursors.append(batch.cursor)
        for step, cursor in enumerate(cursors):
            resumed = make()
            before = resumed.state_dict()
            saved = json.loads(json.dumps(cursor))
            assert resumed.validate_state_dict(saved) == cursor["position"]
            assert resumed.state_dict() == before
            resumed.load_state_dict(saved)
            assert resumed.state_dict() == cursor
            assert_same(list(batches(resumed)), whole[step:])


def check_prefetch_changes_nothing(make: MakeLoader, depths: tuple[int, ...] = (0, 1, 8)) -> None:
    """The same two epochs and the rest after a resume: 0, 1 and 8 batches ahead, by a thread and not."""
    plain = [list(batches(_started(make(), epoch))) for epoch in (0, 1)]
    for depth, step in itertools.product(depths, (0.0, prefetch._STEP)):
        with pytest.MonkeyPatch.context() as patch, Prefetcher(make(), depth) as loader:
            patch.setattr(prefetch, "_STEP", step)
            for epoch in (0, 1):
                loader.start_epoch(epoch)
                assert_same(list(batches(loader)), plain[epoch])
            loader.load_state_dict(plain[0][0].cursor)
            assert_same(list(batches(loader)), plain[0][1:])


def check_ranks_share_the_batch(make: MakeLoader, ranks: tuple[int, ...], parts: int = 1) -> None:
    """Each rank's rows, put together, are the global batch; one cursor for all of them."""
    whole = list(batches(make()))
    for world_size in ranks:
        split = [list(batches(make(rank=rank, world_size=world_size))) for rank in range(world_size)]
        for step, batch in enumerate(whole):
            assert all(one[step].cursor == batch.cursor for one in split)
            for ours, theirs in (("inputs", batch.inputs), ("targets", batch.targets)):
                blocks = [getattr(one[step], ours).chunk(parts) for one in split]
                joined = torch.cat([torch.cat(part) for part in zip(*blocks, strict=True)])
                assert torch.equal(joined, theirs)
        last = make(rank=world_size - 1, world_size=world_size)
        last.load_state_dict(whole[0].cursor)
        assert_same(list(batches(last)), split[-1][1:])


def check_bad_states_are_refused(make: MakeLoader) -> None:
    """Each field alone, missing, unknown or of another type or value, is named; nothing moves."""
    loader = make()
    loader.next_batch()
    good = loader.state_dict()
    assert [key for key in _IN_EVERY_STATE + _IN_SAMPLED_STATES if key not in good] == []
    for key, value in good.items():
        for wrong in (_other(key, value), [value], None, float(value) if type(value) is int else 1.5):
            _refused(loader, good | {key: wrong}, f"Incompatible loader {key}: checkpoint ")
        if type(value) is int:
            _refused(loader, good | {key: bool(value)}, f"Incompatible loader {key}: checkpoint ")
        rest = {other: kept for other, kept in good.items() if other != key}
        _refused(loader, rest, "Incompatible loader s")  # a missing strategy is another strategy
    _refused(loader, good | {"position": 10**15}, "position: checkpoint 1000000000000000, but it must lie")
    _refused(loader, good | {"colour": 1}, "unknown colour")
    _refused(loader, [1], "is not a mapping")


def _other(key: str, value: Any) -> Any:
    if key in ("epoch", "position"):
        return -1
    return value + 1 if type(value) is int else f"{value}x"


def _refused(loader: Any, state: Any, message: str) -> None:
    before = loader.state_dict()
    for call in (loader.validate_state_dict, loader.load_state_dict):
        with pytest.raises(UserError) as caught:
            call(state)
        assert message in str(caught.value)
    assert loader.state_dict() == before


def _started(loader: Any, epoch: int) -> Any:
    loader.start_epoch(epoch)
    return loader


def check_processes_agree(makes: list[MakeLoader]) -> None:
    """Fresh loaders in a forked and two spawned processes, all at once, and used ones in the forked one.

    Each of `makes` must be picklable: a `functools.partial` of the class and an open store.
    """
    loaders = [make() for make in makes]
    expected = [_epoch_bytes(make()) for make in makes]
    for loader in loaders:
        loader.next_batch()
    running = []
    for method in ("spawn", "spawn", "fork"):
        context = multiprocessing.get_context(method)
        ours, theirs = context.Pipe()
        process = context.Process(  # type: ignore[attr-defined]
            target=_send_epochs, args=(theirs, makes, loaders if method == "fork" else [])
        )
        process.start()
        theirs.close()
        running.append((process, ours))
    for process, ours in running:
        assert ours.poll(60)
        fresh, used = ours.recv()
        process.join(60)
        assert process.exitcode == 0
        assert fresh == expected
        assert used in ([], [epoch[1:] for epoch in expected])
    assert [_epoch_bytes(loader) for loader in loaders] == [epoch[1:] for epoch in expected]


def _send_epochs(connection: Any, makes: list[MakeLoader], used: list[Any]) -> None:
    connection.send(([_epoch_bytes(make()) for make in makes], [_epoch_bytes(loader) for loader in used]))


def _epoch_bytes(loader: Any) -> list[tuple[bytes, bytes]]:
    return [(b.inputs.numpy().tobytes(), b.targets.numpy().tobytes()) for b in batches(loader)]
