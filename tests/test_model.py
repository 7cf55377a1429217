"""The model is GPT-2's architecture, its loss adds up, and generation disturbs nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import harness.model
from harness.config_groups import ModelConfig
from harness.errors import UserError
from harness.model import GPT, MLP, flops_per_token, generate, parameter_count

SIZES = [
    ((12, 12, 768), 124_439_808),
    ((24, 16, 1024), 354_823_168),
    ((36, 20, 1280), 774_030_080),
    ((48, 25, 1600), 1_557_611_200),
]


def make(
    n_layer: int = 2, n_head: int = 2, n_embd: int = 32, *, vocab_size: int = 257, seq_len: int = 16
) -> GPT:
    torch.manual_seed(0)
    return GPT(
        ModelConfig(n_layer=n_layer, n_head=n_head, n_embd=n_embd), vocab_size=vocab_size, seq_len=seq_len
    )


def batch(model: GPT, size: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(model.vocab_size, (size, model.seq_len + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def reference_like(model: GPT):  # type: ignore[no-untyped-def]
    """Hugging Face's GPT-2 with random weights, and the same weights in `model` (Conv1D is transposed)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=model.vocab_size,
        n_positions=model.seq_len,
        n_embd=model.config.n_embd,
        n_layer=model.config.n_layer,
        n_head=model.config.n_head,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    reference = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in reference.parameters():
            # Biases and norms get random values too: zeros and ones would hide a missing one.
            parameter.add_(torch.randn_like(parameter) * 0.1)
        weights = reference.state_dict()
        # The final norm sets the size of the logits: scaled so that 1e-5 means something.
        ids, _ = batch(model)
        scale = 1.0 / reference(ids).logits.std()
        weights["transformer.ln_f.weight"].mul_(scale)
        weights["transformer.ln_f.bias"].mul_(scale)
        own = model.state_dict()
        for name, value in own.items():
            theirs = weights[f"transformer.{name}"]
            if name == "wte.weight":
                value[: model.vocab_size] = theirs
            else:
                value.copy_(theirs.T if name.startswith("h.") and theirs.dim() == 2 else theirs)
    return reference


@pytest.mark.parametrize("shape", [(2, 2, 32, 257, 16), (3, 4, 96, 1000, 48)])
def test_logits_and_gradients_equal_the_reference(shape: tuple[int, int, int, int, int]) -> None:
    n_layer, n_head, n_embd, vocab_size, seq_len = shape
    model = make(n_layer, n_head, n_embd, vocab_size=vocab_size, seq_len=seq_len)
    reference = reference_like(model)
    inputs, targets = batch(model)

    logits, expected = model(inputs), reference(inputs).logits
    assert logits.shape == expected.shape
    assert 0.9 < expected.std() < 1.1
    assert (logits - expected).abs().max() <= 1e-5

    model.loss(inputs, targets).div(targets.numel()).backward()
    F.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    theirs = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        gradient, wanted = parameter.grad, theirs[f"transformer.{name}"].grad
        assert gradient is not None
        if name == "wte.weight":
            assert not gradient[vocab_size:].any()
            gradient = gradient[:vocab_size]
        elif name.startswith("h.") and wanted.dim() == 2:
            wanted = wanted.T
        assert wanted.abs().max() > 0
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("shape", "published"), SIZES)
def test_parameter_counts_are_as_published(shape: tuple[int, int, int], published: int) -> None:
    with torch.device("meta"):
        model = make(*shape, vocab_size=50_257, seq_len=1024)
    assert model.wte.num_embeddings == 50_304
    assert parameter_count(model) == published


def test_flops_per_token_of_gpt2_small() -> None:
    with torch.device("meta"):
        model = make(12, 12, 768, vocab_size=50_257, seq_len=1024)
    matrices = 124_439_808 - 1024 * 768
    assert flops_per_token(model) == 6 * matrices + 12 * 12 * 768 * 1024


def test_initialisation_is_gpt2s_and_reproducible() -> None:
    model, again = make(3, 4, 256, seq_len=128), make(3, 4, 256, seq_len=128)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.state_dict()[name])
        value = parameter.detach()
        if name.endswith("bias"):
            assert not value.any()
        elif "ln_" in name:
            assert (value == 1).all()
        else:
            wanted = 0.02 / 6**0.5 if name.endswith("c_proj.weight") else 0.02
            value = value[: model.vocab_size] if name == "wte.weight" else value
            assert value.std().item() == pytest.approx(wanted, rel=0.03)
            assert abs(value.mean().item()) < 0.001


def test_loss_and_gradients_do_not_depend_on_vocabulary_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    padded = make()
    monkeypatch.setattr(harness.model, "VOCAB_MULTIPLE", 1)
    exact = make()
    assert (padded.wte.num_embeddings, exact.wte.num_embeddings) == (384, 257)
    weights = padded.state_dict()
    weights["wte.weight"] = weights["wte.weight"][:257]
    exact.load_state_dict(weights)
    with torch.no_grad():
        padded.wte.weight[257:] = 100.0  # would win every softmax it took part in

    inputs, targets = batch(padded)
    losses = [model.loss(inputs, targets) for model in (padded, exact)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1])
    assert padded.wte.weight.grad is not None
    assert not padded.wte.weight.grad[257:].any()
    torch.testing.assert_close(padded.wte.weight.grad[:257], exact.wte.weight.grad)


@pytest.mark.parametrize("size", [1, 2, 8])
def test_micro_batches_add_up_to_the_full_batch(size: int) -> None:
    model = make()
    inputs, targets = batch(model, 8)
    targets = targets.clone()
    targets[:5, :7] = -100  # unequal numbers of targets: a mean of means would be wrong
    targets[7] = -100  # and one micro-batch without any

    def gradients(parts: int) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        total = torch.zeros(())
        for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
            loss = model.loss(x, y)
            loss.backward()
            total = total + loss.detach()
        return total, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    whole, expected = gradients(1)
    parts, found = gradients(8 // size)
    torch.testing.assert_close(parts, whole)
    assert found.keys() == expected.keys() == dict(model.named_parameters()).keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4)


def test_ignored_targets_do_not_count() -> None:
    model = make()
    inputs, targets = batch(model)
    kept = targets.clone()
    kept[:, ::3] = -100
    each = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none")
    torch.testing.assert_close(model.loss(inputs, kept), each[kept.flatten() != -100].sum())


def test_a_batch_without_targets_has_loss_zero_and_zero_gradients() -> None:
    model = make()
    inputs, targets = batch(model)
    loss = model.loss(inputs, torch.full_like(targets, -100))
    loss.backward()
    assert loss.item() == 0.0
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert (parameter.grad == 0).all()


def test_loss_is_float32_under_bf16_autocast() -> None:
    model = make()
    inputs, targets = batch(model)
    exact = model.loss(inputs, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(inputs).dtype == torch.bfloat16
        loss = model.loss(inputs, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=0.01)


def test_a_token_does_not_change_the_logits_before_it() -> None:
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        inputs, _ = batch(model)
        before = model(inputs)
        for t in (1, 7, model.seq_len - 1):
            changed = inputs.clone()
            changed[:, t] = (changed[:, t] + 1) % model.vocab_size
            after = model(changed)
            torch.testing.assert_close(after[:, :t], before[:, :t], rtol=0, atol=1e-6)
            assert ((after[:, t:] - before[:, t:]).abs().amax(dim=-1) > 1e-4).all()


def test_the_gelu_is_the_one_that_was_asked_for() -> None:
    x = torch.linspace(-3, 3, 32)
    for name, approximate in (("tanh", "tanh"), ("erf", "none")):
        torch.manual_seed(0)
        mlp = MLP(ModelConfig(n_layer=1, n_head=1, n_embd=32, gelu=name))
        expected = mlp.c_proj(F.gelu(mlp.c_fc(x), approximate=approximate))
        assert torch.equal(mlp(x), expected)


def test_dropout_acts_in_training_only() -> None:
    torch.manual_seed(0)
    config = ModelConfig(n_layer=2, n_head=2, n_embd=32, dropout=0.5)
    model = GPT(config, vocab_size=257, seq_len=16)
    inputs, _ = batch(model)
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    assert torch.equal(model(inputs), model(inputs))


def test_a_sequence_longer_than_the_context_is_refused_with_both_numbers() -> None:
    model = make()
    with pytest.raises(UserError, match=r"17 tokens.*seq_len=16.*loader\.seq_len>=17"):
        model(torch.zeros(1, 17, dtype=torch.int64))


def test_heads_that_do_not_divide_the_channels_are_refused() -> None:
    with pytest.raises(UserError, match=r"n_embd=32.*n_head=3"):
        make(n_head=3)


def test_the_head_is_the_embedding_and_no_second_parameter() -> None:
    names = set(make(1).state_dict())
    layers = ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"]
    expected = {f"h.0.{layer}.{kind}" for layer in layers for kind in ("weight", "bias")}
    assert names == expected | {"wte.weight", "wpe.weight", "ln_f.weight", "ln_f.bias"}


def noisy() -> GPT:
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def test_generation_is_decided_by_its_generator_and_leaves_the_global_rng_alone() -> None:
    model = noisy()
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])

    def sample(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return generate(model, prompt, 30, temperature=1.5, top_k=50, generator=generator)

    before = torch.get_rng_state()
    first, same, other = sample(0), sample(0), sample(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert first.shape == (2, 33)  # past the context of 16: it is cropped
    assert torch.equal(first[:, :3], prompt)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert int(first.max()) < model.vocab_size
    assert not first.requires_grad


def test_temperature_zero_and_top_one_take_the_most_likely_token() -> None:
    model = noisy().eval()
    prompt = torch.tensor([[1, 2, 3]])
    greedy = generate(model, prompt, 8, temperature=0.0)
    for end in range(3, 11):
        assert greedy[0, end] == model(greedy[:, :end])[0, -1].argmax()
    generator = torch.Generator().manual_seed(0)
    for temperature, top_k in ((1.0, 1), (1e-30, None)):
        drawn = generate(model, prompt, 8, temperature=temperature, top_k=top_k, generator=generator)
        assert torch.equal(drawn, greedy)


def test_top_k_draws_only_from_the_k_most_likely() -> None:
    model = noisy().eval()
    prompt = torch.tensor([[7]]).expand(400, 1)
    allowed = set(model(prompt[:1])[0, -1].topk(5).indices.tolist())
    generator = torch.Generator().manual_seed(0)
    drawn = generate(model, prompt, 1, temperature=50.0, top_k=5, generator=generator)
    assert set(drawn[:, 1].tolist()) == allowed


@pytest.mark.parametrize("training", [True, False])
def test_generation_restores_the_mode_also_after_an_error(training: bool) -> None:
    model = make().train(training)
    generate(model, torch.tensor([[1]]), 2, temperature=0.0)
    assert model.training is training
    with pytest.raises(IndexError):
        generate(model, torch.tensor([[9999]]), 1, temperature=0.0)
    assert model.training is training


@pytest.mark.parametrize(
    ("ids", "temperature", "top_k", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.int64), 0.0, None, "at least 1 token, got 0"),
        (torch.tensor([[1]]), -1.0, None, r"temperature=-1\.0"),
        (torch.tensor([[1]]), 1.0, 0, "top_k=0"),
        (torch.tensor([[1]]), 1.0, None, "needs a generator"),
    ],
)
def test_impossible_generation_is_refused(
    ids: Tensor, temperature: float, top_k: int | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        generate(make(), ids, 1, temperature=temperature, top_k=top_k)
