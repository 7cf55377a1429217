"""`check=true`: what a start would do, in full and without a trace of it.

Whatever a start refuses is refused here too, by the same functions. Then the plan is printed, and one forward
and backward pass is made at the run's own shape, on its own first batch, to say what a step costs.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from pathlib import Path

import torch

from harness import start
from harness.build import Learner, build_learner
from harness.checkpoints.checkpoint import Checkpoint
from harness.commandline.commands import prepare_command, shown
from harness.config import TrainConfig, layout, set_directory, total_steps
from harness.data_setup import unprepared
from harness.distributed import rendezvous
from harness.distributed.meeting import Meeting
from harness.distributed.parallel import is_sharded
from harness.distributed.ranks import Ranks
from harness.errors import RunFailed, UserError
from harness.loaders import Loader
from harness.planning.dry_step import DryStep
from harness.planning.plan_text import (
    budget_lines,
    data_lines,
    lasting,
    loader_lines,
    memory_lines,
    model_line,
    printed,
    size,
)
from harness.planning.step_cost import Shape, evaluation_seconds, mend, random_batch, shape_of, try_step
from harness.resuming import admission, auto_resume
from harness.resuming.auto_resume import Found
from harness.resuming.identity import progress_of
from harness.start import Plan, Start
from harness.storage import Store
from harness.training import completion
from harness.training.run import Progress

_BY_TIME = re.compile(r"\d{2}-\d{2}-\d{2}-\d{6}_.+")  # a run's own folder where nobody names one
_NO_STEP = "none is tried: with parallel=fsdp no device has the whole model, and a step takes all of them"


def check_run(config: TrainConfig, path: Path) -> None:
    """Print what a start of `config` in the directory `path` would do; nothing is written.

    Raises what a start would raise; a directory that is occupied is refused after the plan. `RunFailed`
    where a step does not fit into memory. Of several ranks each checks what it would, and rank 0 prints.
    """
    with rendezvous.meeting() as meeting:
        _check_run(config, Path(os.path.abspath(path)), meeting)
        meeting.gather("checked")  # whatever rank 0 still finds is the end of all


def _check_run(config: TrainConfig, path: Path, meeting: Meeting) -> None:
    ranks = meeting.ranks
    found = auto_resume.find(config, path, meeting)
    occupied = _refusal(config, path, found) if ranks.leads else None
    begin = start.settle(config, path, found, meeting)
    if not ranks.leads:
        if begin is not None and not meeting.agree("missing", None):
            with start.opened(config, path, begin, _nothing, writes=False, meeting=meeting):
                pass
        return
    if begin is None:
        assert found.saved is not None
        printed("run", [completion.in_words(config, path, found.saved), "a start would do nothing"])
        return
    if occupied is not None:
        printed("refused", ["a start in that directory: see the end"])
    missing = unprepared(config)
    if meeting.agree("missing", bool(missing)):
        _check_unprepared(config, path, begin, missing, ranks)
    else:
        with start.opened(
            config, path, begin, lambda line: printed("", [line]), writes=False, meeting=meeting
        ) as plan:
            _check_plan(plan, ranks)
    if occupied is not None:
        raise occupied


def _refusal(config: TrainConfig, path: Path, found: Found) -> UserError | None:
    """Why the run may not write into its directory."""
    try:
        admission.check(config, path, found)
        if path.exists():
            with admission.locked(path):
                pass
    except UserError as error:
        return error
    return None


def _check_plan(plan: Plan, ranks: Ranks) -> None:
    config, data, progress = plan.config, plan.data, progress_of(plan.saved)
    where = f", epoch {progress.epoch}, position {plan.loader.position:,}"
    printed("run", [*_run_lines(plan.path, plan.saved, plan.initial, where), *plan.changes])
    printed("data", data_lines(data))
    printed("loader", loader_lines(config, data.train))
    share = _share(config, ranks)
    shape = shape_of(share, data.train.vocab_size, plan.device, _shards(config, ranks))
    _print_shape(config, share, shape, plan.device, plan.loader, progress)
    if shape.shards > 1:
        printed("dry step", [_NO_STEP])
        return
    known = len(plan.changes)
    dry = try_step(share, shape, plan.device, lambda: start.learner_of(plan), lambda: start.first_batch(plan))
    printed("", plan.changes[known:])
    what = "" if plan.saved is plan.initial is None else "with its weights, "
    _print_dry(config, plan.device, shape, dry, what)
    printed("time", [_time_line(config, progress, dry, data.validation)])


def _share(config: TrainConfig, ranks: Ranks) -> TrainConfig:
    """What one of the ranks takes of a step, which is said."""
    if not ranks.several:
        return config
    rows = config.loader.batch_size // ranks.size
    printed(
        "ranks",
        [f"{ranks.size}, each with {rows:,} of a step's {config.loader.batch_size:,}; below: of one of them"],
    )
    return dataclasses.replace(config, loader=dataclasses.replace(config.loader, batch_size=rows))


def _shards(config: TrainConfig, ranks: Ranks) -> int:
    return ranks.size if is_sharded(config, ranks) else 1


def _check_unprepared(
    config: TrainConfig, path: Path, begin: Start, missing: list[TrainConfig], ranks: Ranks
) -> None:
    """What can be said before the set is there: a start would prepare it by itself."""
    from harness.prepare import expected_vocab_size

    saved, device = begin.found.saved, begin.device
    printed("run", _run_lines(path, saved, begin.initial))
    for one in missing:
        lines = [
            f"there is no prepared set at {shown(set_directory(one))}: a start would prepare it first, "
            "from the embedded corpus",
            f"to prepare it now: {prepare_command(one)}",
            "what follows from its size cannot be said before",
        ]
        printed("data", lines)
    vocab_size = expected_vocab_size(config.tokenizer) if saved is None else saved.trainer["vocab_size"]
    share = _share(config, ranks)
    shape = shape_of(share, vocab_size, device, _shards(config, ranks))
    progress = progress_of(saved)
    _print_shape(config, share, shape, device, None, progress)
    if shape.shards > 1:
        printed("dry step", [_NO_STEP])
        return

    def learner() -> Learner:
        return build_learner(config, vocab_size, device, None, begin.initial)

    dry = try_step(share, shape, device, learner, lambda: random_batch(share, vocab_size))
    _print_dry(config, device, shape, dry, "on random tokens, ")
    printed("time", [_time_line(config, progress, dry, None)])


def _run_lines(
    path: Path, saved: Checkpoint | None, initial: Checkpoint | None, where: str = ""
) -> list[str]:
    """What would begin, and from what; `where` the data goes on."""
    if saved is not None and saved.run_dir == path:
        return [f"{shown(path)} goes on after step {saved.step}{where}"]
    place = f"a folder in {shown(path.parent.parent)} named by the time of its start"
    place = place if _BY_TIME.fullmatch(path.name) else str(shown(path))
    if saved is not None:
        return [f"{place}, a branch of {shown(saved.run_dir)} after step {saved.step}{where}"]
    lines = [f"{place}, a new run"]
    if initial is not None:
        lines.append(f"begins with the weights of {shown(initial.path)}")
    return lines


def _print_shape(
    config: TrainConfig,
    share: TrainConfig,
    shape: Shape,
    device: torch.device,
    loader: Loader | None,
    progress: Progress,
) -> None:
    """`share`: what one rank takes of a step of `config`."""
    memory, room = shape.memory, shape.room
    saved = shape.shards * (memory.weights + memory.optimizer)
    printed("budget", budget_lines(config, loader, progress, saved))
    printed("model", [model_line(config, shape.model)])
    lines = memory_lines(memory, room, str(device))
    if room is not None and memory.total > room:
        lines.append(f"WARNING: that is more than there is. {mend(share, shape)}")
    printed("memory", lines)


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
    memory = "its memory cannot be measured here"
    if dry.growth is not None:
        held, step = shape.memory.held, shape.memory.step
        memory = (
            f"{size(held + dry.growth)} of memory at its peak: {size(dry.growth)} measured (estimate "
            f"{size(step)}), {size(held)} for the weights and the optimizer"
        )
    rate = config.loader.batch_size * config.loader.seq_len / dry.seconds
    lines = [
        f"{what}loss {dry.loss:.4f}; {reason}",
        f"{lasting(dry.seconds)} a step without the optimizer's part, {rate:,.0f} tokens/s on {device}",
        memory,
    ]
    printed("dry step", lines)


def _time_line(config: TrainConfig, progress: Progress, dry: DryStep, validation: Store | None) -> str:
    """How long the run would take, from a step's time and an evaluation's."""
    steps = total_steps(config, progress.step, progress.tokens) - progress.step
    training, evaluating = steps * dry.seconds, evaluation_seconds(config, progress, dry, validation)
    return (
        f"estimate: {lasting(training + evaluating)} = {lasting(training)} for {steps:,} steps + "
        f"{lasting(evaluating)} for evaluations; without start, saves and text samples"
    )


def _nothing(line: str) -> None:
    """The report of a rank that says nothing."""
