"""A tiny sweep in real processes: its commands, and what its jobs have left."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from harness.checkpoints import checkpoint
from harness.config import PrepareScriptConfig
from harness.config_groups import DataConfig, PrepareConfig, TextCorpusConfig
from harness.prepare import prepare
from harness.run_files.run_dir import JOB_FILE, read_starts, read_status
from harness.tracking.jsonl import read_rows
from parts.killed_runs import Attempt, Straight, differences, outcome
from tests.helpers_runs import snapshot

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS, INTERVAL = 150, 25
NAME = "proof"
# Every file of a directory with its content and its time of modification: what "not touched" means.
Files = dict[str, tuple[bytes, int]]


def make_set(folder: Path, texts: int) -> Path:
    """Prepare a set of so many texts of a few words, the same each time, in a folder of its own."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    for number in range(texts):
        (corpus / f"{number}.txt").write_text(f"text {number} of a few words\n")
    config = PrepareScriptConfig(
        data=DataConfig(path=str(folder / "set")),
        corpus=TextCorpusConfig(path=str(corpus)),
        prepare=PrepareConfig(val_fraction=0.3, workers=1),
    )
    prepare(config, report=lambda line: None)
    return folder / "set"


def common_words(data: Path) -> list[str]:
    """What all jobs share: steps of 2 x 16 tokens with dropout, short epochs, saved every `INTERVAL`."""
    values = {
        "sweep.name": NAME,
        "data.path": data,
        "corpus": "text",
        "prepare.val_fraction": 0.3,
        "loader": "sliding_window",
        "loader.seq_len": 16,
        "loader.batch_size": 2,
        "model.n_layer": 1,
        "model.n_head": 4,
        "model.n_embd": 64,
        "model.dropout": 0.1,
        "trainer.max_steps": STEPS,
        "trainer.log_batch_hash": "true",
        "checkpoint.interval": INTERVAL,
        "checkpoint.keep_last": 1,  # a stop saves a step of its own, which would be kept beside the others
        "checkpoint.keep_best": "false",
        "evaluation.interval": 60,
        "evaluation.tokens": 64,
        "evaluation.sample_tokens": 0,
        "tracker": "none",
        "device": "cpu",
    }
    return [f"{key}={value}" for key, value in values.items()]


@dataclass
class Sweep:
    """The sweep of `words` started in the folder `cwd`, by whatever launches; `wrong` is what was found."""

    cwd: Path
    words: list[str]
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cwd.mkdir(exist_ok=True)
        self._attempts = 0

    @property
    def folder(self) -> Path:
        return self.cwd / "multirun" / NAME

    def start(self, *more: str) -> Attempt:
        """`train.py -m` as a process."""
        return self.command("train.py", "-m", *self.words, *more)

    def command(self, script: str, *words: str) -> Attempt:
        self._attempts += 1
        output = self.cwd / f"output-{self._attempts}.txt"
        return Attempt([sys.executable, str(REPOSITORY / script), *words], output, self.cwd)

    def ends(self, code: int, *more: str) -> str:
        """Run the command to its end, which has to be `code`; what it said."""
        return self.ended(self.start(*more), code)

    def ended(self, attempt: Attempt, *codes: int) -> str:
        """Wait for the end of an attempt, with one of these exit codes; what it said."""
        if (code := attempt.wait()) not in codes:
            expected = " or ".join(map(str, codes))
            self.wrong.append(f"exit code {code}, not {expected}:\n{attempt.said()[-3000:]}")
        if "Traceback" in attempt.said():
            self.wrong.append(f"a traceback on the terminal:\n{attempt.said()[-3000:]}")
        return attempt.said()

    def jobs(self) -> dict[str, Path]:
        """The directory of each job that has one, by its identity."""
        found: dict[str, Path] = {}
        for file in sorted(self.folder.glob(f"*/{JOB_FILE}")):
            sha256 = json.loads(file.read_text())["identity"]
            if sha256 in found:
                self.wrong.append(f"{found[sha256].name} and {file.parent.name} are one job")
            found[sha256] = file.parent
        return found

    def done(self) -> dict[str, Files]:
        """What lies in the directory of each done job."""
        return {
            sha256: snapshot(path)
            for sha256, path in self.jobs().items()
            if read_status(path).get("state") == "done"
        }

    def check_untouched(self, before: dict[str, Files]) -> None:
        """The jobs that were done then have the very same files now."""
        paths = self.jobs()
        for sha256, files in before.items():
            now = snapshot(paths[sha256]) if sha256 in paths else {}
            changed = [name for name in files.keys() | now.keys() if files.get(name) != now.get(name)]
            if changed:
                self.wrong.append(f"done job {sha256[:8]}: {sorted(changed)} are not as they were")

    def starts(self) -> dict[str, int]:
        """How often the training of each job was begun."""
        return {sha256: len(read_starts(path)) for sha256, path in self.jobs().items()}

    def check_starts(self, interrupted: Counter[str] | None = None) -> None:
        """Each job was begun once, and once more where it was interrupted."""
        for sha256, count in self.starts().items():
            most = 1 + (interrupted or Counter())[sha256]
            if not 1 <= count <= most:
                self.wrong.append(f"job {sha256[:8]} was begun {count} times, not {most}")

    def check_results(self, straight: dict[str, Straight]) -> None:
        """All jobs, and no other, have come to what they came to undisturbed, bit for bit."""
        paths = self.jobs()
        for sha256 in straight.keys() ^ paths.keys():
            self.wrong.append(f"job {sha256[:8]} is in one of the sweeps alone")
        for sha256 in straight.keys() & paths.keys():
            for difference in differences(paths[sha256], straight[sha256]):
                self.wrong.append(f"{paths[sha256].name}: {difference}")
        if not {"report.csv", "report.html"} <= {path.name for path in self.folder.iterdir()}:
            self.wrong.append("there is no report")

    def results(self) -> dict[str, Straight]:
        return {sha256: outcome(path) for sha256, path in self.jobs().items()}


@dataclass(frozen=True)
class Left:
    """What a process that was ended left of a sweep: its done jobs; the half-done with their newest step."""

    done: dict[str, Files]
    half_done: dict[str, int]


def look(sweep: Sweep) -> Left:
    """Look at a sweep, of which no process is left, before anything goes on with it."""
    done = sweep.done()
    half_done = {}
    for sha256, path in sweep.jobs().items():
        if sha256 not in done and read_starts(path):
            rows = read_rows(path / "metrics.jsonl") if (path / "metrics.jsonl").exists() else []
            logged = max((row["step"] for row in rows), default=0)
            half_done[sha256] = saved = max(checkpoint.complete_steps(path), default=0)
            is_saving = any(path.glob("checkpoints/*.tmp"))
            if logged - saved > (2 if is_saving else 1) * INTERVAL:
                sweep.wrong.append(f"{path.name}: step {logged} was logged, {saved} is the newest saved")
    return Left(done, half_done)


def check_went_on(sweep: Sweep, left: Left) -> None:
    """After the next process: done jobs are as they were, half-done ones went on from their newest step."""
    sweep.check_untouched(left.done)
    paths = sweep.jobs()
    for sha256, saved in left.half_done.items():
        step = read_starts(paths[sha256])[-1]["step"]
        if step != saved:
            sweep.wrong.append(f"{paths[sha256].name} went on from step {step}, {saved} was the newest saved")
