"""The loop: one loader batch is one optimizer step.

Steps count from 1; row k of the metrics is the k-th step, with the learning rate it used, the gradient norm
before clipping and the cursor after it. The host waits for the device at logged steps only.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from harness.checkpoints import rng
from harness.config import TrainConfig, tokens_per_step
from harness.config_record import to_dict
from harness.distributed import rendezvous
from harness.distributed.parallel import (
    clip_gradients,
    counts_alike,
    micro_batch_size,
    own_rows,
    summed,
    whole,
)
from harness.errors import RunFailed
from harness.optim import lr_at
from harness.training import garbage
from harness.training.evaluation import evaluate
from harness.training.objectives import backward
from harness.training.run import Run

if TYPE_CHECKING:
    from harness.loaders import Batch
    from harness.preemption import StopRequest

log = logging.getLogger("harness")


@garbage.frozen()
def train(run: Run, stop: StopRequest) -> bool:
    """Train to the budget: True. Or until `stop` asks: False. Both end in a checkpoint."""
    config, progress = run.config, run.progress
    budget = run.budget
    schedule_steps = config.schedule.total_steps or budget
    micro = micro_batch_size(config, run.ranks)
    run.status.update(phase="train", step=progress.step)
    run.log.begin(progress, budget, tokens_per_step(config), unevaluated=run.unevaluated)
    if run.unevaluated:
        run_evaluation(run, stop)
    while progress.step < budget and not is_asked_to_stop(run, stop):
        started = time.monotonic()
        batch, waited = next_batch(run)
        run.chain.add(batch)
        lr = lr_at(progress.step + 1, config.optimizer.lr, config.schedule, schedule_steps)
        metrics, grad_norm = train_step(run, batch, lr, micro)
        progress.step += 1
        progress.tokens += tokens_per_step(config)
        run.cursor = batch.cursor
        run.guard.note(progress.step, progress.epoch, batch)
        last, evaluates = progress.step == budget, evaluation_is_due(config, progress.step, budget)
        run.log.waited(waited)
        run.status.note(step=progress.step, last_saved=run.saver.last_saved)
        if config.trainer.log_batch_hash or last or progress.step % config.trainer.log_interval == 0:
            run.guard.settle()
            if run.ranks.leads:
                log_step(run, metrics, grad_norm, lr, evaluates=evaluates)
        run.limit.stepped(time.monotonic() - started)
        if run.profiler is not None:
            run.profiler.made(progress.step)
        if evaluates:
            run.guard.settle()
            with saved_on_failure(run):
                run_evaluation(run, stop)
        if last or run.saver.due(progress.step, run.agreement.late):
            save(run)
    if run.agreement.stopped:
        save(run)
    run.agreement.end()
    run.status.update(phase="save", step=progress.step)
    run.saver.finish()
    run.status.note(last_saved=run.saver.last_saved)
    return progress.step >= budget and not run.unevaluated


def is_asked_to_stop(run: Run, stop: StopRequest) -> bool:
    """Whether a signal or the end of the time asks, of several ranks any of them; `stop.name` says which.

    A collective: a rank must not ask alone.
    """
    wishes_to_stop(run, stop)
    return run.agreement.stops(stop, late=run.saver.is_late)


def wishes_to_stop(run: Run, stop: StopRequest) -> bool:
    """Whether this process is asked to stop."""
    if stop.name is None and run.limit.is_near(run.saver.seconds, saving=run.saver.is_writing):
        stop.name = run.limit.reason
    return stop.name is not None


def evaluation_is_due(config: TrainConfig, step: int, budget: int) -> bool:
    """Whether step `step`, just done, is to be evaluated: every so many, and the last of the `budget`."""
    return step == budget or step % config.evaluation.interval == 0


def next_batch(run: Run) -> tuple[Batch, float]:
    """The next batch and the seconds it was waited for; the trainer, not the loader, begins a new epoch."""
    start = time.perf_counter()
    try:
        batch = run.loader.next_batch()
    except StopIteration:
        run.progress.epoch += 1
        run.loader.start_epoch(run.progress.epoch)
        log.info("epoch %d begins after step %d", run.progress.epoch, run.progress.step)
        batch = run.loader.next_batch()
    return batch, time.perf_counter() - start


def train_step(run: Run, batch: Batch, lr: float, micro: int) -> tuple[dict[str, Tensor], Tensor]:
    """One optimizer step over a global batch in micro-batches: metrics and gradient norm, on the device.

    A rank computes its own rows; metrics, norm and step are those of all.

    A batch without a target has loss 0 and changes nothing: a step with its zero gradient would still decay
    the weights and follow old momentum.
    """
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    ranks, own = run.ranks, own_rows(batch, run.objective, run.ranks)
    weight, rows, empty = whole(run.objective, own.targets, ranks, alike=counts_alike(run.config))
    if ranks.leads:
        run.log.targets(run.progress.step + 1, rows, empty)
    inputs, targets = run.feed(own)
    totals = backward(
        run.objective, inputs, targets, weight, micro, run.device, run.autocast, ranks=ranks.size
    )
    limit = run.config.trainer.grad_clip or float("inf")
    grad_norm = clip_gradients(run.model, limit)
    totals, grad_norm = summed(totals, grad_norm, ranks)
    if empty < rows:
        run.guard.step(totals["loss"], grad_norm)
    run.optimizer.zero_grad(set_to_none=True)
    return totals, grad_norm


def log_step(run: Run, metrics: dict[str, Tensor], grad_norm: Tensor, lr: float, *, evaluates: bool) -> None:
    """Write the row of the step just done; waits for the device."""
    row: dict[str, Any] = {name: value.item() for name, value in metrics.items()}
    row |= {"lr": lr, "grad_norm": grad_norm.item(), **data_hashes(run)}
    if run.guard.has_skipped(run.progress.step):
        row["skipped"] = True
    run.log.step(run.progress, run.cursor["position"], row, evaluates=evaluates)
    run.memory.sample()


def data_hashes(run: Run) -> dict[str, str]:
    """What a row says of its data: the batch's own hash where it was asked for, and the chain over all."""
    hashes = {"batch_sha256": run.chain.last_sha256()} if run.config.trainer.log_batch_hash else {}
    return hashes | data_chain(run)


def data_chain(run: Run) -> dict[str, str]:
    """The chain over all batches so far, for any row; empty where there is none."""
    value = run.chain.value()
    return {} if value is None else {"data_chain": value}


@contextlib.contextmanager
def saved_on_failure(run: Run) -> Iterator[None]:
    """What only looks at the model must not cost its steps: they are saved before the error goes on.

    The other ranks may be gone by then, so their random state is asked for before. Of a sharded model one
    rank cannot save anything.
    """
    if run.is_sharded:
        yield
        return
    with rendezvous.current().holding():
        random = rng.state_of(run.ranks, run.device) if run.ranks.several else None
        try:
            yield
        except Exception:
            try:
                save(run, random)
                run.saver.finish()
            except RunFailed as failed:
                log.error("%s", failed)
            raise


class Abandoned(Exception):
    """An evaluation or a text sample that a request to stop cut short."""


def run_evaluation(run: Run, stop: StopRequest) -> None:
    """Evaluate, and sample a text; the training stream stays put.

    Where `stop` asks, what is not done yet is left; an evaluation is then made when the run goes on. All
    ranks evaluate; rank 0 alone samples, but of a sharded model it needs the others.
    """

    def between() -> None:
        run.status.note()
        if is_asked_to_stop(run, stop):
            raise Abandoned

    def between_tokens() -> None:
        run.status.note()
        if is_asked_to_stop(run, stop) if run.is_sharded else wishes_to_stop(run, stop):
            raise Abandoned

    run.unevaluated = True
    with run.log.paused(), contextlib.suppress(Abandoned):
        run.status.update(phase="evaluate", step=run.progress.step)
        evaluate_step(run, between)
        run.unevaluated = False
        if run.progress.val_loss is not None:
            sample_text(run, between_tokens)
    run.status.update(phase="train")


def evaluate_step(run: Run, between: Callable[[], None]) -> None:
    """Evaluate; log a row of its own; remember the best."""
    config, progress = run.config, run.progress
    result = evaluate(
        run.model,
        run.validation,
        tokens=config.evaluation.tokens,
        batch_size=micro_batch_size(config, run.ranks),
        seq_len=config.loader.seq_len,
        autocast=run.autocast,
        objective=run.judge,
        between=between,
        ranks=run.ranks,
    )
    progress.evaluated(result.loss)
    run.log.evaluation(progress, run.cursor["position"], result, data_chain(run))


def sample_text(run: Run, between: Callable[[], None]) -> None:
    """Log a text sample, where one is wanted and its tokens can be decoded."""
    tokens = run.config.evaluation.sample_tokens
    if run.sample is not None and tokens and (run.ranks.leads or run.is_sharded):
        run.status.update(phase="sample")
        log.info("sample: %r", run.sample(tokens, between))


def save(run: Run, random: dict[str, Any] | None = None) -> None:
    """Checkpoint the current step, unless it is saved already. Rank 0 writes; in shards every rank its own.

    `random` is the ranks' random state of this step; None asks them for it, a collective.
    """
    progress = run.progress
    run.guard.settle()  # nothing is saved after a step that was no step
    random = rng.state_of(run.ranks, run.device) if random is None else random
    run.agreement.saved()
    if not (run.ranks.leads or run.is_sharded):
        return
    run.log.take_times(progress)
    progress.peak_memory_mb = max(progress.peak_memory_mb or 0.0, run.memory.megabytes())
    with run.log.paused():
        waits = run.saver.waits
        if waits:
            run.status.update(phase="save", step=progress.step)
        parts = {
            **tensors_of(run),
            "rng": random,
            "loader": run.cursor,
            "trainer": {**vars(progress), "data_chain": None, **data_chain(run), **run.identity},
            "config": to_dict(run.config),
        }
        # The rows that a checkpoint counts on are durable before it is.
        run.saver.save(parts, before=run.log.metrics.sync)
        if waits:
            run.status.update(phase="train", last_saved=run.saver.last_saved)


def tensors_of(run: Run) -> dict[str, Any]:
    """What a save is given of model and optimizer; for shards, of which each rank has its own, themselves."""
    if run.is_sharded:
        return {"model": run.model, "optimizer": run.optimizer}
    return {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
