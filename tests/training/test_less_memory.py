"""Ways to train in less memory compute the same: blocks computed again, and the loss a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness import chunked_loss as chunked
from harness.config_checks import validate
from harness.config_groups import ContrastiveRowsConfig, ModelConfig
from harness.errors import UserError
from harness.model import GPT, IGNORE, compiled_loss, generate
from tests.helpers_exact import evidence, first_difference
from tests.helpers_runs import run, tiny_config, write_text_set

VOCAB, LENGTH = 257, 16


def make(*, dropout: float = 0.0, again: bool = False, chunk: int | None = None, layers: int = 2) -> GPT:
    torch.manual_seed(0)
    config = ModelConfig(
        "tiny", layers, 2, 32, dropout, activation_checkpointing=again, loss_chunk_tokens=chunk
    )
    return GPT(config, vocab_size=VOCAB, seq_len=LENGTH)


def batch(*, ignored: slice = slice(None, None, 3)) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCAB, (4, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    targets = ids[:, 1:].clone()
    targets[:, ignored] = IGNORE
    return ids[:, :-1], targets


def gradients(model: GPT, inputs: Tensor, targets: Tensor, *, bf16: bool = False) -> dict[str, Tensor]:
    """Of the mean loss, by name; the loss itself, and the state of the random numbers after it all."""
    torch.manual_seed(2)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        loss = model.loss(inputs, targets) / targets.numel()
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**found, "loss": loss.detach(), "rng": torch.get_rng_state()}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_blocks_that_are_computed_again_give_the_same_bits(dropout: float, bf16: bool) -> None:
    kept, again = (gradients(make(dropout=dropout, again=a), *batch(), bf16=bf16) for a in (False, True))
    assert kept.keys() == again.keys()
    for name, value in kept.items():
        assert torch.equal(again[name], value), name


def test_a_run_that_computes_blocks_again_is_the_same_run(tmp_path: Path) -> None:
    data = write_text_set(tmp_path / "set")
    for path, again in ((tmp_path / "kept", False), (tmp_path / "again", True)):
        run(tiny_config(data, model__activation_checkpointing=again, trainer__max_steps=4), path)
    found = evidence(tmp_path / "kept"), evidence(tmp_path / "again")
    assert (difference := first_difference(*found)) is None, difference


@pytest.mark.parametrize("chunk", [1, 7, 16, 63])
def test_a_loss_in_chunks_is_the_loss(chunk: int) -> None:
    whole, chunked = (gradients(make(dropout=0.1, chunk=c), *batch()) for c in (None, chunk))
    assert whole.keys() == chunked.keys()
    for name, value in whole.items():
        torch.testing.assert_close(chunked[name], value, rtol=1e-4, atol=1e-7, msg=name)
    assert not chunked["wte.weight"][VOCAB:].any()
    assert not torch.equal(whole["wte.weight"], chunked["wte.weight"])  # it was another sum


def test_a_loss_in_chunks_is_as_exact_in_bf16_as_the_whole_one() -> None:
    exact = gradients(make(), *batch())["wte.weight"]
    whole, chunked = (gradients(make(chunk=c), *batch(), bf16=True) for c in (None, 7))
    errors = [(found["wte.weight"] - exact).norm() / exact.norm() for found in (whole, chunked)]
    assert 0 < errors[1] < 1.2 * errors[0] < 0.02
    assert chunked["loss"].dtype == torch.float32


def test_a_loss_in_chunks_is_the_same_without_gradients() -> None:
    model, (inputs, targets) = make(chunk=7), batch()
    with torch.no_grad():
        judged = model.loss(inputs, targets)
        torch.testing.assert_close(judged, make().loss(inputs, targets))
    assert torch.equal(judged, model.loss(inputs, targets).detach())


def test_chunks_without_targets_count_nothing() -> None:
    found = gradients(make(chunk=8), *batch(ignored=slice(None)))
    assert found["loss"] == 0.0
    assert all(not value.any() for name, value in found.items() if name != "rng")


def test_each_way_is_one_graph_with_the_loss() -> None:
    model, (inputs, targets) = make(dropout=0.1, again=True, chunk=40), batch()
    torch.manual_seed(2)
    compiled = torch.compile(model.loss, backend="eager", fullgraph=True)(inputs, targets)
    torch.manual_seed(2)
    assert torch.equal(compiled, model.loss(inputs, targets))
    compiled.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many operations each compiled graph has; it is not made machine code, which takes seconds."""
    from torch._dynamo.backends.debugging import aot_eager

    sizes = list[int]()

    def backend(graph: Any, inputs: Any) -> Any:
        sizes.append(len(graph.graph.nodes))
        return aot_eager(graph, inputs)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    chunked._compiled.cache_clear()
    torch.compiler.reset()
    yield sizes
    chunked._compiled.cache_clear()
    torch.compiler.reset()


def test_the_compiler_sees_one_chunk_however_many_there_are(graphs: list[int]) -> None:
    model, (inputs, targets) = make(chunk=32, again=True, layers=1), batch()
    loss = compiled_loss(model)
    loss(inputs, targets)
    states, chunk = graphs  # operations
    model.config.loss_chunk_tokens = 3  # 22 chunks; the last has less
    mean = loss(inputs, targets) / targets.numel()
    mean.backward()
    assert graphs == [states, chunk, chunk]
    whole = gradients(make(layers=1), inputs, targets)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name], rtol=1e-4, atol=1e-7, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(loss(inputs, targets) / targets.numel(), mean.detach())
    seen = len(graphs)
    loss(inputs, targets)
    assert len(graphs) == seen  # an evaluation costs training no graph


def test_a_text_costs_compiled_blocks_no_graph_and_training_no_fixed_shape(graphs: list[int]) -> None:
    """Blocks are compiled by themselves where a model is in shards."""
    model, (inputs, targets) = make(layers=1), batch()
    for block in model.h:
        block.forward = torch.compile(block.forward)
    texts = [generate(model, inputs[:1, :1], 4, temperature=0.0)]
    assert graphs == []
    model.loss(inputs, targets).backward()
    (trained,) = graphs
    texts.append(generate(model, inputs[:1, :1], 4, temperature=0.0))
    model.loss(inputs, targets)
    assert graphs == [trained]
    torch.compiler.reset()
    model.loss(inputs, targets)
    assert graphs == [trained, trained]  # the graph of a process that has made no text
    assert torch.equal(*texts)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_random_state_is_kept_for_blocks_that_draw_alone(
    monkeypatch: pytest.MonkeyPatch, dropout: float
) -> None:
    model, (inputs, targets), kept = make(dropout=dropout, again=True), batch(), list[Tensor]()
    state = torch.get_rng_state

    def noted() -> Tensor:
        kept.append(state())
        return kept[-1]

    monkeypatch.setattr(torch, "get_rng_state", noted)
    loss = model.loss(inputs, targets)
    assert len(kept) == (2 if dropout else 0)  # one a block
    loss.backward()


def test_preferences_have_no_loss_to_cut_into_chunks() -> None:
    loader = ContrastiveRowsConfig(seq_len=16, batch_size=4)
    with pytest.raises(
        UserError, match=r"model\.loss_chunk_tokens=64 .* loader=contrastive_rows .* use null"
    ):
        validate(tiny_config(Path("set"), loader=loader, model__loss_chunk_tokens=64))
