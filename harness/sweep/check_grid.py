"""`-m check=true`: every job of a grid as it would be, what all of them cost, and which of them cannot be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from harness import start
from harness.build import build_learner
from harness.checkpoints import checkpoint
from harness.commandline.commands import shown
from harness.commandline.overrides import key_of
from harness.config import TrainConfig, layout, set_directory, tokens_per_step, total_steps
from harness.data_setup import unprepared
from harness.errors import EXIT_DONE, EXIT_FAILED, EXIT_USER, RunFailed, UserError
from harness.model import parameter_count
from harness.planning.dry_step import DryStep
from harness.planning.memory_estimate import micro_batch
from harness.planning.plan_text import lasting, size
from harness.planning.step_cost import Shape, evaluation_seconds, random_batch, shape_of, try_step
from harness.resuming import admission, auto_resume
from harness.run_files import run_dir
from harness.start import Start, first_batch
from harness.storage import Store
from harness.sweep.changed import since_done
from harness.sweep.grid import Grid, Job
from harness.sweep.identity import place_for
from harness.sweep.job import release
from harness.sweep.states import DONE, RUNNING, WAITING, read_state
from harness.sweep.sweep_words import telling
from harness.training.run import Progress


@dataclass
class _Row:
    """A job as it would be. `problem`: why it cannot be, else "". `seconds`: of what is left of it."""

    job: Job
    state: str = WAITING
    step: int = 0
    epochs: float | None = None
    shape: Shape | None = None
    memory: int | None = None
    seconds: float = 0.0
    problem: str = ""
    code: int = EXIT_DONE

    @property
    def budget(self) -> int:
        return total_steps(self.job.config)

    @property
    def steps_left(self) -> int:
        return 0 if self.state == DONE or self.problem else self.budget - self.step


def check_grid(grid: Grid) -> int:
    """Print the jobs of a grid without starting one; the exit code is 2 where a combination is impossible.

    It is 1 where the only fault is that a step does not fit into memory. Nothing is written.
    """
    jobs, checker = grid.unique, _Checker(grid)
    count = "1 job" if len(jobs) == 1 else f"{len(jobs)} jobs"
    print(f"sweep {grid.name}, {count} in {shown(grid.folder)}; nothing is started", flush=True)
    rows = [checker.row(job) for job in jobs]
    lines = [*_table(grid, rows), *_totals(rows), *checker.notes, *_impossible(grid, rows)]
    print("\n".join(lines), flush=True)
    return max((row.code for row in rows), default=EXIT_DONE)


class _Checker:
    """Looks at one job after another; what they share is looked at once."""

    def __init__(self, grid: Grid) -> None:
        self.notes: list[str] = []
        self._grid = grid
        self._dry: dict[Hashable, DryStep | RunFailed] = {}
        self._verified: set[tuple[Path, str | None]] = set()

    def row(self, job: Job) -> _Row:
        """The job, with the reason where it cannot be."""
        row = _Row(job)
        try:
            self._look(row)
        except UserError as error:
            row.problem, row.code = str(error), EXIT_USER
        except RunFailed as error:
            row.problem, row.code = str(error), EXIT_FAILED
        return row

    def _look(self, row: _Row) -> None:
        """Fill in a row as the job would be started: it goes on where it is half done."""
        config = dataclasses.replace(row.job.config, resume="auto", check=False)
        path = place_for(self._grid.folder, row.job.sha256, telling(row.job.words, self._grid.swept))
        row.state = read_state(path).state
        row.step = max(checkpoint.complete_steps(path), default=0)
        if run_dir.read_status(path).get("state") == DONE:
            if (refused := since_done(config, path)[1]) is not None:
                raise UserError(refused)
            row.state = DONE
            return
        found = auto_resume.find(config, path)
        admission.check(config, path, found)
        begin = start.settle(config, path, found)
        if begin is None:
            row.state = DONE
        elif missing := unprepared(config):
            self._look_unprepared(row, config, begin, missing)
        else:
            self._look_at_data(row, config, path, begin)

    def _look_at_data(self, row: _Row, config: TrainConfig, path: Path, begin: Start) -> None:
        known = (set_directory(config), config.evaluation.set)
        if known in self._verified:
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, verify="headers"))
        with start.opened(config, path, begin, lambda line: None, writes=False) as plan:
            self._verified.add(known)
            row.epochs = row.budget / plan.loader.batches_per_epoch
            vocab_size = plan.data.train.vocab_size
            self._cost(row, config, vocab_size, begin.device, lambda: first_batch(plan), plan.data.validation)

    def _look_unprepared(
        self, row: _Row, config: TrainConfig, begin: Start, missing: list[TrainConfig]
    ) -> None:
        from harness.prepare import expected_vocab_size

        for directory in map(shown, map(set_directory, missing)):
            note = f"there is no prepared set at {directory}: the first job that reads it prepares it first"
            if note not in self.notes:
                self.notes.append(note)
        vocab_size = expected_vocab_size(config.tokenizer)
        self._cost(row, config, vocab_size, begin.device, lambda: random_batch(config, vocab_size), None)

    def _cost(
        self,
        row: _Row,
        config: TrainConfig,
        vocab_size: int,
        device: torch.device,
        batch: Callable[[], tuple[Tensor, Tensor]],
        validation: Store | None,
    ) -> None:
        shape = row.shape = shape_of(config, vocab_size, device)
        row.memory = shape.memory.total
        key = _shape_key(config, vocab_size, device)
        if key not in self._dry:
            self._dry[key] = _try(config, shape, device, vocab_size, batch)
        dry = self._dry[key]
        if isinstance(dry, RunFailed):
            raise dry
        if dry.growth is not None and device.type == "cuda":  # a host's is blurred by what came before
            row.memory = shape.memory.held + dry.growth
        progress = Progress(step=row.step, tokens=row.step * tokens_per_step(config))
        row.seconds = row.steps_left * dry.seconds + evaluation_seconds(config, progress, dry, validation)


def _try(
    config: TrainConfig,
    shape: Shape,
    device: torch.device,
    vocab_size: int,
    batch: Callable[[], tuple[Tensor, Tensor]],
) -> DryStep | RunFailed:
    """The dry step of a shape, with fresh weights; what is said of the other jobs of that shape as well."""
    try:
        return try_step(config, shape, device, lambda: build_learner(config, vocab_size, device, None), batch)
    except RunFailed as error:
        return RunFailed(str(error), error.reason)  # without the traceback, which holds the model
    finally:
        release()


def _shape_key(config: TrainConfig, vocab_size: int, device: torch.device) -> Hashable:
    """What a step's cost follows from."""
    model, loader = config.model, config.loader
    return (
        model.n_layer, model.n_head, model.n_embd, model.dropout, model.gelu, model.activation_checkpointing,
        model.loss_chunk_tokens, vocab_size, layout(loader), loader.seq_len, loader.batch_size,
        micro_batch(config), config.precision, config.compile, config.deterministic, config.optimizer.name,
        device,
    )  # fmt: skip


def _table(grid: Grid, rows: list[_Row]) -> list[str]:
    """A line for each job, right-aligned in columns."""
    head = ["#", *grid.swept, "steps", "epochs", "parameters", "memory", "time", ""]
    cells = [head, *(_cells(grid, row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.rjust, line[:-1], widths)) + f"  {line[-1]}".rstrip() for line in cells]


def _cells(grid: Grid, row: _Row) -> list[str]:
    values = {key_of(word): word.partition("=")[2] for word in row.job.words}
    state = "impossible" if row.problem else "" if row.state == WAITING else row.state
    if row.state not in (WAITING, RUNNING, DONE) and not row.problem:
        state += f", goes on at step {row.step:,}" if row.step else ", starts again"
    return [
        str(row.job.index),
        *(values.get(key, "") for key in grid.swept),
        f"{row.budget:,}",
        "" if row.epochs is None else f"{row.epochs:.3g}",
        "" if row.shape is None else f"{parameter_count(row.shape.model):,}",
        "" if row.memory is None else size(row.memory),
        "" if row.problem or row.state == DONE else lasting(row.seconds),
        state,
    ]


def _totals(rows: list[_Row]) -> list[str]:
    possible = [row for row in rows if not row.problem]
    impossible, done = len(rows) - len(possible), sum(row.state == DONE for row in possible)
    tokens = sum(row.steps_left * tokens_per_step(row.job.config) for row in rows)
    return [
        f"{len(rows)} jobs, {done} done already, {impossible} impossible; to train: {tokens:,} "
        f"tokens, about {lasting(sum(row.seconds for row in rows))} one after another (estimate: steps and "
        "evaluations)"
    ]


def _impossible(grid: Grid, rows: list[_Row]) -> list[str]:
    """Each reason, with the jobs that it stops and their words."""
    lines = []
    for problem in dict.fromkeys(row.problem for row in rows if row.problem):
        lines.append(f"impossible: {problem}")
        for row in rows:
            if row.problem == problem:
                lines.append(f"  job {row.job.index}: {' '.join(telling(row.job.words, grid.swept))}")
    return lines
