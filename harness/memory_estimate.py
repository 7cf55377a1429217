"""How much memory a step will need, by arithmetic; and how much there is.

The activations are those that `model.py` keeps for the backward pass, C channels a token:

    16 C a layer in float32: what both norms are given (2 C) and give (2 C), queries, keys and values (3 C),
    what attention gives (C), what the GELU is given (4 C) and gives (4 C). Under bf16 autocast only what the
    norms are given stays in float32. Dropout keeps masks. Attention keeps nothing of size T x T, but for
    dropout on a CPU, whose kernel keeps three such matrices a head.
    Logits: the log-probabilities and two gradients of their size, in float32.

`compile` needs less. Allocators need some more, and a GPU's libraries their workspaces.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config import TrainConfig, layout
from harness.device import uses_bf16

if TYPE_CHECKING:
    import torch

_LOGITS = 3 * 4  # bytes for each of a token's logits


@dataclass(frozen=True)
class Memory:
    """Bytes. `reference`: the frozen weights of a run on preferences; `casts`: the bf16 copies of the weights
    that the backward pass needs; both 0 where there are none.
    """

    weights: int
    gradients: int
    optimizer: int
    reference: int
    casts: int
    activations: int
    logits: int
    accumulates: bool

    @property
    def held(self) -> int:
        """What is there in every step, whatever the batch."""
        return self.weights + self.optimizer + self.reference

    @property
    def step(self) -> int:
        """What a step needs beside it at its peak: one micro-batch's gradients come as its activations go."""
        kept = self.casts + self.activations
        return kept + (self.logits + self.gradients if self.accumulates else max(self.logits, self.gradients))

    @property
    def total(self) -> int:
        return self.held + self.step


def estimate(config: TrainConfig, stored: int, vocab_size: int, device: torch.device) -> Memory:
    """The memory of a run whose model stores `stored` numbers."""
    weights = 4 * stored
    pairs = layout(config.loader) == "contrastive"
    tokens = micro_batch(config) * config.loader.seq_len * (2 if pairs else 1)
    return Memory(
        weights=weights,
        gradients=weights,
        optimizer=2 * weights,  # AdamW's two moments
        reference=weights if pairs else 0,
        casts=weights // 2 if uses_bf16(config.precision, device) else 0,
        activations=tokens * _activations_a_token(config, device),
        logits=tokens * vocab_size * _LOGITS,
        accumulates=micro_batch(config) < config.loader.batch_size,
    )


def micro_batch(config: TrainConfig) -> int:
    """Sequences, or pairs, that the device takes at once."""
    return config.trainer.micro_batch_size or config.loader.batch_size


def _activations_a_token(config: TrainConfig, device: torch.device) -> int:
    model, on_cpu = config.model, device.type == "cpu"
    a_layer = (36 if uses_bf16(config.precision, device) else 64) * model.n_embd
    ends = 12 * model.n_embd  # the embeddings' sum, and both sides of the last norm
    if model.dropout:
        a_layer += 2 * model.n_embd * (4 if on_cpu else 1)
        ends += model.n_embd * (4 if on_cpu else 1)
        if on_cpu:
            matrix = 4 * model.n_head * config.loader.seq_len
            a_layer, ends = a_layer + 3 * matrix, ends + matrix
    return model.n_layer * a_layer + ends


def fitting_micro_batch(config: TrainConfig, memory: Memory, room: int) -> int | None:
    """The largest micro-batch, of those that divide the batch, whose step fits into `room` bytes by estimate.

    None where not even one sequence would.
    """
    a_sequence = (memory.activations + memory.logits) / micro_batch(config)
    fixed = memory.held + memory.casts + memory.gradients
    batch = config.loader.batch_size
    fitting = [n for n in range(1, micro_batch(config)) if batch % n == 0 and fixed + n * a_sequence <= room]
    return max(fitting, default=None)


def room_on(device: torch.device) -> int | None:
    """Bytes that a new process could still take there; None where the system does not say."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    rooms = [room for room in (_host_room(), _group_room()) if room is not None]
    return min(rooms, default=None)


def _host_room() -> int | None:
    return _fields(Path("/proc/meminfo"), 1024).get("MemAvailable")


def _group_room() -> int | None:
    """What the limit of our control group leaves beside what is no cache; None without a limit."""
    folder = Path("/sys/fs/cgroup")
    try:
        group = next(
            line.strip().rpartition(":")[2]
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if line.startswith("0::")
        )
        folder = next(f for f in (folder / group.lstrip("/"), folder) if (f / "memory.max").is_file())
        return int((folder / "memory.max").read_text()) - _fields(folder / "memory.stat")["anon"]
    except (OSError, ValueError, KeyError, StopIteration):
        return None


def _fields(path: Path, unit: int = 1) -> dict[str, int]:
    """Lines of a name and a number, in bytes; empty where there is no such file."""
    try:
        lines = [line.replace(":", " ").split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) * unit for line in lines if len(line) > 1 and line[1].isdigit()}
