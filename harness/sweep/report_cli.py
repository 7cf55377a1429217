"""`scripts/report.py PATH ...`: what runs say together, as a table here and as files to keep."""

from __future__ import annotations

import io
import sys
from pathlib import Path

from harness.commandline.commands import shown
from harness.commandline.script_words import run_script, words_or_help
from harness.errors import EXIT_FAILED, UserError
from harness.run_files.run_dir import holds_a_run

_HELP = """\
Compare runs: a table of them, best first, and report.csv and report.html to keep.

usage: report.py multirun/NAME             a sweep, also one that is going on
       report.py runs/DATE                 any folder of runs
       report.py RUN RUN ... [FOLDER ...]  run directories, of sweeps too

  --output DIR   where report.csv and report.html go; of one folder they go into it, else nowhere

Results are compared after as many tokens as every finished job reached. Jobs that are equal but for their
seed are one line. Jobs that failed or are not finished are named with their reason, and never averaged.
Exit code 0: compared, whatever the jobs' states; 1: the files cannot be written; 2: there is nothing to
compare."""


def main() -> None:
    """Print the table, write the files."""
    words = words_or_help(_HELP)
    run_script(lambda: _main(words))


def _main(words: list[str]) -> None:
    paths, output = _parsed(words)
    from harness.sweep.compare import compare
    from harness.sweep.report import CSV, HTML, write_files
    from harness.sweep.report_text import text

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that cannot show a name
    comparison = compare(paths)
    if output is None and len(paths) == 1 and not holds_a_run(paths[0]):
        output = paths[0]
    try:
        if output is not None:  # first: a reader of the table may leave, as `| head` does
            write_files(comparison, output)
    except OSError as error:
        print(text(comparison))
        print(f"error: {error.filename}: {error.strerror}. --output DIR puts it elsewhere", file=sys.stderr)
        raise SystemExit(EXIT_FAILED) from None
    print(text(comparison))
    if output is None:
        print(f"\n--output DIR writes {CSV} and {HTML} as well")
    else:
        print(f"\n{shown(output / CSV)}\n{shown(output / HTML)}")


def _parsed(words: list[str]) -> tuple[list[Path], Path | None]:
    """The paths, and the folder for the files."""
    paths: list[Path] = []
    output, rest = None, iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name == "--output":
            folder = value if equals else next(rest, None)
            if not folder:
                raise UserError("--output needs a folder: --output DIR")
            output = Path(folder)
        elif word.startswith("-"):
            raise UserError(f"there is no option {word}: give paths of runs, and --output DIR")
        else:
            paths.append(Path(word))
    if not paths:
        raise UserError("give a sweep's folder (multirun/NAME), or run directories")
    return paths, output
