"""How much memory a step will need, by arithmetic; and how much there is.

The activations are those that `model.py` keeps for the backward pass, C channels a token:

    16 C a layer in float32: what both norms are given (2 C) and give (2 C), queries, keys and values (3 C),
    what attention gives (C), what the GELU is given (4 C) and gives (4 C). Under bf16 autocast only what the
    norms are given stays in float32. Dropout keeps masks. Attention keeps nothing of size T x T, but for
    dropout on a CPU, whose kernel keeps three such matrices a head.
    Logits: the log-probabilities and two gradients of their size, in float32. In chunks: two of a chunk's
    size, and the head's gradient twice.

With activation checkpointing a layer keeps what it is given (C, in float32), and one has all of the above.
`compile` needs less. Allocators need some more, and a GPU's libraries their workspaces.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config import TrainConfig, layout
from harness.hardware.device import uses_bf16
from harness.optim import copied_numbers, state_numbers

if TYPE_CHECKING:
    import torch

    from harness.model import GPT

_LOGITS = 3 * 4  # bytes for each of a token's logits
_CHUNK_LOGITS = 2 * 4


@dataclass(frozen=True)
class Memory:
    """Bytes. `reference`: the frozen weights of a run on preferences; `casts`: the bf16 copies of the weights
    that the backward pass needs; `update`: what the optimizer's step copies; `gathered`: of a sharded model
    the parts that are whole for a while, with their gradients; all 0 where there are none.
    """

    weights: int
    gradients: int
    optimizer: int
    reference: int
    casts: int
    activations: int
    logits: int
    update: int
    accumulates: bool
    gathered: int = 0

    @property
    def held(self) -> int:
        """What is there in every step, whatever the batch."""
        return self.weights + self.optimizer + self.reference

    @property
    def step(self) -> int:
        """What a step needs beside it at its peak: one micro-batch's gradients come as its activations go."""
        ends = [self.logits, self.gradients]
        passes = self.gathered + self.casts + self.activations
        passes += sum(ends) if self.accumulates else max(ends)
        return max(passes, self.gradients + self.update)

    @property
    def total(self) -> int:
        return self.held + self.step


def estimate(config: TrainConfig, model: GPT, device: torch.device, shards: int = 1) -> Memory:
    """The memory of a run of `model`, which may be on torch's meta device; of one of `shards` (fsdp.py)."""
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    pairs = layout(config.loader) == "contrastive"
    tokens = micro_batch(config) * config.loader.seq_len * (2 if pairs else 1)
    accumulates = micro_batch(config) < config.loader.batch_size
    return Memory(
        weights=weights // shards,
        gradients=weights if accumulates else weights // shards,
        optimizer=4 * state_numbers(model, config.optimizer) // shards,
        reference=weights // shards if pairs else 0,
        casts=_casts(model) if uses_bf16(config.precision, device) else 0,
        activations=tokens * _activations_a_token(config, device),
        logits=_logits(model, tokens),
        update=4 * copied_numbers(model, config.optimizer) // shards,
        accumulates=accumulates,
        gathered=_gathered(model) * (3 if pairs else 2) if shards > 1 else 0,
    )


def micro_batch(config: TrainConfig) -> int:
    """Sequences, or pairs, that the device takes at once."""
    return config.trainer.micro_batch_size or config.loader.batch_size


def _gathered(model: GPT) -> int:
    """The whole weights that a sharded model has at once: the root's, one layer's and the next one's."""
    layers, others = _layers_and_others(model)
    return 4 * (others + 2 * max(layers))


def _layers_and_others(model: GPT) -> tuple[list[int], int]:
    """The numbers in each layer's weights, and in all others."""
    layers = [sum(parameter.numel() for parameter in block.parameters()) for block in model.h]
    return layers, sum(parameter.numel() for parameter in model.parameters()) - sum(layers)


def _casts(model: GPT) -> int:
    """bf16 copies of the weights; of a layer that is computed again they are made again."""
    layers, others = _layers_and_others(model)
    return 2 * (others + (max(layers) if model.config.activation_checkpointing else sum(layers)))


def _logits(model: GPT, tokens: int) -> int:
    chunk = model.config.loss_chunk_tokens
    if chunk is None or chunk >= tokens:
        return tokens * model.vocab_size * _LOGITS
    return chunk * model.vocab_size * _CHUNK_LOGITS + 2 * 4 * model.wte.weight.numel()


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
    if model.activation_checkpointing:
        return (model.n_layer - 1) * 4 * model.n_embd + a_layer + ends  # the first is given what is in `ends`
    return model.n_layer * a_layer + ends


def fitting_micro_batch(
    config: TrainConfig, model: GPT, device: torch.device, room: int, shards: int = 1
) -> int | None:
    """The largest micro-batch, of those that divide the batch, whose step fits into `room` bytes by estimate.

    None where not even one sequence would.
    """

    def needs(micro: int) -> int:
        trainer = dataclasses.replace(config.trainer, micro_batch_size=micro)
        return estimate(dataclasses.replace(config, trainer=trainer), model, device, shards).total

    batch = config.loader.batch_size
    smaller = [micro for micro in range(1, micro_batch(config)) if batch % micro == 0]
    return max((micro for micro in smaller if needs(micro) <= room), default=None)


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
