"""Targets that do not count because they stand at a document's boundary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from harness.errors import UserError
from harness.loaders.batch import IGNORE
from harness.storage.manifest import Manifest

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]

MASK_BOUNDARY = ("none", "target", "after")


class BoundaryMask:
    """What `loader.mask_boundary` leaves out of the loss.

    `target`: the boundary token itself, the end of a document; `after`: the first token after a boundary,
    which nothing before it announces; `none`: nothing. Raises `UserError` for another mode, and where the set
    does not say which token the boundary is.
    """

    def __init__(self, mode: str, manifest: Manifest) -> None:
        if mode not in MASK_BOUNDARY:
            raise UserError(f"loader.mask_boundary={mode!r} must be one of {', '.join(MASK_BOUNDARY)}")
        token = manifest.tokenizer.boundary_token_id
        if mode != "none" and token is None:
            raise UserError(
                f"loader.mask_boundary={mode} needs to know which token ends a document, but "
                f"tokenizer.boundary_token_id is not set in {manifest.path}: this set was prepared without "
                "boundaries. Use loader.mask_boundary=none, or a tokenizer that has a boundary token"
            )
        self._mode = mode
        self._token = None if mode == "none" else token

    def __call__(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The targets with -100 where they do not count, as a new tensor: the two given may share memory."""
        if self._token is None:
            return targets
        import torch

        # In NumPy, which compares and copies a batch three times as fast as PyTorch on one core.
        masked = targets.numpy().copy()
        masked[self.ignored(inputs.numpy(), targets.numpy())] = IGNORE
        return torch.from_numpy(masked)

    def ignored(self, inputs: Array, targets: Array) -> Array:
        """Which of these targets do not count, bool of their shape; the inputs are the tokens before them."""
        if self._token is None:
            return np.zeros(targets.shape, np.bool_)
        mask: Array = (targets if self._mode == "target" else inputs) == self._token
        return mask

    @property
    def ignores_nothing(self) -> bool:
        return self._token is None
