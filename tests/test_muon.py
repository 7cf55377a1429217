"""Muon over the hidden matrices and AdamW over the rest are one optimizer, which goes on as it stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from harness.checkpoints import checkpoint
from harness.checkpoints.restore import restore
from harness.config import TrainConfig
from harness.config_groups import ModelConfig, MuonConfig, OptimizerConfig
from harness.errors import UserError
from harness.model import GPT
from harness.optim import make_optimizer, state_numbers
from harness.resuming import resume
from tests.helpers_exact import evidence, first_difference
from tests.helpers_runs import run, snapshot, tiny_config, write_text_set

SETTINGS = MuonConfig(lr=0.02, weight_decay=0.3, betas=[0.8, 0.9], momentum=0.7)


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(ModelConfig(n_layer=2, n_head=2, n_embd=16), vocab_size=11, seq_len=8)


def set_gradients(model: GPT, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def config_of(data: Path, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {"trainer__max_steps": 6, "evaluation__interval": 6, **changes}
    return tiny_config(data, optimizer=MuonConfig(), evaluation__sample_tokens=0, **settings)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_set(tmp_path_factory.mktemp("data") / "set")


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "undisturbed"
    run(config_of(data), path)
    return path


def test_muon_steps_hidden_matrices_and_adamw_everything_else() -> None:
    model = make_model()
    optimizer = make_optimizer(model, SETTINGS, "cpu")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    muon, decayed, plain = ([names[id(p)] for p in group["params"]] for group in optimizer.param_groups)
    matrices = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert muon == [f"h.{layer}.{name}.weight" for layer in range(2) for name in matrices]
    assert decayed == ["wte.weight", "wpe.weight"]
    assert sorted(muon + decayed + plain) == sorted(names.values())
    assert all(model.get_parameter(name).dim() == 1 for name in plain)


def test_its_steps_are_those_of_torchs_two_optimizers() -> None:
    ours, theirs = make_model(), make_model()
    optimizer = make_optimizer(ours, SETTINGS, "cpu")
    groups = make_optimizer(theirs, SETTINGS, "cpu").param_groups
    muon = torch.optim.Muon(
        groups[0]["params"], lr=0.02, weight_decay=0.3, momentum=0.7, adjust_lr_fn="match_rms_adamw"
    )
    decays = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in groups[1:]]
    adamw = torch.optim.AdamW(decays, lr=0.02, betas=(0.8, 0.9), fused=True)
    assert [group["weight_decay"] for group in groups] == [0.3, 0.3, 0.0]
    for step in range(4):
        for group in (*optimizer.param_groups, *muon.param_groups, *adamw.param_groups):
            group["lr"] = 0.02 / (step + 1)
        set_gradients(ours, step)
        set_gradients(theirs, step)
        optimizer.step()
        muon.step()
        adamw.step()
        for name, parameter in ours.named_parameters():
            assert torch.equal(parameter, theirs.get_parameter(name)), name
    assert not torch.equal(groups[0]["params"][0], make_model().get_parameter("h.0.attn.c_attn.weight"))


def test_what_it_keeps_is_counted() -> None:
    model = make_model()
    for settings in (SETTINGS, OptimizerConfig()):
        optimizer = make_optimizer(model, settings, "cpu")
        set_gradients(model, 0)
        optimizer.step()
        kept = sum(
            value.numel()
            for state in optimizer.state.values()
            for name, value in state.items()
            if name != "step"
        )
        assert kept == state_numbers(model, settings)


def test_a_run_that_was_stopped_goes_on_bit_for_bit(data: Path, undisturbed: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(config_of(data, trainer__max_steps=3), path)
    run(config_of(data, resume=str(path)), path)
    assert (difference := first_difference(evidence(undisturbed), evidence(path), looks=False)) is None, (
        difference
    )


def test_settings_of_the_command_line_win_and_positions_are_cut(undisturbed: Path) -> None:
    saved = checkpoint.open_checkpoint(checkpoint.find(undisturbed))
    shorter = GPT(ModelConfig(n_layer=2, n_head=2, n_embd=32), vocab_size=257, seq_len=8)
    optimizer = make_optimizer(shorter, SETTINGS, "cpu")
    restore(saved, shorter, optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3, 0.0]
    assert optimizer.param_groups[0]["momentum"] == 0.7
    moments = saved.optimizer_state()["state"]
    for index, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        for name, value in optimizer.state[parameter].items():
            theirs = moments[index][name]
            assert torch.equal(
                value, theirs[:8] if parameter is shorter.wpe.weight and theirs.dim() else theirs
            )
    set_gradients(shorter, 0)
    optimizer.step()


@pytest.mark.parametrize(("before", "now"), [(OptimizerConfig, MuonConfig), (MuonConfig, OptimizerConfig)])
def test_another_optimizer_cannot_go_on(
    data: Path, undisturbed: Path, before: type[OptimizerConfig], now: type[OptimizerConfig]
) -> None:
    saved = checkpoint.open_checkpoint(checkpoint.find(undisturbed))
    saved.config["optimizer"] = vars(before())
    with pytest.raises(UserError) as refused:
        resume.check_settings(saved, tiny_config(data, optimizer=now(), resume=str(undisturbed)))
    words = f"optimizer.name: checkpoint {before().name}, now {now().name}: its state is another optimizer's"
    assert words in str(refused.value)
    assert "Drop optimizer from the command, or start a new run" in str(refused.value)


def test_a_torch_without_muon_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    before = snapshot(tmp_path)
    with pytest.raises(UserError, match=r"^optimizer=muon is torch.optim.Muon, .* optimizer=adamw$"):
        run(tiny_config(tmp_path / "set", optimizer=MuonConfig()), tmp_path / "run")
    assert snapshot(tmp_path) == before
