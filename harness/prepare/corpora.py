"""Which files a corpus is made of, in an order that does not depend on where they lie.

Files of a folder are sorted by their name relative to it; a list of paths keeps its own order.
Hidden files and folders (a name that starts with a dot) are left out of folders.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from harness.commandline.escapes import unescape
from harness.config_groups import CorpusConfig, JsonlCorpusConfig, ParquetCorpusConfig, TextCorpusConfig
from harness.errors import UserError
from harness.files import irregular

JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst", ".ndjson")

# Not the library's own text: its tests, what was installed into it, and files a build wrote.
_STDLIB_FOLDERS_OUT = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}
)
_STDLIB_FILES_OUT = frozenset({"sitecustomize.py", "usercustomize.py", "_distutils_system_mod.py"})


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus: its name relative to the path that was given, and its state when listed."""

    name: str
    path: str
    size: int
    mtime_ns: int

    def fingerprint(self) -> list[str | int]:
        return [self.name, self.size, self.mtime_ns]


def list_files(config: CorpusConfig) -> list[SourceFile]:
    """Every file of the corpus in reading order. Raises `UserError` for a missing path or an empty corpus."""
    if isinstance(config, TextCorpusConfig):
        suffixes = tuple(config.suffixes)
        wanted = f" ending in {', '.join(suffixes)} (corpus.suffixes)" if suffixes else ""
        files = _given_files(config.path, lambda name: not suffixes or name.endswith(suffixes), wanted)
    elif isinstance(config, JsonlCorpusConfig):
        wanted = f" ending in {', '.join(JSONL_SUFFIXES)}"
        files = _given_files(config.path, lambda name: name.endswith(JSONL_SUFFIXES), wanted)
    elif isinstance(config, ParquetCorpusConfig):
        files = _given_files(config.path, lambda name: name.endswith(".parquet"), " ending in .parquet")
    else:
        files = list(_stdlib_files())
    if sum(file.size for file in files) == 0:
        raise UserError(
            f"the {config.name} corpus is empty: {len(files)} files, 0 bytes. There is nothing to train on: "
            "set corpus.path to files that hold text"
        )
    return files


def separator_of(config: CorpusConfig) -> bytes | None:
    """What stands between the documents of one file; None where a text file is one document."""
    given = config.separator if isinstance(config, TextCorpusConfig) else None
    return None if given is None else unescape(given).encode()


def changed_since_listed(files: list[SourceFile]) -> list[str]:
    """Paths whose size or modification time is no longer what it was when they were listed."""
    changed = []
    for file in files:
        try:
            status = os.stat(file.path)
        except OSError:
            changed.append(file.path)
            continue
        if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
            changed.append(file.path)
    return changed


def _stdlib_files() -> Iterator[SourceFile]:
    root = Path(sysconfig.get_path("stdlib"))
    for name in _walk(root, _stdlib_folder):
        base = name.rsplit("/", 1)[-1]
        wanted = base.endswith(".py") and base not in _STDLIB_FILES_OUT
        if not wanted or base.startswith("_sysconfigdata"):
            continue
        if (root / name).is_file():  # nobody can mend a broken link in there
            yield _source_file(root / name, name)


def _stdlib_folder(name: str) -> bool:
    return name not in _STDLIB_FOLDERS_OUT and not name.startswith("config-")


def _given_files(given: str | list[str], matches: Callable[[str], bool], wanted: str) -> list[SourceFile]:
    files: list[SourceFile] = []
    for path in [given] if isinstance(given, str) else given:
        root = Path(path)
        if root.is_dir():
            found = [_source_file(root / n, n) for n in _walk(root, lambda _: True) if matches(n)]
            if not found:
                raise UserError(
                    f"corpus.path={path} holds no file{wanted}: there is nothing to prepare. Set corpus.path "
                    "to the folder that holds the text, or name the files one by one: corpus.path=[FILE,FILE]"
                )
            files += found
        elif os.path.lexists(root):
            files.append(_source_file(root, root.name))
        else:
            raise UserError(
                f"corpus.path={path} does not exist (looked for {root.absolute()}): set corpus.path to a "
                "file, a folder or a list of them"
            )
    seen: dict[str, str] = {}
    for file in files:
        real = os.path.realpath(file.path)
        if real in seen:
            twice = (
                f"{file.path} twice"
                if seen[real] == file.path
                else f"one file twice, as {seen[real]} and {file.path}"
            )
            raise UserError(f"corpus.path lists {twice}: its documents would be counted twice. Name it once")
        seen[real] = file.path
    return files


def _walk(root: Path, enter: Callable[[str], bool]) -> list[str]:
    """Names of all files below `root`, relative with `/`, sorted; links to folders are followed once."""
    names: list[str] = []
    seen: set[str] = set()
    for folder, folders, files in os.walk(root, followlinks=True, onerror=_unreadable):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and enter(name))
        for name in files:
            if not name.startswith("."):
                names.append((Path(folder) / name).relative_to(root).as_posix())
    return sorted(names)


def _unreadable(error: OSError) -> NoReturn:
    raise UserError(
        f"{error.filename} cannot be read ({error.strerror}): the corpus would silently lack its files"
    ) from error


def _source_file(path: Path, name: str) -> SourceFile:
    """Looked at and never opened: a FIFO would wait for ever, and a device need not end."""
    try:
        status = path.stat()
    except OSError as error:
        if not path.is_symlink():
            _unreadable(error)
        raise UserError(
            f"{path} is a link to {os.readlink(path)} and cannot be read ({error.strerror}): the corpus "
            "would silently lack that text. Mend the link or remove it"
        ) from error
    if kind := irregular(status.st_mode):
        raise UserError(
            f"{path} is {kind}, not a regular file: its text need not end, nor be the same twice. Leave it "
            "out of corpus.path, or write its text into a file"
        )
    return SourceFile(name, str(path), status.st_size, status.st_mtime_ns)
