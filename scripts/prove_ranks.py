"""Trains one model with one, two and four processes under torchrun, on a CPU, and compares what came of it.

    python scripts/prove_ranks.py [--parts worlds,resumes,kills,hosts,fsdp] [--steps 160] [--kills 3]

worlds   1, 2 and 4 ranks: every step's batch has the same hash, its loss differs by 1e-5 at most
resumes  half of a run with so many ranks, the rest with others: the same, as if nobody had stopped it
kills    SIGKILL of a rank drawn at random, at a moment drawn at random, under --max-restarts: the weights at
         the end are those of an undisturbed run with as many ranks, to the bit
hosts    two hosts, as network namespaces of this machine: one job, and one whose rank is killed (needs root)
fsdp     parallel=fsdp with two ranks: losses as by DDP; its checkpoint goes on in one process

Prints a table; exit code 1 where anything was wrong. Each torchrun takes about ten seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parts.two_hosts import Host, missing, two_hosts

REPOSITORY = Path(__file__).resolve().parents[1]
_TOLERANCE = 1e-5
_SECONDS = 600
_WORDS = (
    "tracker=none", "loader=sliding_window", "loader.seq_len=32", "loader.batch_size=8", "model.n_layer=2",
    "model.n_head=2", "model.n_embd=32", "schedule.warmup_steps=4", "evaluation.sample_tokens=0",
    "evaluation.tokens=2048", "trainer.log_batch_hash=true", "checkpoint.keep_last=null",
)  # fmt: skip


@dataclass
class Proof:
    """What was tried and what was wrong, in the folder of the runs."""

    folder: Path
    steps: int
    kills: int
    random: random.Random
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    wrong: int = 0

    def note(self, what: str, found: str, problem: str = "") -> None:
        """A row of the table; `problem` says what is wrong with it."""
        self.wrong += bool(problem)
        self.rows.append((what, found, problem or "as it must be"))
        print(f"{what}: {found}. {problem or 'As it must be'}", flush=True)

    def words(self, *more: str) -> list[str]:
        budget = (f"trainer.max_steps={self.steps}", f"schedule.total_steps={self.steps}")
        places = (f"evaluation.interval={self.steps // 2}", f"checkpoint.interval={max(1, self.steps // 16)}")
        return [*_WORDS, *budget, *places, f"data.root={self.folder / 'data'}", *more]

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name


@dataclass
class Launch:
    """torchrun that trains, begun; its output is kept in a file."""

    process: subprocess.Popen[bytes]
    output: Path

    def end(self) -> str:
        """What is wrong with how it ended, or nothing."""
        try:
            code = self.process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return f"no end in {_SECONDS} s, see {self.output}"
        return f"exit code {code}: {self.output.read_text()[-600:]}" if code else ""


def begun(
    proof: Proof, ranks: int, words: list[str], *, flags: tuple[str, ...] = (), host: Host | None = None
) -> Launch:
    """Start `train.py WORDS` with so many ranks, on this host or on `host`."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", *flags]
    command += [str(REPOSITORY / "train.py"), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    if host is not None:
        command = host.command(*command)
        environment["GLOO_SOCKET_IFNAME"] = host.interface
    descriptor, output = tempfile.mkstemp(dir=proof.folder, suffix=".txt")
    with os.fdopen(descriptor, "wb") as file:
        process = subprocess.Popen(command, cwd=proof.folder, env=environment, stdout=file, stderr=file)
    return Launch(process, Path(output))


def train(proof: Proof, name: str, ranks: int, *words: str) -> str:
    """Train to the end as run NAME; what is wrong with its end."""
    return begun(proof, ranks, proof.words(f"run.name={name}", *words)).end()


def rows(run: Path) -> list[dict[str, Any]]:
    """The training rows of a run."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if "loss" in row]


def compared(run: Path, other: Path) -> tuple[str, str]:
    """How two runs differ, in words, and what of that may not be."""
    ours, theirs = rows(run), rows(other)
    if not ours or len(ours) != len(theirs):
        return "", f"{len(ours)} steps and {len(theirs)}"
    hashes = [a["step"] for a, b in zip(ours, theirs, strict=True) if a["batch_sha256"] != b["batch_sha256"]]
    largest = max(abs(a["loss"] - b["loss"]) for a, b in zip(ours, theirs, strict=True))
    found = f"{len(ours)} batches, losses differ by {largest:.1e} at most"
    if hashes:
        return found, f"other batches from step {hashes[0]} on"
    return found, "" if largest <= _TOLERANCE else f"more than {_TOLERANCE:g}"


def other_weights(proof: Proof, name: str, other: str) -> str:
    """What is wrong with the last weights of run NAME, which should be those of the other, to the bit."""
    last = Path("checkpoints") / f"step-{proof.steps:08d}" / "model.safetensors"
    ours, theirs = proof.run(name) / last, proof.run(other) / last
    if not (ours.exists() and theirs.exists()):
        return "no last checkpoint"
    return "" if ours.read_bytes() == theirs.read_bytes() else "other weights"


def prove_worlds(proof: Proof) -> None:
    for ranks in (1, 2, 4):
        problem = train(proof, f"world-{ranks}", ranks)
        found, other = compared(proof.run("world-1"), proof.run(f"world-{ranks}"))
        proof.note(f"{ranks} ranks beside 1", found, problem or other)


def prove_resumes(proof: Proof) -> None:
    for before, after in ((2, 1), (1, 4), (4, 2)):
        name = f"resume-{before}-{after}"
        problem = train(proof, name, before, f"trainer.max_steps={proof.steps // 2}")
        again = [f"resume={proof.run(name)}", f"trainer.max_steps={proof.steps}"]
        problem = problem or begun(proof, after, again).end()
        found, other = compared(proof.run("world-1"), proof.run(name))
        proof.note(f"{before} ranks, then {after}", found, problem or other)


def prove_kills(proof: Proof) -> None:
    dropout = "model.dropout=0.1"
    problem = train(proof, "undisturbed", 2, dropout)
    begin, end = (
        max(path.stat().st_mtime for path in proof.run("undisturbed").glob(pattern))
        for pattern in ("environment.json", "checkpoints/*/checkpoint.json")
    )
    proof.note("2 ranks, undisturbed", f"{end - begin:.1f} s of training", problem)
    for number in range(proof.kills):
        name, rank = f"killed-{number}", proof.random.randrange(2)
        launch = begun(proof, 2, proof.words(f"run.name={name}", dropout), flags=("--max-restarts=3",))
        said = kill(proof, name, rank, proof.random.uniform(0.0, 0.9) * (end - begin))
        problem = launch.end() or other_weights(proof, name, "undisturbed")
        proof.note(f"rank {rank} of 2 killed", said, problem)


def kill(proof: Proof, name: str, rank: int, after: float) -> str:
    """SIGKILL a rank, `after` seconds from when its run was there; at which step that was, in words."""
    path, end = proof.run(name) / "environment.json", time.monotonic() + _SECONDS
    while not path.exists():
        if time.monotonic() > end:
            return "never, as it did not begin"
        time.sleep(0.02)
    place = json.loads(path.read_text())["starts"][-1]["ranks"][rank]
    time.sleep(after)
    step = len(rows(proof.run(name)))
    try:
        os.kill(place["pid"], signal.SIGKILL)
    except ProcessLookupError:
        return f"after its end, at step {step}"
    return f"at step {step}, {after:.1f} s after its first"


def prove_hosts(proof: Proof) -> None:
    why = missing()
    if why is not None:
        print(f"two hosts: left out, {why}", flush=True)
        return
    with two_hosts() as hosts:
        problem = on_hosts(proof, hosts, "hosts", None)
        found, other = compared(proof.run("world-1"), proof.run("hosts"))
        start = json.loads((proof.run("hosts") / "environment.json").read_text())["starts"][-1]
        names = {place["host"] for place in start["ranks"]}
        other = other or ("" if names == {host.name for host in hosts} else f"it ran on {names}")
        proof.note("two hosts, a rank each", found, problem or other)
        rank = proof.random.randrange(2)
        problem = on_hosts(proof, hosts, "hosts-killed", rank)
        starts = json.loads((proof.run("hosts-killed") / "environment.json").read_text())["starts"]
        problem = problem or other_weights(proof, "hosts-killed", "hosts")
        proof.note(f"two hosts, rank {rank} killed", f"{len(starts)} starts", problem)


def on_hosts(proof: Proof, hosts: tuple[Host, Host], name: str, killed: int | None) -> str:
    """One job over both hosts, a launcher on each; what is wrong with its end."""
    launches = []
    for host in hosts:
        flags = (
            "--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].name}:29400",
            f"--rdzv-id={name}", f"--local-addr={host.name}", "--max-restarts=3",
        )  # fmt: skip
        launches.append(begun(proof, 1, proof.words(f"run.name={name}"), flags=flags, host=host))
    if killed is not None:
        kill(proof, name, killed, 1.0)
    return " / ".join(filter(None, (launch.end() for launch in launches)))


def prove_fsdp(proof: Proof) -> None:
    problem = train(proof, "fsdp", 2, "parallel=fsdp")
    found, other = compared(proof.run("world-2"), proof.run("fsdp"))
    proof.note("2 ranks, parallel=fsdp, beside DDP", found, problem or other)
    problem = train(proof, "fsdp-1", 2, "parallel=fsdp", f"trainer.max_steps={proof.steps // 2}")
    again = [f"resume={proof.run('fsdp-1')}", f"trainer.max_steps={proof.steps}"]
    problem = problem or begun(proof, 1, again).end()
    found, other = compared(proof.run("world-2"), proof.run("fsdp-1"))
    proof.note("parallel=fsdp with 2 ranks, then 1", found, problem or other)


PARTS: dict[str, Callable[[Proof], None]] = {
    "worlds": prove_worlds, "resumes": prove_resumes, "kills": prove_kills, "hosts": prove_hosts,
    "fsdp": prove_fsdp,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="which, with commas; worlds is always one")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of what is killed, and when")
    arguments = parser.parse_args()
    unknown = {*arguments.parts.split(",")} - {*PARTS}
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}: {', '.join(PARTS)}")
    with tempfile.TemporaryDirectory(prefix="prove-ranks-") as folder:
        proof = Proof(Path(folder), arguments.steps, arguments.kills, random.Random(arguments.seed))
        for name in dict.fromkeys(["worlds", *arguments.parts.split(",")]):
            PARTS[name](proof)
    print("\n| what | found | wrong |\n|---|---|---|")
    for row in proof.rows:
        print(f"| {' | '.join(row)} |")
    raise SystemExit(1 if proof.wrong else 0)


if __name__ == "__main__":
    main()
