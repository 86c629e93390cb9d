"""A checkpoint whose tensors are in two checkpoints, as those of models whose tower has files of its own."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ...protocol.checkpoint.config_fields import ConfigFields
from .checkpoint import Checkpoint


class JoinedCheckpoint(Checkpoint):
    """The tensors of `first`, and those of `second` that have other names."""

    def __init__(self, first: Checkpoint, second: Checkpoint) -> None:
        super().__init__(second.path, ConfigFields(second.config, second.config_path))
        self._checkpoints = first, second

    def names(self) -> Collection[str]:
        """See `Checkpoint.names`."""
        first, second = self._checkpoints
        return dict.fromkeys([*first.names(), *second.names()])

    def shape(self, name: str) -> tuple[int, ...]:
        """See `Checkpoint.shape`."""
        return self._with(name).shape(name)

    def num_bytes(self, name: str, itemsize: int) -> int:
        """See `Checkpoint.num_bytes`."""
        return self._with(name).num_bytes(name, itemsize)

    def tensor(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        *,
        part: range | None = None,
        dim: int = 0,
    ) -> torch.Tensor:
        """See `Checkpoint.tensor`."""
        result = self._with(name).tensor(name, dtype, part=part, dim=dim)
        self.bytes_read = sum(each.bytes_read for each in self._checkpoints)
        return result

    def _with(self, name: str) -> Checkpoint:
        first, second = self._checkpoints
        return first if name in first.names() else second
