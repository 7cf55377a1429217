"""A run never says one corpus or tokenizer and reads another."""

from __future__ import annotations

import contextlib
import json
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.config import PrepareScriptConfig, TrainConfig, set_directory
from harness.config_groups import (
    BpeTokenizerConfig,
    ContrastiveRowsConfig,
    CorpusConfig,
    Hdf5DataConfig,
    HfTokenizerConfig,
    JsonlCorpusConfig,
    LoaderConfig,
    PaddedRowsConfig,
    PrepareConfig,
    TextCorpusConfig,
)
from harness.data_setup import open_data, unprepared
from harness.errors import UserError
from harness.prepare import prepare
from tests.helpers_runs import run, tiny_config, write_pair_set, write_row_set, write_text_set
from tests.helpers_sets import random_rows, write_rows


def write_texts(folder: Path, word: str) -> Path:
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02d}.txt").write_text(f"{word} {number} " * 30)
    return folder


def text_run(tmp_path: Path, texts: Path | None, **changes: object) -> TrainConfig:
    corpus = TextCorpusConfig(path=None if texts is None else str(texts))
    return tiny_config(
        tmp_path / "set", corpus=corpus, prepare__val_fraction=0.3, trainer__max_steps=2, **changes
    )


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """The texts that the set at `tmp_path/set` was prepared from."""
    texts = write_texts(tmp_path / "texts", "alpha")
    config = PrepareScriptConfig(
        corpus=TextCorpusConfig(path=str(texts)), prepare=PrepareConfig(val_fraction=0.3, workers=1)
    )
    config.data.path = str(tmp_path / "set")
    prepare(config, report=lambda line: None)
    return texts


def test_another_corpus_folder_than_the_sets_is_refused_with_both(prepared: Path, tmp_path: Path) -> None:
    other = write_texts(tmp_path / "other", "beta")
    with pytest.raises(UserError) as error:
        run(text_run(tmp_path, other), tmp_path / "run")
    assert f"corpus.path: the set {prepared}, the configuration {other}" in str(error.value)
    assert "corpus.path=null" in str(error.value)
    assert not (tmp_path / "run").exists()


def test_the_sets_own_folder_and_no_folder_at_all_are_accepted(prepared: Path, tmp_path: Path) -> None:
    run(text_run(tmp_path, prepared), tmp_path / "named")
    run(text_run(tmp_path, None), tmp_path / "unnamed")


def test_other_settings_than_the_sets_are_named_with_their_overrides(prepared: Path, tmp_path: Path) -> None:
    config = text_run(tmp_path, prepared, prepare__max_document_tokens=7)
    config.prepare.val_fraction = 0.1
    with pytest.raises(UserError) as error:
        run(config, tmp_path / "run")
    text = str(error.value)
    assert "prepare.val_fraction: the set 0.3, the configuration 0.1" in text
    assert "prepare.max_document_tokens: the set None, the configuration 7" in text
    assert "prepare.val_fraction=0.3" in text
    assert "prepare.max_document_tokens=null" in text


def test_another_tokenizer_file_than_the_sets_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    data = write_text_set(tmp_path / "set", tokenizer={"name": "hf", "sha256": "0" * 64})
    config = tiny_config(data, tokenizer=HfTokenizerConfig(path=str(tmp_path / "tokenizer.json")))
    with pytest.raises(UserError, match=r"tokenizer\.path: the set sha256 0{64}, the configuration .*json"):
        run(config, tmp_path / "run")


def test_a_missing_set_of_unnamed_text_asks_for_its_path(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)no prepared set at .*prepare_data\.py.*corpus\.path=PATH"):
        run(text_run(tmp_path, None), tmp_path / "run")


def test_an_id_beyond_the_vocabulary_in_the_validation_part_stops_before_the_first_step(
    tmp_path: Path,
) -> None:
    data = write_text_set(tmp_path / "set")
    shard = data / "val_00000.npy"
    tokens = np.load(shard)
    tokens[150] = 999
    np.save(shard, tokens)
    with pytest.raises(
        UserError, match=r"val_00000\.npy holds token id 999 at position 150 of val.* 257 ids"
    ):
        run(tiny_config(data), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_validation_split_shorter_than_a_sequence_names_the_length_that_fits(tmp_path: Path) -> None:
    data = write_text_set(tmp_path / "set", val_tokens=12)
    with pytest.raises(UserError, match=r"loader\.seq_len=16 needs 17 tokens, but val has 12 .*seq_len<=11"):
        run(tiny_config(data), tmp_path / "run")


def test_a_damaged_manifest_names_the_command_that_makes_it_anew(tmp_path: Path) -> None:
    data = write_text_set(tmp_path / "set")
    raw = json.loads((data / "metadata.json").read_text())
    raw["format_version"] = 9
    (data / "metadata.json").write_text(json.dumps(raw))
    with pytest.raises(UserError, match=rf"prepare_data\.py data=npy corpus=stdlib .*data\.path={data}"):
        run(tiny_config(data), tmp_path / "run")


@pytest.mark.parametrize(
    ("writer", "loader", "message"),
    [
        (write_row_set, LoaderConfig, r"loader: the set padded_rows, the configuration sequential"),
        (write_pair_set, LoaderConfig, r"loader: the set contrastive_rows, the configuration sequential"),
        (write_text_set, PaddedRowsConfig, r"loader: the set sequential, the configuration padded_rows"),
        (
            write_row_set,
            ContrastiveRowsConfig,
            r"loader: the set padded_rows, the configuration contrastive_rows",
        ),
    ],
)
def test_a_set_of_another_layout_is_named_with_the_loader_that_reads_it(
    tmp_path: Path, writer: Callable[[Path], Path], loader: type[LoaderConfig], message: str
) -> None:
    with pytest.raises(UserError, match=message) as error:
        run(tiny_config(writer(tmp_path / "set"), loader=loader(seq_len=16, batch_size=4)), tmp_path / "run")
    wanted = message.split()[3].rstrip(",")
    assert f"To train on this set say so: loader={wanted}" in str(error.value)
    assert not (tmp_path / "run").exists()


def test_another_row_width_than_the_sets_is_named_with_both(tmp_path: Path) -> None:
    data = write_row_set(tmp_path / "set", width=33)
    config = tiny_config(data, loader=PaddedRowsConfig(seq_len=16, batch_size=4, row_width=17))
    with pytest.raises(UserError, match=r"row_width: the set 33, the configuration 17") as error:
        run(config, tmp_path / "run")
    assert "loader.row_width=33" in str(error.value)
    config.loader = PaddedRowsConfig(seq_len=16, batch_size=4, row_width=33)
    config.trainer.max_steps = 1
    run(config, tmp_path / "run")


def test_another_storage_than_the_sets_is_named_with_both(tmp_path: Path) -> None:
    storage = {"format": "hdf5", "chunk_tokens": 512, "compression": "gzip"}
    data = write_text_set(tmp_path / "set", storage=storage)
    with pytest.raises(UserError, match=r"data: the set hdf5, the configuration npy") as error:
        run(tiny_config(data), tmp_path / "run")
    assert "To train on this set say so: data=hdf5" in str(error.value)
    config = tiny_config(data)
    config.data = Hdf5DataConfig(path=str(data))
    with pytest.raises(UserError) as error:
        run(config, tmp_path / "run")
    assert "data.compression: the set gzip, the configuration none" in str(error.value)
    assert "data.chunk_tokens: the set 512, the configuration 65536" in str(error.value)


@pytest.mark.parametrize(
    ("recorded", "config", "message", "mend"),
    [
        (
            {"bpe_vocab_size": 300, "bpe_train_bytes": 1000},
            {"tokenizer": BpeTokenizerConfig(vocab_size=257, train_bytes=2000)},
            "tokenizer.vocab_size: the set 300, the configuration 257",
            "tokenizer.vocab_size=300 tokenizer.train_bytes=1000",
        ),
        ({"sharding": "source"}, {}, "prepare.sharding: the set source, the configuration tokens", "=source"),
        (
            {"shard_tokens": 100_000_000},
            {"prepare__sharding": "source"},
            "prepare.sharding: the set tokens, the configuration source",
            "prepare.sharding=tokens",
        ),
        (
            {"pair_fields": ["a", "b", "c"]},
            {"corpus": JsonlCorpusConfig(), "loader": ContrastiveRowsConfig(seq_len=16, batch_size=4)},
            "corpus.pair_fields: the set ['a', 'b', 'c'], the configuration ['prompt', 'chosen', 'rejected']",
            "'corpus.pair_fields=[a,b,c]'",
        ),
    ],
)
def test_every_recorded_setting_is_named_by_its_key(
    tmp_path: Path, recorded: dict[str, object], config: dict[str, Any], message: str, mend: str
) -> None:
    write = write_pair_set if "loader" in config else write_text_set
    corpus = "jsonl" if "corpus" in config else "stdlib"
    data = write(
        tmp_path / "set", preparation={"corpus": corpus, **recorded},
        tokenizer={"name": "bpe" if "tokenizer" in config else "byte"},
    )  # fmt: skip
    with pytest.raises(UserError) as error:
        run(tiny_config(data, **config), tmp_path / "run")
    assert message in str(error.value)
    assert mend in str(error.value)


@pytest.mark.parametrize("name", ["padded_rows", "contrastive_rows"])
def test_the_embedded_corpus_is_prepared_for_every_loader(tmp_path: Path, name: str) -> None:
    """Of a fresh machine; here the standard library is a folder of a few files."""
    loader = {"padded_rows": PaddedRowsConfig, "contrastive_rows": ContrastiveRowsConfig}[name]
    (tmp_path / "library").mkdir()
    for number in range(60):
        (tmp_path / "library" / f"m{number}.py").write_text(f"value = {number} + {number % 7}\n" * 9)
    config = tiny_config(tmp_path, loader=loader(seq_len=16, batch_size=4), trainer__max_steps=1)
    config.data.path, config.data.root = None, str(tmp_path / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "library"))
        run(config, tmp_path / "run")
    layout = "rows17" if name == "padded_rows" else "contrastive17"
    assert (tmp_path / "data" / f"npy-{layout}" / "metadata.json").is_file()


def test_a_copy_of_the_set_for_validation_is_verified_beside_the_set(tmp_path: Path) -> None:
    data, copy = (write_text_set(tmp_path / name) for name in ("set", "copy"))
    tokens = np.load(data / "train_00000.npy")
    tokens[5] ^= 1
    np.save(data / "train_00000.npy", tokens)
    with pytest.raises(UserError, match=r"set/train_00000\.npy: SHA-256"):
        run(tiny_config(data, evaluation__set=str(copy)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_command_for_another_set_names_each_key_once_and_every_file_it_needs(tmp_path: Path) -> None:
    data = write_text_set(tmp_path / "set", preparation={"corpus": "text"})
    with pytest.raises(UserError) as error:
        run(tiny_config(data, corpus=JsonlCorpusConfig()), tmp_path / "run")
    command = str(error.value).splitlines()[-1]
    assert command.endswith("corpus=jsonl tokenizer=byte corpus.path=PATH data.path=ANOTHER_FOLDER")


def test_the_command_for_more_text_names_every_file_it_needs(tmp_path: Path) -> None:
    data = write_text_set(tmp_path / "set", preparation={"corpus": "text"})
    config = tiny_config(data, corpus=TextCorpusConfig(), loader__seq_len=100_000)
    with pytest.raises(
        UserError, match=r"corpus=text tokenizer=byte .*corpus\.path=PATH prepare\.overwrite=true"
    ):
        run(config, tmp_path / "run")


def test_a_missing_set_for_validation_is_said_before_anything_is_prepared(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, evaluation__set=str(tmp_path / "none"))
    config.data.path, config.data.root = None, str(tmp_path / "data")
    with pytest.raises(UserError, match="none does not exist"):
        run(config, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("loader", [LoaderConfig(), PaddedRowsConfig()], ids=lambda loader: loader.name)
def test_a_run_prepares_the_stream_that_it_is_to_be_validated_on(
    loader: LoaderConfig, tmp_path: Path
) -> None:
    stream = tmp_path / "data" / "npy-stream"
    config = tiny_config(tmp_path, loader=loader, corpus=CorpusConfig(), evaluation__set=str(stream))
    config.data.path, config.data.root = None, str(stream.parent)
    wanted = {stream, set_directory(config)}
    assert {set_directory(one) for one in unprepared(config)} == wanted
    with contextlib.closing(open_data(config, lambda line: None)) as data:
        assert data.validation.manifest.directory == stream
    assert unprepared(config) == []
    assert {path for path in stream.parent.iterdir() if path.is_dir()} == wanted


def test_rows_without_any_target_are_refused_before_the_first_step(tmp_path: Path) -> None:
    rows, mask = random_rows(20, 17, seed=0)
    empty = (rows, np.zeros_like(mask))
    path = write_rows(tmp_path / "set", {"train": [empty], "val": [(rows, mask)]})
    config = tiny_config(path, loader=PaddedRowsConfig(seq_len=16, batch_size=4))
    config.corpus.name = "test"
    with pytest.raises(UserError, match="0 of its 20 rows' tokens as targets"):
        run(config, tmp_path / "run")
