"""The runs that `bench_nanogpt.py` compares: nanoGPT's recipe for a CPU as its command and as ours."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from parts.bench_parts import write_set

ROOT = Path(__file__).resolve().parents[2]
STEPS, WARM_UP = 2000, 100
BLOCK, BATCH = 64, 12
LOG_EVERY = 10
FIRST_TIMED = 50  # the steps before it are warm-up, of caches and of allocators

# nanoGPT's script, with its seed moved: it has none on its command line.
_SEEDED = (
    "import runpy, sys, torch; seed = torch.manual_seed; moved = int(sys.argv.pop(1)); "
    "torch.manual_seed = lambda value: seed(value + moved); "
    "runpy.run_path('train.py', run_name='__main__')"
)
# The mean loss of its checkpoint over all targets of val.bin, by its own model.
_JUDGE = """
import sys, numpy as np, torch
from model import GPT, GPTConfig
saved = torch.load(sys.argv[1], map_location="cpu", weights_only=True)
model = GPT(GPTConfig(**saved["model_args"])).eval()
model.load_state_dict(saved["model"])
ids, block = torch.from_numpy(np.fromfile(sys.argv[2], np.uint16).astype(np.int64)), model.config.block_size
total, count = 0.0, len(ids) - 1
with torch.no_grad():
    for start in range(0, count, block):
        end = min(start + block, count)
        loss = model(ids[None, start:end], ids[None, start + 1 : end + 1])[1]
        total += loss.item() * (end - start)
print("mean loss", total / count)
"""


def bin_file(checkout: Path, split: str) -> Path:
    """The checkout's own token ids of a split, uint16 without a header."""
    return checkout / "data" / "shakespeare_char" / f"{split}.bin"


def write_shakespeare(checkout: Path, directory: Path) -> None:
    """nanoGPT's token ids as a prepared set of the harness; ids mean nothing to it, so no text is sampled."""
    ids = {split: np.fromfile(bin_file(checkout, split), np.uint16) for split in ("train", "val")}
    write_set(directory, ids, {"vocab_size": 1 + max(int(tokens.max()) for tokens in ids.values())})


def nanogpt_command(folder: Path, seed: int, steps: int) -> list[str]:
    """Its README's words for a CPU; it saves after `steps` steps, and then makes one more."""
    words = [f"--max_iters={steps}", f"--lr_decay_iters={STEPS}", f"--eval_interval={steps}"]
    words += ["--device=cpu", "--compile=False", "--eval_iters=1", f"--log_interval={LOG_EVERY}"]
    words += [f"--block_size={BLOCK}", f"--batch_size={BATCH}", "--n_layer=4", "--n_head=4", "--n_embd=128"]
    words += ["--dropout=0.0", "--always_save_checkpoint=True", f"--out_dir={folder}"]
    recipe = "config/train_shakespeare_char.py"
    return [sys.executable, "-u", "-c", _SEEDED, str(seed), recipe, *words]


def harness_command(folder: Path, data: Path, seed: int, steps: int) -> list[str]:
    """The same recipe in our words."""
    words = [f"data.path={data}", "loader=sliding_window", "loader.sampling=uniform", f"seed={seed}"]
    words += [f"loader.seq_len={BLOCK}", f"loader.batch_size={BATCH}", "model=nano", "model.gelu=erf"]
    words += ["optimizer.lr=1e-3", "optimizer.betas=[0.9,0.99]", "optimizer.weight_decay=0.1"]
    words += [f"schedule.warmup_steps={WARM_UP}", f"schedule.total_steps={STEPS}", "trainer.grad_clip=1"]
    words += ["schedule.min_lr_ratio=0.1", f"trainer.max_steps={steps}", f"evaluation.interval={steps}"]
    words += ["evaluation.tokens=111539", "evaluation.sample_tokens=0", f"checkpoint.interval={steps}"]
    words += [f"trainer.log_interval={LOG_EVERY}", "device=cpu", "tracker=none", f"hydra.run.dir={folder}"]
    return [sys.executable, "-u", str(ROOT / "train.py"), *words]


class Lines:
    """A process's output with the time of each line that tells a step."""

    def __init__(self, command: list[str], cwd: Path, pattern: str, environment: dict[str, str]) -> None:
        self.steps: list[tuple[int, float]] = []
        self.text: list[str] = []
        with subprocess.Popen(
            command, cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                found = re.match(pattern, line)
                self.text.append(line)
                if found:
                    self.steps.append((int(found.group(1)), time.perf_counter()))
        if process.returncode != 0:
            raise SystemExit(
                f"error: {' '.join(command)} ended with {process.returncode}:\n" + "".join(self.text[-30:])
            )

    def tokens_per_s(self, last: int) -> float:
        """Between the first timed step's line and the last that no evaluation follows."""
        times = {step: at for step, at in self.steps if FIRST_TIMED <= step <= last}
        first, end = min(times), max(times)
        return (end - first) * BLOCK * BATCH / (times[end] - times[first])


class Trial:
    """Both sides' commands over one pair of folders, and what they measure."""

    def __init__(self, checkout: Path, folder: Path, threads: int | None) -> None:
        self.checkout, self.folder = checkout, folder
        write_shakespeare(checkout, folder / "set")
        self.environment = dict(os.environ)
        if threads is not None:
            self.environment["OMP_NUM_THREADS"] = str(threads)
        self._runs = 0

    def nanogpt(self, seed: int, steps: int) -> tuple[Path, float]:
        """Train nanoGPT: its checkpoint, and its tokens a second."""
        out = self._next()
        command = nanogpt_command(out, seed, steps)
        lines = Lines(command, self.checkout, r"iter (\d+):", self.environment)
        return out / "ckpt.pt", lines.tokens_per_s(steps - LOG_EVERY)

    def harness(self, seed: int, steps: int) -> tuple[Path, float]:
        """Train the harness: its run directory, and its tokens a second."""
        out = self._next()
        command = harness_command(out, self.folder / "set", seed, steps)
        lines = Lines(command, self.folder, r"step (\d+)/", self.environment)
        return out, lines.tokens_per_s(steps - LOG_EVERY)

    def judge(self, checkpoint: Path) -> float:
        """The mean loss over val.bin of nanoGPT's checkpoint, by its own code, in nats."""
        command = [sys.executable, "-c", _JUDGE, str(checkpoint), str(bin_file(self.checkout, "val"))]
        found = subprocess.run(command, cwd=self.checkout, text=True, capture_output=True, check=True)
        return float(found.stdout.split()[-1])

    def _next(self) -> Path:
        self._runs += 1
        return self.folder / f"run-{self._runs}"


def harness_loss(run: Path) -> float:
    """The mean loss over val.bin that the run's last evaluation found, in nats."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    loss: float = [row["val_loss"] for row in rows if "val_loss" in row][-1]
    return loss
