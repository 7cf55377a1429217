"""torch's AdamW without torch.compile's machinery, which an optimizer that nobody compiles has no use for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

_AdamW: Any = torch.optim.AdamW


def _plain(method: Callable[..., Any]) -> Any:
    return inspect.unwrap(method)


class AdamW(_AdamW):
    """`torch.optim.AdamW` to the bit.

    torch wraps these methods so that its compiler leaves them alone, and the wrappers import that compiler,
    torch._dynamo with sympy, at the first call: 1.2 s of processor time and 70 MB that a run without
    `compile` would spend before its first step.
    """

    step = torch.no_grad()(_plain(_AdamW.step))
    add_param_group = _plain(_AdamW.add_param_group)
    zero_grad = _plain(_AdamW.zero_grad)
    state_dict = _plain(_AdamW.state_dict)
    load_state_dict = _plain(_AdamW.load_state_dict)
