"""`scripts/convert_checkpoint.py`: a checkpoint in shards as one whose tensors are in two files.

Everything here reads shards as they are; other programs read model.safetensors.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from harness.commandline.commands import shown
from harness.commandline.script_words import parse, run_script
from harness.errors import UserError

if TYPE_CHECKING:
    from harness.checkpoints.checkpoint import Checkpoint
    from harness.checkpoints.checkpoint_writer import File, Writer

_WHAT = "Write a checkpoint in shards (parallel=fsdp) anew with model.safetensors and optimizer.pt."


@dataclass
class ConvertOptions:
    """Options of `scripts/convert_checkpoint.py RUN key=value ...`.

    `output`: the folder to write, null is that of the step with `.plain` behind its name.
    """

    output: str | None = None


def main() -> None:
    """Convert the newest step of a run, or the checkpoint that is given."""
    run_script(_main)


def _main() -> None:
    from harness.checkpoints import checkpoint

    path, options = parse(sys.argv[1:], ConvertOptions, "RUN", _WHAT)
    found = checkpoint.find(path.expanduser().absolute(), "RUN")
    beside = found.with_name(found.name + ".plain")
    output = Path(options.output).expanduser().absolute() if options.output else beside
    saved = convert(found, output)
    print(f"{shown(output)}: step {saved.step}, model.safetensors and optimizer.pt of {shown(saved.path)}")


def convert(found: Path, output: Path) -> Checkpoint:
    """Write a sharded checkpoint to the new folder `output`, its tensors whole and all else byte for byte.

    The checkpoint that was read. Raises `UserError` where there is nothing to convert, something in the way,
    or no place to write to.
    """
    from harness.checkpoints.checkpoint import open_checkpoint
    from harness.checkpoints.checkpoint_files import MODEL, OPTIMIZER, SMALL_FILES
    from harness.checkpoints.checkpoint_writer import save_tensors, temporary_of, write_plain
    from harness.checkpoints.safetensors_file import write_safetensors

    for place in (output, temporary_of(output)):  # where it is written first
        if os.path.lexists(place):
            raise UserError(
                f"{shown(place)} exists, and nothing is written over. Name a new folder, output=FOLDER; or "
                "move away what an earlier conversion has left"
            )
    saved = open_checkpoint(found)
    if not saved.sharded:
        raise UserError(f"{shown(saved.path)} is not in shards: it has a {MODEL} already")
    weights, state = saved.weights(), saved.optimizer_state()
    writers: dict[str, Writer] = {
        MODEL: lambda file: write_safetensors(weights, file),
        OPTIMIZER: lambda file: save_tensors(state, file),
        **{name: partial(_copy, saved.path / name) for name in SMALL_FILES},
    }
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_plain(output, saved.step, writers)
    except OSError as error:
        raise UserError(
            f"{error.filename or output} cannot be written: {error.strerror or error}, so {shown(output)} is "
            "not made. Make room there, or name another folder: output=FOLDER"
        ) from error
    return saved


def _copy(source: Path, file: File) -> None:
    file.write(source.read_bytes())
