"""A shard can be followed while another process writes it: growth is seen, no wrong token, no hang."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from harness.errors import UserError
from harness.prepare import HDF5ShardWriter
from harness.storage import open_growing
from harness.storage.growing import growing_path

CHUNK = 128


def _tokens(start: int, stop: int) -> np.ndarray:
    """The tokens that every shard here has: no zero, which is what HDF5 reads where nothing was written."""
    return (np.arange(start, stop) * 7919 % 65_521 + 1).astype("<u2")


def _write(path: Path, orders: Connection, options: dict[str, Any]) -> None:
    """A writer in a process of its own: a number appends so many tokens, "close" or "fail" ends it."""
    written = 0
    with HDF5ShardWriter(path, chunk_tokens=CHUNK, growing=True, **options) as writer:
        orders.send("open")
        while (order := orders.recv()) != "close":
            if order == "fail":
                raise SystemExit(0)
            writer.write(_tokens(written, written + order))
            written += order
            orders.send(written)
    orders.send("closed")


@contextmanager
def _writer(path: Path, **options: Any) -> Iterator[tuple[multiprocessing.process.BaseProcess, Connection]]:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_write, args=(path, theirs, options))
    process.start()
    theirs.close()
    try:
        assert ours.recv() == "open"
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()


def _order(orders: Connection, order: object) -> object:
    orders.send(order)
    return orders.recv()


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_growth_is_seen_chunk_by_chunk_until_the_shard_is_finished(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "train_00000.h5"
    with _writer(path, compression=compression) as (_, orders), open_growing(path) as shard:
        assert (len(shard), shard.finished) == (0, False)
        total = 0
        for more, seen in ((5, 0), (CHUNK - 5, 1), (2 * CHUNK + 7, 3), (997 * CHUNK - 8, 999)):
            total += more
            assert _order(orders, more) == total
            seen *= CHUNK
            assert shard.refresh() == shard.tokens == len(shard) == seen
            assert np.array_equal(shard.read(0, seen), _tokens(0, seen))
        assert np.array_equal(shard.read(CHUNK - 3, 2 * CHUNK), _tokens(CHUNK - 3, 3 * CHUNK - 3))
        assert not path.exists()
        assert _order(orders, "close") == "closed"
        assert len(shard) == 999 * CHUNK
        assert np.array_equal(shard.read(5, 999 * CHUNK - 5), _tokens(5, 999 * CHUNK))
        assert (shard.refresh(), shard.finished) == (total, True)
        assert np.array_equal(shard.read(0, total), _tokens(0, total))
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    with open_growing(path) as shard:
        assert (len(shard), shard.finished, shard.dtype) == (total, True, np.dtype("<u2"))
        assert np.array_equal(shard.read(7, 300), _tokens(7, 307))


def test_a_shard_that_was_followed_is_the_same_file_as_any_other(tmp_path: Path) -> None:
    for growing in (False, True):
        with HDF5ShardWriter(tmp_path / f"{growing}.h5", chunk_tokens=CHUNK, growing=growing) as writer:
            writer.write(_tokens(0, 1000), documents=3)
    assert (tmp_path / "True.h5").read_bytes() == (tmp_path / "False.h5").read_bytes()


def _write_fast(path: Path, chunks: int) -> None:
    with HDF5ShardWriter(path, chunk_tokens=CHUNK, growing=True) as writer:
        for number in range(chunks):
            writer.write(_tokens(number * CHUNK, (number + 1) * CHUNK))
        time.sleep(0.2)


def test_no_token_is_ever_wrong_while_the_writer_runs_freely(tmp_path: Path) -> None:
    path, chunks = tmp_path / "train_00000.h5", 1500
    process = multiprocessing.get_context("spawn").Process(target=_write_fast, args=(path, chunks))
    process.start()
    while not growing_path(path).exists():
        time.sleep(0.001)
    sizes = {0}
    with open_growing(path) as shard:
        while not shard.finished:
            seen = len(shard)
            sizes.add(shard.refresh())
            assert np.array_equal(shard.read(seen, len(shard) - seen), _tokens(seen, len(shard)))
        assert np.array_equal(shard.read(0, len(shard)), _tokens(0, chunks * CHUNK))
    process.join()
    assert process.exitcode == 0
    assert len(sizes) > 3


def test_a_length_that_runs_ahead_of_the_data_gives_no_tokens(tmp_path: Path) -> None:
    path = tmp_path / "train_00000.h5"
    writer = HDF5ShardWriter(path, chunk_tokens=CHUNK, growing=True)
    writer.write(_tokens(0, 2 * CHUNK))
    writer._shard._dataset.resize((10 * CHUNK,))
    writer._shard._dataset.flush()
    with open_growing(path) as shard:
        assert shard._dataset.shape == (10 * CHUNK,)
        assert shard.refresh() == 2 * CHUNK
    writer.abandon()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_writer_is_an_error_and_what_was_seen_stays(tmp_path: Path) -> None:
    path = tmp_path / "train_00000.h5"
    with _writer(path) as (process, orders), open_growing(path) as shard:
        _order(orders, 3 * CHUNK)
        shard.refresh()
        _order(orders, CHUNK)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        for _ in range(2):
            with pytest.raises(UserError, match=r"no writer any more.*after 384 tokens were seen"):
                shard.refresh()
        assert np.array_equal(shard.read(0, len(shard)), _tokens(0, 3 * CHUNK))
    with pytest.raises(UserError, match="no writer any more"):
        open_growing(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["train_00000.h5.growing"]
    with pytest.raises(UserError, match=r"train_00000\.h5\.growing exists.*a killed writer leaves"):
        HDF5ShardWriter(path, growing=True)


def test_a_writer_that_gives_up_leaves_nothing_and_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "train_00000.h5"
    with _writer(path) as (process, orders), open_growing(path) as shard:
        _order(orders, CHUNK)
        shard.refresh()
        orders.send("fail")
        process.join()
        with pytest.raises(UserError, match="killed or gave up"):
            shard.refresh()
        assert np.array_equal(shard.read(0, CHUNK), _tokens(0, CHUNK))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("share", [0, 0.5, 0.999])
def test_a_file_cut_short_under_its_writer_is_an_error_and_no_hang(tmp_path: Path, share: float) -> None:
    path = tmp_path / "train_00000.h5"
    with _writer(path) as (_, orders), open_growing(path) as shard:
        _order(orders, 1000 * CHUNK)
        shard.refresh()
        os.truncate(growing_path(path), int(growing_path(path).stat().st_size * share))
        with pytest.raises(UserError, match="it was cut short while it was written"):
            shard.refresh()
        if share == 0:
            with pytest.raises(UserError, match=r"growing is \d+ bytes long, but its tokens reach to byte"):
                shard.read(990 * CHUNK, CHUNK)


def test_another_writer_under_the_same_name_is_not_taken_for_the_one_that_was_followed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "train_00000.h5"
    with _writer(path) as (process, orders), open_growing(path) as shard:
        _order(orders, 2 * CHUNK)
        shard.refresh()
        process.kill()
        process.join()
        growing_path(path).unlink()
        with _writer(path) as (_, other):
            _order(other, CHUNK)
            with pytest.raises(UserError, match="no writer any more"):
                shard.refresh()
            _order(other, "close")
        with pytest.raises(UserError, match=r"has 128 tokens of uint16, but 256 were seen growing"):
            shard.refresh()


def test_what_is_not_there_cannot_be_followed_or_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neither .*a\.h5 nor a\.h5\.growing is there"):
        open_growing(tmp_path / "a.h5")
    with HDF5ShardWriter(tmp_path / "a.h5") as writer:
        writer.write([1, 2, 3])
    with open_growing(tmp_path / "a.h5") as shard:
        assert shard.read(3, 0).tolist() == []
        for start, count in ((0, 4), (4, 0), (-1, 1), (1, -1)):
            with pytest.raises(UserError, match=r"has 3 so far"):
                shard.read(start, count)


def _other_program(path: Path, orders: Connection, swmr: bool) -> None:
    with h5py.File(path, "w", libver="latest" if swmr else None) as file:
        file.create_dataset("tokens", data=[1], maxshape=(None,))
        if swmr:
            file.swmr_mode = True
        file.flush()
        orders.send("open")
        orders.recv()


@pytest.mark.parametrize("swmr", [True, False])
def test_a_file_that_another_program_is_writing_is_refused_in_words(tmp_path: Path, swmr: bool) -> None:
    path = tmp_path / "a.h5"
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_other_program, args=(path, theirs, swmr))
    process.start()
    theirs.close()
    assert ours.recv() == "open"
    with pytest.raises(UserError, match=r"marked as being written"):
        open_growing(path)
    ours.send("close")
    process.join()
    with open_growing(path) as shard:
        assert shard.finished


@pytest.mark.parametrize("locking", [None, False])
def test_a_shard_may_be_open_elsewhere_in_this_process(tmp_path: Path, locking: bool | None) -> None:
    with HDF5ShardWriter(tmp_path / "a.h5", compression="gzip") as writer:
        writer.write([1, 2, 3])
    with h5py.File(tmp_path / "a.h5", locking=locking), open_growing(tmp_path / "a.h5") as shard:
        assert shard.read(0, 3).tolist() == [1, 2, 3]
