"""`check=true`: what a start would do, in full and without a trace of it.

Whatever a start refuses is refused here too, by the same functions. Then the plan is printed, and one forward
and backward pass is made at the run's own shape, on its own first batch, to say what a step costs.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import torch
from torch import Tensor

from harness import admission, auto_resume, completion, start
from harness.build import Learner, build_learner
from harness.commands import prepare_command, shown
from harness.config import TrainConfig, layout, set_directory, total_steps
from harness.data_setup import needs_preparation
from harness.dry_step import DryStep
from harness.errors import RunFailed, UserError
from harness.identity import progress_of
from harness.plan_text import budget_lines, data_lines, loader_lines, memory_lines, model_line, printed, size
from harness.start import Plan, Start
from harness.step_cost import Shape, evaluation_seconds, mend, random_batch, shape_of, try_step
from harness.step_log import clock
from harness.storage import Store
from harness.trainer import Progress

_BY_TIME = re.compile(r"\d{2}-\d{2}-\d{2}-\d{6}_.+")  # a run's own folder where nobody names one


def check_run(config: TrainConfig, path: Path) -> None:
    """Print what a start of `config` in the directory `path` would do; nothing is written.

    Raises what a start would raise; a directory that is occupied is refused after the plan. `RunFailed`
    where a step does not fit into memory.
    """
    path = Path(os.path.abspath(path))
    admission.refuse_several_processes()
    found = auto_resume.find(config, path)
    occupied = _refusal(config, path, found)
    begin = start.settle(config, path, found)
    if begin is None:
        assert found.saved is not None
        printed("run", [completion.in_words(config, path, found.saved), "a start would do nothing"])
        return
    if needs_preparation(config):
        _check_unprepared(config, path, begin)
    else:
        with start.opened(config, path, begin, lambda line: printed("", [line]), writes=False) as plan:
            _check_plan(plan)
    if occupied is not None:
        raise occupied


def _refusal(config: TrainConfig, path: Path, found: auto_resume.Found) -> UserError | None:
    """Why the run may not write into its directory."""
    try:
        admission.check(config, path, found)
    except UserError as error:
        return error
    return None


def _check_plan(plan: Plan) -> None:
    config, data, progress = plan.config, plan.data, progress_of(plan.saved)
    printed("run", [*_run_lines(plan.config, plan.path, plan), *plan.changes])
    printed("data", data_lines(config, data))
    printed("loader", loader_lines(config, data.train))
    shape = shape_of(config, data.train.vocab_size, plan.device)
    printed("budget", budget_lines(config, plan.loader, progress, 12 * shape.stored))
    _print_shape(config, shape, plan.device)
    known = len(plan.changes)
    dry = try_step(config, shape, plan.device, lambda: start.learner_of(plan), lambda: first_batch(plan))
    printed("", plan.changes[known:])
    _print_dry(
        config, plan.device, shape, dry, "" if plan.saved is plan.initial is None else "with its weights, "
    )
    printed("time", [time_line(config, progress, dry, data.validation)])


def _check_unprepared(config: TrainConfig, path: Path, begin: Start) -> None:
    """What can be said before the set is there: a start would prepare it by itself."""
    from harness.prepare import expected_vocab_size

    printed("run", _run_lines(config, path, None))
    lines = [
        f"there is no prepared set at {shown(set_directory(config))}: a start would prepare it first, "
        "from the embedded corpus",
        f"to prepare it now: {prepare_command(config)}",
        "what follows from its size cannot be said before",
    ]
    printed("data", lines)
    vocab_size, device = expected_vocab_size(config.tokenizer), begin.device
    shape = shape_of(config, vocab_size, device)
    printed("budget", budget_lines(config, None, Progress(), 12 * shape.stored))
    _print_shape(config, shape, device)

    def learner() -> Learner:
        return build_learner(config, vocab_size, device, None, begin.initial)

    dry = try_step(config, shape, device, learner, lambda: random_batch(config, vocab_size))
    _print_dry(config, device, shape, dry, "on random tokens, ")
    printed("time", [time_line(config, Progress(), dry, None)])


def _run_lines(config: TrainConfig, path: Path, plan: Plan | None) -> list[str]:
    if plan is not None and plan.saved is not None:
        where = f"epoch {plan.saved.trainer['epoch']}, position {plan.loader.position:,}"
        if plan.goes_on:
            return [f"{shown(path)} goes on at step {plan.saved.step}, {where}"]
        return [f"{_place(path)}, a branch of {shown(plan.saved.run_dir)} at step {plan.saved.step}, {where}"]
    lines = [f"{_place(path)}, a new run"]
    if plan is not None and plan.initial is not None:
        lines.append(f"begins with the weights of {shown(plan.initial.path)}")
    return lines


def _place(path: Path) -> str:
    if _BY_TIME.fullmatch(path.name):
        return f"a folder in {shown(path.parent.parent)} named by the time of its start"
    return str(shown(path))


def _print_shape(config: TrainConfig, shape: Shape, device: torch.device) -> None:
    printed("model", [model_line(config, shape.model)])
    memory, room = shape.memory, shape.room
    lines = memory_lines(memory, room, str(device))
    if room is not None and memory.total > room:
        lines.append(f"WARNING: that is more than there is. {mend(config, shape)}")
    printed("memory", lines)


def first_batch(plan: Plan) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the step that the run would begin with."""
    try:
        batch = plan.loader.next_batch()
    except StopIteration:
        plan.loader.start_epoch(progress_of(plan.saved).epoch + 1)
        batch = plan.loader.next_batch()
    return batch.inputs, batch.targets


def _print_dry(config: TrainConfig, device: torch.device, shape: Shape, dry: DryStep, what: str) -> None:
    if not math.isfinite(dry.loss):
        raise RunFailed(
            f"the loss of the first batch is no number ({dry.loss}): a run would stop at step 1", "diverged"
        )
    if layout(config.loader) == "contrastive":
        reason = f"ln 2 = {math.log(2):.4f}, of a model that is still its reference"
    else:
        vocab_size = shape.model.vocab_size
        reason = f"ln {vocab_size} = {math.log(vocab_size):.4f}, of a model that knows nothing"
    memory = (
        f"peak {size(shape.memory.held + dry.growth)}" if dry.growth is not None else "peak not measurable"
    )
    if dry.growth is not None:
        memory += f": {size(dry.growth)} measured in the step (estimate {size(shape.memory.step)}), beside "
        memory += f"{size(shape.memory.held)} that the weights and the optimizer hold"
    rate = config.loader.batch_size * config.loader.seq_len / dry.seconds
    lines = [
        f"{what}loss {dry.loss:.4f}; {reason}",
        f"{1e3 * dry.seconds:,.4g} ms a step without the optimizer's part, {rate:,.0f} tokens/s on {device}",
        memory,
    ]
    printed("dry step", lines)


def time_line(config: TrainConfig, progress: Progress, dry: DryStep, validation: Store | None) -> str:
    """How long the run would take, from a step's time and an evaluation's."""
    steps = total_steps(config, progress.step, progress.tokens) - progress.step
    training, evaluating = steps * dry.seconds, evaluation_seconds(config, progress, dry, validation)
    return (
        f"estimate: {clock(training + evaluating)} = {clock(training)} for {steps:,} steps + "
        f"{clock(evaluating)} for evaluations; without start, saves and text samples"
    )
