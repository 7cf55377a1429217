"""What the data chain costs a step, and how fast an audit recomputes it.

    python scripts/bench_chain.py [--pairs 10] [--steps 20] [--tokens 33554432] [--json PATH]

The step: `trainer.train` with the chain and without it, two runs of the same weights in one process that
take turns, a block of steps each, as in bench_loop.py; once with what conf/ sets (model=nano), once with a
tiny model at 32 x 1024 tokens, where most of the work is the data's. A pair gives two ratios: of elapsed
time, in which a thread of its own hashes while the step computes, and of processor time, in which nothing is
hidden and which a busy machine disturbs less. Beside them stands what hashing one batch takes by itself, as a
share of a step's processor time.

The audit: the records of a run over a set of `--tokens` random tokens, written without a model, are audited;
beside it the same batches are only read, by as many threads. Both are warm.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench_loop import compose_config, harness_block
from parts.bench_parts import (
    CPU,
    VOCAB_SIZE,
    console,
    machine,
    measured_where,
    median_interval,
    write_random_set,
)

from harness.auditing.audit import audit
from harness.auditing.data_chain import DataChain, batch_digest
from harness.auditing.replay import SegmentReader, open_run, source_of
from harness.build import assemble, build_learner
from harness.config import TrainConfig, set_directory
from harness.config_groups import LoaderConfig, SlidingWindowConfig
from harness.config_record import to_dict
from harness.data_setup import open_data
from harness.files import write_atomic, write_json
from harness.loaders import build_loader, make_loader
from harness.resuming import lineage
from harness.run_files.run_dir import Status, log_file
from harness.storage import open_store
from harness.tracking import NoTracker
from harness.tracking.jsonl import MetricsFile
from harness.training.run import Run

LOADERS: dict[str, type[LoaderConfig]] = {"sequential": LoaderConfig, "sliding_window": SlidingWindowConfig}


@contextmanager
def a_run(config: TrainConfig, path: Path, *, chain: bool) -> Iterator[Run]:
    """A run that is ready to train, with or without the chain."""
    config.trainer.data_chain = chain
    path.mkdir()
    with closing(open_data(config, print)) as data, closing(make_loader(config.loader, data.train)) as loader:
        learner = build_learner(config, VOCAB_SIZE, CPU, None)
        with log_file(path), console():
            run = assemble(
                config, path, learner=learner, data=data, loader=loader, device=CPU, saved=None,
                status=Status(path / "status.json"), tracker=NoTracker(), identity={"run_id": "bench"},
            )  # fmt: skip
            with run.chain:
                yield run


def measure_step(options: argparse.Namespace, folder: Path, name: str) -> dict[str, Any]:
    """Blocks with and without the chain in turns, and what hashing a batch takes."""
    folder.mkdir()
    options.model, options.batch_size, options.seq_len = "nano", None, None
    if name != "nano":
        options.batch_size, options.seq_len = 32, 1024
    with ExitStack() as stack:
        runs: list[Run] = []
        for chain in (True, False):
            config = compose_config(options, folder)
            if name != "nano":
                config.model.n_layer, config.model.n_head, config.model.n_embd = 1, 1, 32
            if not runs:
                size = config.loader.batch_size * config.loader.seq_len
                write_random_set(set_directory(config), ((options.pairs + 1) * options.steps + 3) * size + 1)
            runs.append(stack.enter_context(a_run(config, folder / f"run-{chain}", chain=chain)))
        pairs = []
        for number in range(options.pairs + 1):
            blocks = {}
            for chain in (True, False) if number % 2 else (False, True):
                begun = time.process_time()
                elapsed = harness_block(runs[not chain], options.steps)
                blocks[chain] = (elapsed, time.process_time() - begun)
            pairs.append((blocks[True], blocks[False]))
    step_ms = statistics.median(off[1] for _, off in pairs[1:]) / options.steps * 1e3
    hash_ms = hashing_ms(config)
    result = {
        "name": name,
        "batch": [config.loader.batch_size, config.loader.seq_len],
        "step_ms": step_ms,
        "hash_ms": hash_ms,
        "share": hash_ms / step_ms,
    }
    for kind, key in enumerate(("elapsed", "processor")):
        ratios = [on[kind] / off[kind] for on, off in pairs[1:]]
        result[key] = [statistics.median(ratios), *median_interval(ratios)[:2]]
    return result


def hashing_ms(config: TrainConfig) -> float:
    """Milliseconds of processor time to hash one batch, the median of several."""
    with closing(open_store(set_directory(config), "train")) as store:
        loader, times = build_loader(config.loader, store), []
        for _ in range(min(20, loader.batches_per_epoch)):
            batch = loader.next_batch()
            begun = time.thread_time()
            batch_digest(batch)
            times.append(time.thread_time() - begun)
    return statistics.median(times) * 1e3


def write_records(path: Path, data: Path, config: LoaderConfig) -> int:
    """A run directory as a run over one epoch leaves it, its checkpoints apart; its steps."""
    path.mkdir()
    with closing(open_store(data, "train")) as store:
        loader, metrics = build_loader(config, store), MetricsFile(path / "metrics.jsonl")
        steps = loader.batches_per_epoch
        run_config = TrainConfig(loader=config)
        run_config.trainer.max_steps = steps
        write_atomic(path / "config.yaml", _yaml(run_config))
        digest = store.metadata_sha256
        segment = lineage.Segment(
            step=0, run_id="bench", path=str(path), data_path=str(data), metadata_sha256=digest,
            loader=to_dict(config), cursor=loader.state_dict(), epoch=0, data_chain=digest,
        )  # fmt: skip
        lineage.write(path, [segment])
        with DataChain(digest) as chain, closing(metrics):
            for step in range(1, steps + 1):
                batch = loader.next_batch()
                chain.add(batch)
                if step % 10 == 0 or step == steps:
                    tokens = step * config.batch_size * config.seq_len
                    place = {"epoch": 0, "tokens": tokens, "position": batch.cursor["position"]}
                    metrics.append({"step": step, "loss": 0.0, **place, "data_chain": chain.value()})
    return steps


def _yaml(config: TrainConfig) -> str:
    import yaml

    return yaml.safe_dump(to_dict(config), sort_keys=False)


def measure_audit(data: Path, folder: Path, name: str, threads: int) -> dict[str, Any]:
    """Tokens a second of an audit, and of reading the same batches."""
    config = LOADERS[name](seq_len=1024, batch_size=32)
    path = folder / f"audited-{name}"
    steps = write_records(path, data, config)
    record = open_run(path)
    tokens, audits, reads = steps * 32 * 1024, [], []
    for _ in range(3):
        reads.append(tokens / _read_seconds(record, steps, threads))
        result = audit(record, threads=threads)
        assert not result.faults
        audits.append(result.recomputed.tokens / result.recomputed.seconds)
    return {
        "loader": name,
        "steps": steps,
        "audit": statistics.median(audits),
        "read": statistics.median(reads),
    }


def _read_seconds(record: Any, steps: int, threads: int) -> float:
    first = SegmentReader.open(source_of(record, record.segments[0]))

    def read(part: range) -> None:
        reader = first.copy()
        for step in part:
            reader.batch(step)

    size = -(-steps // threads)
    parts = [range(start, min(start + size, steps + 1)) for start in range(1, steps + 1, size)]
    begun = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, parts))
    return time.perf_counter() - begun


def report(result: dict[str, Any]) -> None:
    """Print the figures for people."""
    print(measured_where(result))
    for line in result["steps"]:
        print(
            f"{line['name']:<14} {line['batch'][0]} x {line['batch'][1]}: step {line['step_ms']:.2f} ms, "
            f"hashing a batch {line['hash_ms']:.3f} ms of the processor = {line['share']:.2%}"
        )
        for key in ("elapsed", "processor"):
            middle, low, high = line[key]
            print(f"    {key} time with the chain over without {middle:.4f} ({low:.4f} .. {high:.4f})")
    for line in result["audits"]:
        print(
            f"audit of {line['loader']:<14}, {result['audit_threads']} threads: {line['audit'] / 1e6:.1f} M "
            f"tokens/s; reading the same batches {line['read'] / 1e6:.1f} M"
        )


def main() -> None:
    """Measure, print, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=10, help="pairs of blocks that count (10)")
    parser.add_argument("--steps", type=int, default=20, help="steps of a block (20)")
    parser.add_argument("--tokens", type=int, default=1 << 25, help="tokens of the set that is audited")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the audit")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where all lies")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    if options.pairs < 1 or options.steps < 1 or options.tokens < 1 << 16:
        parser.error("--pairs and --steps must be at least 1, --tokens at least 65536")
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="bench-chain-", dir=options.folder) as temporary:
        folder = Path(temporary)
        steps = [measure_step(options, folder / name, name) for name in ("nano", "tiny-32x1024")]
        write_random_set(folder / "set", options.tokens)
        audits = [measure_audit(folder / "set", folder, name, options.threads) for name in LOADERS]
    result = {
        "steps": steps,
        "audits": audits,
        "audit_threads": options.threads,
        "load_average": [load_before, os.getloadavg()[0]],
        "machine": machine(),
    }
    report(result)
    if options.json:
        write_json(options.json, result)


if __name__ == "__main__":
    main()
