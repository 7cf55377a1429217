"""`scripts/inspect_batch.py`: the batch of any step of a run, past or future, or a set's first batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from harness.commandline.script_words import parse, reader_may_leave, run_script, words_or_help
from harness.errors import EXIT_FAILED, UserError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from harness.auditing.replay import RunRecord, SegmentReader

_HELP = """\
Show the batch of any step of a run, past or future, from the run directory and its data alone.

usage: inspect_batch.py RUN step=N [key=value ...]   a run directory, or one of its checkpoints
       inspect_batch.py data=... loader=... [...]    the first batches of a set, in the words of train.py

  step=null        which step, from 1 on; the batch's hash is compared with the one that was logged
  batches=2        without a run: how many batches
  rows=4           how many rows of a batch are shown
  text=160         characters of each row's text
  data.path=null   of a run: where its set lies now, if it was moved
  data.root=null   likewise, the folder of several sets

Exit code 0: shown, and equal to what was logged; 1: it differs; 2: it cannot be shown."""


@dataclass
class InspectOptions:
    """Options of `scripts/inspect_batch.py RUN key=value ...`."""

    step: int | None = None
    rows: int = 4
    text: int = 160
    data_path: str | None = field(default=None, metadata={"word": "data.path"})
    data_root: str | None = field(default=None, metadata={"word": "data.root"})


@dataclass
class FirstOptions:
    """Options of `scripts/inspect_batch.py data=...` beside the words of train.py."""

    batches: int = 2
    rows: int = 4
    text: int = 160


def main() -> None:
    """Show a batch; exit code 1 where its hash is not the one that was logged."""
    words = words_or_help(_HELP)
    if "=" in words[0] and not Path(words[0]).expanduser().exists():
        _show_configured(words)
    else:
        run_script(lambda: _show_step(words))


def _show_step(words: list[str]) -> None:
    path, options = parse(words, InspectOptions, "RUN", _HELP)
    _check_numbers(options)
    if options.step is None:
        raise UserError(f"which step of {path}? Say step=N; steps count from 1")
    from harness.auditing import replay

    run = replay.open_run(path)
    reader = replay.reader_of(run, options.step, options.data_path, options.data_root)
    _show_place(run, reader, options.step)
    sha256 = _show_batch(reader, options.step, options)
    raise SystemExit(_compare(run, reader, options.step, sha256))


def _show_place(run: RunRecord, reader: SegmentReader, step: int) -> None:
    from harness.auditing.replay import budget_of
    from harness.commandline.commands import shown
    from harness.run_files.run_dir import read_status

    segment, place = reader.segment, reader.place(step)
    manifest = reader.store.manifest
    when = " (not trained yet)" if step > read_status(run.path).get("step", 0) else ""
    print(f"run       {shown(run.path)}, step {step} of {budget_of(run)}{when}")
    if segment.run_id != run.segments[-1].run_id:
        print(
            f"          steps {segment.step + 1} on were trained by {shown(Path(segment.path))}, its parent"
        )
    print(f"data      {shown(manifest.directory)}, {reader.store.split}, {manifest.metadata_sha256}")
    print(f"loader    {segment.loader['name']}")
    print(f"epoch     {place.epoch}, position {place.position} before the batch and {place.end} after it")


def _show_batch(reader: SegmentReader, step: int, options: InspectOptions | FirstOptions) -> str:
    """Print a batch; its hash."""
    from harness.auditing.batch_view import Words, rows_in_words
    from harness.auditing.data_chain import batch_sha256

    batch, origins, words = reader.batch(step), reader.origins(step), Words(reader.store)
    for name in ("inputs", "targets"):
        tensor = getattr(batch, name)
        print(f"{name:<9} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}")
    if words.why is not None:
        print(f"no text: {words.why}")
    for line in rows_in_words(batch, origins, words, options.rows, options.text):
        print(line)
    sha256 = batch_sha256(batch)
    print(f"batch_sha256 {sha256}")
    return sha256


def _compare(run: RunRecord, reader: SegmentReader, step: int, sha256: str) -> int:
    """Say whether the batch is the one that was logged; the exit code."""
    from harness.auditing.replay import logged_row

    row = logged_row(run.path, step) or logged_row(Path(reader.segment.path), step)
    logged = None if row is None else row.get("batch_sha256")
    if row is None or logged is None:
        told = "step was not logged" if row is None else "row has no batch_sha256"
        print(f"not compared: this {told} (trainer.log_batch_hash=true logs every batch's)")
        return 0
    differing = [
        f"{name}: logged {theirs}, now {ours}"
        for name, theirs, ours in (
            ("batch_sha256", logged, sha256),
            ("epoch", row.get("epoch"), reader.place(step).epoch),
            ("position", row.get("position"), reader.place(step).end),
        )
        if theirs != ours
    ]
    if not differing:
        print("equal to the one logged in metrics.jsonl")
        return 0
    print("DIFFERS from what metrics.jsonl says of this step:\n  " + "\n  ".join(differing))
    return EXIT_FAILED


def _show_configured(words: list[str]) -> None:
    """The first batches of the set that words of train.py name."""
    from harness.commandline import overrides
    from harness.commandline.hydra_app import run_app

    names = FirstOptions.__dataclass_fields__
    ours = [word for word in words if word.partition("=")[0] in names]
    options: list[FirstOptions] = []

    def read_options() -> None:
        options.append(parse(["SET", *ours], FirstOptions, "SET", _HELP)[1])
        _check_numbers(options[0])

    run_script(read_options)
    line = overrides.split([word for word in words if word not in ours])
    line.overrides = overrides.quote_paths(line.overrides, multirun=line.multirun)

    def show(cfg: DictConfig) -> None:
        with reader_may_leave():
            _show_first(cfg, options[0])

    run_app("train", show, line)


def _show_first(cfg: DictConfig, options: FirstOptions) -> None:
    from harness.auditing.replay import SegmentReader
    from harness.commandline.commands import shown
    from harness.commandline.composition import to_dataclass
    from harness.config import set_directory
    from harness.config_record import to_dict
    from harness.loaders import build_loader
    from harness.resuming import lineage
    from harness.storage import open_split

    config = to_dataclass(cfg)
    directory = set_directory(config)
    store = open_split(directory, "train", mmap=config.data.mmap)
    loader = build_loader(config.loader, store)
    segment = lineage.Segment(
        step=0, run_id="", path="", data_path=str(directory), metadata_sha256=store.metadata_sha256,
        loader=to_dict(config.loader), cursor=loader.state_dict(), epoch=0, data_chain=None,
    )  # fmt: skip
    reader = SegmentReader(segment, store)
    print(f"data      {shown(directory)}, {store.split}, {store.metadata_sha256}")
    print(f"loader    {config.loader.name}, {loader.batches_per_epoch} batches an epoch")
    for step in range(1, options.batches + 1):
        place = reader.place(step)
        print(f"\nstep {step}: epoch {place.epoch}, position {place.position} to {place.end}")
        _show_batch(reader, step, options)


def _check_numbers(options: InspectOptions | FirstOptions) -> None:
    for name in ("rows", "text", "batches"):
        value = getattr(options, name, 1)
        if value < (name == "batches"):
            raise UserError(f"{name}={value} must be at least {int(name == 'batches')}")
