"""A sweep of which some jobs fail, each for a cause that lies on disk and can be mended there."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from harness.checkpoints import checkpoint
from harness.run_files.run_dir import read_status
from parts.killed_runs import Attempt
from parts.swept_jobs import INTERVAL, STEPS, Files, Sweep, common_words, make_set

_WORDS = (
    "loader=sequential",
    "loader.seq_len=64",
    "loader.batch_size=2",
    "evaluation.tokens=256",
    "data.verify=headers",
)
_OTHERWISE = ("data.path=", "loader", "evaluation.tokens=")  # said by the jobs, or by `_WORDS`
_WILD = "optimizer: {lr: 1000, weight_decay: 100}\ntrainer: {grad_clip: 0}\nschedule: {warmup_steps: 0}"
_REASONS = {"impossible": "user", "raises": "error|user", "diverges": "diverged"}
_BATCH = 2 * 64  # tokens of a step


def trial(folder: Path) -> tuple[Sweep, str]:
    """One job of each kind and one that is well; the same command unmended, and mended."""
    sets = _make_sets(folder)
    values = {
        "impossible": _on(sets["small"]),
        "fine": _on(sets["fine"]),
        "raises": _on(sets["damaged"]),
        "diverges": f"{_on(sets['fine'])}\n{_WILD}",
    }
    for name, text in values.items():
        _write_experiment(folder, name, text)
    common = [word for word in common_words(sets["fine"]) if not word.startswith(_OTHERWISE)]
    words = [*common, *_WORDS, "--config-dir", str(folder / "own")]
    sweep = Sweep(folder / "sweep", [*words, f"experiment={','.join(values)}"])
    for _ in range(2):  # what failed is tried again, and fails again
        _check_failed(sweep, sweep.start())
    before = sweep.done()
    for name in ("small", "damaged"):
        shutil.rmtree(sets[name])
        shutil.copytree(sets["fine"], sets[name])
    _write_experiment(folder, "diverges", _on(sets["fine"]) + "\noptimizer: {lr: 0.002}")
    _check_mended(sweep, before, sweep.ends(0))
    return sweep, "3 of 4 jobs failed, with their reasons, twice; mended, those alone were trained"


def _on(data: Path) -> str:
    return f"data: {{path: {data}}}"


def _write_experiment(folder: Path, name: str, text: str) -> None:
    file = folder / "own" / "experiment" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"# @package _global_\n{text}\n")


def _make_sets(folder: Path) -> dict[str, Path]:
    """One that is well, one of too few tokens, and one with an impossible token id in its middle."""
    fine = make_set(folder / "fine", texts=400)
    damaged = Path(shutil.copytree(fine, folder / "damaged"))
    _damage(damaged / "train_00000.npy", index=(INTERVAL + INTERVAL // 2) * _BATCH)
    return {"fine": fine, "small": make_set(folder / "small", texts=4), "damaged": damaged}


def _damage(file: Path, index: int) -> None:
    import numpy as np

    tokens = np.load(file)
    tokens[index] = 60_000
    np.save(file, tokens)


def _directory(sweep: Sweep, name: str) -> Path:
    """Where the job of an experiment lies."""
    (path,) = sweep.folder.glob(f"experiment-{name}-*")
    return path


def _check_failed(sweep: Sweep, attempt: Attempt) -> None:
    """Exit code 1, a report, the others done, and each failed job named with its reason."""
    said = sweep.ended(attempt, 1)
    if [path.name for path in sweep.folder.glob("report.*")] == []:
        sweep.wrong.append("there is no report beside failed jobs")
    for name, reason in _REASONS.items():
        status = read_status(_directory(sweep, name))
        if status.get("state") != "failed" or not re.fullmatch(reason, str(status.get("reason"))):
            sweep.wrong.append(f"{name}: {status.get('state')}, {status.get('reason')}")
        if not re.search(rf"^  #\d+ .*={name} .*failed.*: ({reason}): \S", said, re.MULTILINE):
            sweep.wrong.append(f"{name} is not named with its reason:\n{said[-3000:]}")
    if read_status(_directory(sweep, "fine")).get("state") != "done":
        sweep.wrong.append("the job that is well is not done")
    if checkpoint.complete_steps(_directory(sweep, "raises")) != [INTERVAL]:
        sweep.wrong.append("the job that raises has other checkpoints than that of its first interval")


def _check_mended(sweep: Sweep, before: dict[str, Files], said: str) -> None:
    sweep.check_untouched(before)
    if len(before) != 1 or "4 of 4 done" not in said or said.count("\ntrains ") != 3:
        sweep.wrong.append(f"{len(before)} jobs were done before, and then:\n{said[-2000:]}")
    exact = _weights(_directory(sweep, "fine"))
    for name in ("impossible", "raises"):  # on the same tokens now as the one that is well
        if _weights(_directory(sweep, name)) != exact:
            sweep.wrong.append(f"{name} has other weights than the job that is well")


def _weights(path: Path) -> bytes:
    return (checkpoint.step_dir(path, STEPS) / checkpoint.MODEL).read_bytes()
