"""The data chain says which batches a run has seen, in which order, and costs the step nothing but a wait."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.auditing.data_chain import DataChain, batch_sha256, first_value, link
from harness.errors import UserError
from harness.loaders import Batch, TokenDataLoader
from harness.storage import open_store
from tests.helpers_runs import rows, run, tiny_config, train_rows, write_text_set
from tests.helpers_sets import write_set

START = "ab" * 32


def _batch(seed: int, shape: tuple[int, int] = (3, 5)) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    windows = torch.randint(0, 257, (shape[0], shape[1] + 1), generator=generator)
    return Batch(windows[:, :-1], windows[:, 1:], {})  # views with gaps between their rows


def _expected(start: str, batches: list[Batch]) -> tuple[list[str], list[str]]:
    """Every batch's hash and the chain after it, by the definition."""
    hashes, values, value = [], [], bytes.fromhex(start)
    for batch in batches:
        parts = [np.array(tensor.tolist(), "<i8").tobytes() for tensor in (batch.inputs, batch.targets)]
        digest = hashlib.sha256(parts[0] + parts[1]).digest()
        value = hashlib.sha256(value + digest).digest()
        hashes.append(digest.hex())
        values.append(value.hex())
    return hashes, values


def test_a_batch_is_hashed_as_its_int64_bytes_whatever_its_strides() -> None:
    batch = _batch(0)
    copy = Batch(batch.inputs.clone(), batch.targets.clone(), {})
    (expected,), _ = _expected(START, [batch])
    assert batch_sha256(batch) == batch_sha256(copy) == expected


def test_the_chain_links_every_batch_in_order() -> None:
    batches = [_batch(seed) for seed in range(20)]
    hashes, values = _expected(START, batches)
    with DataChain(START) as chain:
        assert chain.value() == START
        for batch, sha256, value in zip(batches[:10], hashes, values, strict=False):
            chain.add(batch)
            assert (chain.last_sha256(), chain.value()) == (sha256, value)
        for batch in batches[10:]:
            chain.add(batch)
        assert (chain.last_sha256(), chain.value()) == (hashes[-1], values[-1])
    with DataChain(values[9]) as chain:  # and goes on from any value of it
        for batch in batches[10:]:
            chain.add(batch)
        assert chain.value() == values[-1]


def test_without_a_chain_batches_are_hashed_only_on_request() -> None:
    with DataChain(None) as chain:
        chain.add(_batch(0))
        assert chain.value() is None
        assert threading.active_count() == len(threading.enumerate())
        assert "data-chain" not in [thread.name for thread in threading.enumerate()]
    with DataChain(None, hash_batches=True) as chain:
        chain.add(_batch(0))
        assert chain.value() is None
        assert chain.last_sha256() == batch_sha256(_batch(0))


class _Slow:
    """A tensor that is on its way to the host until it is let go."""

    def __init__(self, tensor: torch.Tensor, go: threading.Event) -> None:
        self.tensor, self.go = tensor, go

    def cpu(self) -> torch.Tensor:
        assert self.go.wait(30)
        return self.tensor


def test_batches_wait_instead_of_piling_up() -> None:
    go, added = threading.Event(), []
    plain = _batch(0)
    slow: Any = Batch(_Slow(plain.inputs, go), plain.targets, {})  # type: ignore[arg-type]
    with DataChain(START) as chain:

        def add_many() -> None:
            for number in range(10):
                chain.add(slow)
                added.append(number)

        adding = threading.Thread(target=add_many)
        adding.start()
        adding.join(0.3)
        assert len(added) <= 3  # one is hashed, two wait
        go.set()
        adding.join(30)
        assert chain.value() == _expected(START, [plain] * 10)[1][-1]


def test_an_error_of_the_thread_is_raised_by_whoever_asks_next() -> None:
    broken: Any = Batch(None, None, {})  # type: ignore[arg-type]
    chain = DataChain(START)
    chain.add(broken)
    with pytest.raises(AttributeError):
        chain.value()
    for call in (chain.value, chain.last_sha256, lambda: chain.add(_batch(0))):
        with pytest.raises(AttributeError):
            call()
    chain.close()
    assert "data-chain" not in [thread.name for thread in threading.enumerate()]


def test_an_accepted_change_of_the_data_is_one_more_link() -> None:
    old, new = "11" * 32, "22" * 32
    saved = {"data_chain": START, "metadata_sha256": old}
    assert first_value(new, None) == new
    assert first_value(old, saved) == START
    assert first_value(new, saved) == link(bytes.fromhex(START), bytes.fromhex(new)).hex()
    assert first_value(new, saved | {"data_chain": None}) is None
    assert first_value(new, {"metadata_sha256": old}) is None


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_text_set(tmp_path / "set")


def _batches(data: Path, count: int) -> list[Batch]:
    loader = TokenDataLoader(open_store(data, "train"), 4, 16)
    return [loader.next_batch() for _ in range(count)]


def _trainer(path: Path, step: int) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((path / f"checkpoints/step-{step:08d}/trainer.json").read_text())
    return record


def test_every_row_and_checkpoint_of_a_run_has_the_chain(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(tiny_config(data, trainer__log_interval=3, trainer__log_batch_hash=False), path)
    digest = open_store(data, "train").metadata_sha256
    _, values = _expected(digest, _batches(data, 12))
    found = rows(path)
    assert [row["step"] for row in found if "loss" in row] == [3, 6, 9, 12]
    assert [row["step"] for row in found if "val_loss" in row] == [5, 10, 12]
    assert all(row["data_chain"] == values[row["step"] - 1] for row in found)
    for step in (4, 8, 12):
        assert _trainer(path, step)["data_chain"] == values[step - 1]


def test_a_resumed_run_and_a_branch_go_on_with_the_chain(data: Path, tmp_path: Path) -> None:
    straight, path, branch = tmp_path / "straight", tmp_path / "run", tmp_path / "branch"
    run(tiny_config(data), straight)
    run(tiny_config(data, trainer__max_steps=4), path)
    run(tiny_config(data, resume=str(path)), path)
    assert train_rows(path) == train_rows(straight)
    run(tiny_config(data, resume=str(straight / "checkpoints/step-00000008")), branch)
    assert train_rows(branch) == train_rows(straight)[8:]
    assert _trainer(branch, 12)["lineage"][1]["data_chain"] == train_rows(straight)[7]["data_chain"]


def test_shards_that_were_accepted_are_a_link_of_their_own(tmp_path: Path) -> None:
    shards = np.random.default_rng(7).integers(0, 257, (4, 200)).tolist()
    splits = {"train": shards[:2], "val": shards[3:]}
    data, path = write_set(tmp_path / "set", splits, preparation={"corpus": "stdlib"}), tmp_path / "run"
    run(tiny_config(data, trainer__max_steps=4), path)
    before = train_rows(path)[-1]["data_chain"]
    write_set(data, splits | {"train": shards[:3]}, preparation={"corpus": "stdlib"})
    run(tiny_config(data, trainer__max_steps=5, resume=str(path), resume_accept=["data"]), path)
    new = open_store(tmp_path / "set", "train").metadata_sha256
    assert new != _trainer(path, 4)["metadata_sha256"]
    started = link(bytes.fromhex(before), bytes.fromhex(new))
    assert _trainer(path, 5)["lineage"][-1]["data_chain"] == started.hex()
    last = train_rows(path)[-1]
    assert last["data_chain"] == link(started, bytes.fromhex(last["batch_sha256"])).hex()


def test_a_chain_that_was_broken_off_is_absent_and_never_begun_again(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(tiny_config(data, trainer__max_steps=4), path)
    off = tiny_config(data, trainer__max_steps=8, resume=str(path), trainer__data_chain=False)
    run(off, path)
    run(tiny_config(data, resume=str(path)), path)
    assert ["data_chain" in row for row in train_rows(path)] == [True] * 4 + [False] * 8
    assert "no data chain: step 8 was saved without one" in (path / "train.log").read_text()
    assert _trainer(path, 8)["data_chain"] is _trainer(path, 12)["data_chain"] is None
    assert all("batch_sha256" in row for row in train_rows(path))


def test_an_error_while_hashing_ends_the_run_in_words(data: Path, tmp_path: Path) -> None:
    from harness.auditing import data_chain

    def failing(batch: Batch) -> bytes:
        raise UserError("the batch cannot be hashed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_chain, "batch_digest", failing)
        with pytest.raises(UserError, match="the batch cannot be hashed"):
            run(tiny_config(data), tmp_path / "run")
    assert "data-chain" not in [thread.name for thread in threading.enumerate()]
