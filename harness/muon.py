"""Muon for hidden matrices and AdamW for everything else, to their users one optimizer.

Muon (https://kellerjordan.github.io/posts/muon/) steps along the momentum with its singular values all made
equal. That suits a matrix that maps states to states, and neither embeddings nor biases and norms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor

_MOMENTUM = "momentum_buffer"  # torch's name in Muon's state


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon over `matrices`, torch's AdamW over the groups `others`: three groups, one state.

    `lr` and `weight_decay` mean the same to both: Muon's updates are scaled to the size of AdamW's (Liu et
    al., 2025, arXiv:2502.16982). `found_inf`, a scalar on the device, holds a step back as it does in torch's
    fused optimizers: at 1, weights and state stay bit for bit as they are.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        matrices: list[Tensor],
        others: list[dict[str, Any]],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        betas: tuple[float, float],
        fused: bool,
    ) -> None:
        self._muon = torch.optim.Muon(
            matrices, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
        )
        self._adamw = torch.optim.AdamW(others, lr=lr, betas=betas, fused=fused)
        self._step_supports_amp_scaling = fused  # how torch's own say that `found_inf` counts
        super().__init__([*self._muon.param_groups, *self._adamw.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Give both parts the groups and the state that are this optimizer's own."""
        self._muon.param_groups, self._adamw.param_groups = self.param_groups[:1], self.param_groups[1:]
        self._muon.state = self._adamw.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)  # makes new groups
        self._share()

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        loss = self._adamw.step(closure)  # calls the closure; the gradients are there for both then
        if self.found_inf is None:
            self._muon.step()
        else:
            self._step_unless(self.found_inf)
        return loss

    @torch.no_grad()
    def _step_unless(self, held: Tensor) -> None:
        """Muon's step, taken back where `held` is 1.

        torch's Muon cannot be told on the device to leave everything alone. What it changes is copied before,
        at a moment when the activations are gone; to ask the device first would stop the host at every step.
        """
        changed: list[Tensor] = []
        for parameter in self._muon.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                if _MOMENTUM not in state:  # as Muon makes it at its first step
                    state[_MOMENTUM] = torch.zeros_like(parameter)
                changed += [parameter, state[_MOMENTUM]]
        before = [tensor.clone() for tensor in changed]
        self._muon.step()
        holds = held.bool()
        for tensor, old in zip(changed, before, strict=True):
            tensor.copy_(torch.where(holds, old, tensor))
