"""Rows and pairs are validated on their first targets in file order, counted to the last one."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.config import PrepareScriptConfig
from harness.config_groups import LoaderConfig, ModelConfig, PaddedRowsConfig, PrepareConfig, TextCorpusConfig
from harness.errors import UserError
from harness.model import GPT, IGNORE
from harness.prepare import prepare
from harness.storage import PairStore, RowStore, open_split
from harness.training.evaluation import batches, bits_per_byte, evaluate
from harness.training.objectives import make_preference
from tests.helpers_prepare import texts, write_texts
from tests.helpers_runs import write_pair_set, write_row_set


def tiny_model(seed: int = 3) -> GPT:
    torch.manual_seed(seed)
    return GPT(ModelConfig(n_layer=1, n_head=2, n_embd=16), vocab_size=257, seq_len=16)


def row_store(tmp_path: Path, width: int = 17) -> RowStore:
    store = open_split(write_row_set(tmp_path / "set", width), "val")
    assert isinstance(store, RowStore)
    return store


def pair_store(tmp_path: Path) -> PairStore:
    store = open_split(write_pair_set(tmp_path / "set", 17, 9), "val")
    assert isinstance(store, PairStore)
    return store


@pytest.mark.parametrize("width", [9, 17, 30])
@pytest.mark.parametrize("tokens", [1, 7, 50, None])
def test_exactly_the_first_targets_of_rows_count(tmp_path: Path, width: int, tokens: int | None) -> None:
    store, model = row_store(tmp_path, width), tiny_model()
    rows, mask = store.read_rows(range(store.total_rows))
    columns = min(17, width)
    ids, counts = torch.from_numpy(rows.astype(np.int64))[:, :columns], mask[:, 1:columns]
    with torch.no_grad():
        log_p = torch.log_softmax(model(ids[:, :-1]), dim=-1).gather(2, ids[:, 1:, None])[..., 0]
    expected = -log_p.numpy()[counts][:tokens]
    for batch_size in (1, 3, 64):
        result = evaluate(
            model, store, tokens=tokens, batch_size=batch_size, seq_len=16, autocast=nullcontext
        )
        assert result.tokens == len(expected)
        assert result.loss == pytest.approx(expected.mean(), rel=1e-5)


@pytest.mark.parametrize("tokens", [1, 40, 10**6])
def test_the_first_pairs_count_until_their_targets_are_enough(tmp_path: Path, tokens: int) -> None:
    store = pair_store(tmp_path)
    sides = [side.read_rows(range(store.total_rows)) for side in (store.pos, store.neg)]
    targets = sum(mask[:, 1:].sum(axis=1) for _, mask in sides)
    reached = np.cumsum(targets) >= tokens
    expected = int(reached.argmax()) + 1 if reached.any() else store.total_rows
    for batch_size in (1, 3, 64):
        parts = [inputs for inputs, _ in batches(store, tokens, batch_size, 16)]
        assert all(len(part) <= 2 * batch_size for part in parts)
        for side, (rows, _) in enumerate(sides):
            seen = torch.cat([part.chunk(2)[side] for part in parts])
            width = min(16, rows.shape[1] - 1)
            assert np.array_equal(seen[:, :width].numpy(), rows[:expected, :width])


def test_pairs_are_judged_by_the_preference_whatever_the_batch_size(tmp_path: Path) -> None:
    store, model, reference = pair_store(tmp_path), tiny_model(), tiny_model(4)
    objective = make_preference(model, reference, 0.1, compiled=False)
    results = [
        evaluate(
            model, store, tokens=None, batch_size=size, seq_len=16, autocast=nullcontext, objective=objective
        )
        for size in (1, 3, 64)
    ]
    inputs, targets = next(batches(store, None, 64, 16))
    with torch.no_grad():
        whole = objective.sums(inputs, targets)
    for result in results:
        assert result.loss == pytest.approx(whole["loss"].item() / store.total_rows, rel=1e-5)
        assert result.metrics["accuracy"] == pytest.approx(whole["accuracy"].item() / store.total_rows)
        assert result.tokens == int((targets != IGNORE).sum())
        assert set(result.scores()) == {"loss", "accuracy", "reward_margin"}


def test_bits_a_byte_of_rows_are_scaled_as_those_of_the_stream(tmp_path: Path) -> None:
    """The same text, laid out both ways: the same tokens are targets, over the same bytes."""
    corpus = TextCorpusConfig(path=str(write_texts(tmp_path / "texts", texts(60))))
    bits = []
    for loader in (LoaderConfig(), PaddedRowsConfig(seq_len=16)):
        config = PrepareScriptConfig(
            corpus=corpus, prepare=PrepareConfig(val_fraction=0.3, workers=1), loader=loader
        )
        config.data.path = str(tmp_path / loader.name)
        prepare(config, report=lambda line: None)
        bits.append(bits_per_byte(math.log(2), open_split(config.data.path, "val")))
    assert bits[0] == bits[1]
    assert bits[0] is not None
    assert bits[0] > 1.0  # a boundary ends each document and is a token without bytes


def test_rows_without_a_target_are_refused(tmp_path: Path) -> None:
    store, model = row_store(tmp_path), tiny_model()
    for mask in store.mask_paths:
        np.save(mask, np.zeros((store.total_rows, 17), bool))
    with pytest.raises(UserError, match=r"val of .* has no target"):
        evaluate(model, open_split(store.manifest.directory, "val"), tokens=9, batch_size=4, seq_len=16,
                 autocast=nullcontext)  # fmt: skip


def test_the_script_computes_as_the_run_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness.training.evaluation_cli import main
    from tests.helpers_runs import rows, run, tiny_config, write_text_set

    data, path = write_text_set(tmp_path / "set"), tmp_path / "run"
    run(tiny_config(data, precision="bf16", trainer__max_steps=2), path)
    losses = {}
    for word in ("", "precision=float32"):
        words = ["evaluate.py", str(path), "tokens=200", "batch_size=4", "device=cpu", word]
        monkeypatch.setattr("sys.argv", list(filter(None, words)))
        main()
        losses[word] = json.loads(capsys.readouterr().out)["loss"]
    assert losses[""] == rows(path)[-1]["val_loss"] != losses["precision=float32"]


def test_the_script_evaluates_runs_of_every_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    from harness.config_groups import ContrastiveRowsConfig
    from harness.training.evaluation_cli import main
    from tests.helpers_runs import rows, run, tiny_config

    expected = {
        "rows": (write_row_set(tmp_path / "rows"), PaddedRowsConfig(seq_len=16, batch_size=4)),
        "pairs": (write_pair_set(tmp_path / "pairs"), ContrastiveRowsConfig(seq_len=16, batch_size=4)),
    }
    for name, (data, loader) in expected.items():
        run(tiny_config(data, loader=loader, trainer__max_steps=2), tmp_path / f"run-{name}")
        arguments = ["evaluate.py", str(tmp_path / f"run-{name}"), "tokens=200", "device=cpu"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", arguments)
            main()
        answer = json.loads(capsys.readouterr().out)
        logged = rows(tmp_path / f"run-{name}")[-1]
        scores = {key: answer[key.removeprefix("val_")] for key in logged if key.startswith("val_")}
        assert scores == {key: pytest.approx(logged[key]) for key in scores}
        assert ("accuracy" in answer) == (name == "pairs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["evaluate.py", str(tmp_path / "run-rows"), f"set={tmp_path / 'pairs'}"])
        with pytest.raises(SystemExit) as stop:
            main()
    assert stop.value.code == 2
    assert "loader=padded_rows keeps none" in capsys.readouterr().err
