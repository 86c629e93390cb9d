"""A checkpoint that has only a config. Its weights are random, in the shapes that the model requests."""

from __future__ import annotations

from collections.abc import Collection
from os import PathLike
from pathlib import Path

import torch

from ...protocol.checkpoint.files import read_model_config
from ...protocol.errors import ConfigError
from .checkpoint import Checkpoint

STANDARD_DEVIATION = 0.02
"""Standard deviation of the weights, as in newly initialized models, so that hidden states have realistic sizes."""


class DummyCheckpoint(Checkpoint):
    """A Hugging Face directory whose `config.json` is read, and whose weights are random (`--load-format dummy`)."""

    def __init__(self, path: str | PathLike[str]) -> None:
        path = Path(path)
        if not path.is_dir():
            raise ConfigError(
                f"--load-format dummy needs a directory with a config.json, not {path}"
            )
        super().__init__(path, read_model_config(path))

    def names(self) -> Collection[str]:
        """Return no names: no tensor is stored."""
        return ()

    def shape(self, name: str) -> tuple[int, ...]:
        """Raise CheckpointError: no tensor is stored."""
        raise self.missing(name)

    def tensor(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        *,
        part: range | None = None,
        dim: int = 0,
    ) -> torch.Tensor:
        """Raise CheckpointError: no tensor is stored."""
        raise self.missing(name)


def made_up(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return random weights. Norms and biases, which ranks share, leave their input unchanged."""
    if name.endswith(".bias"):
        return torch.zeros(shape, dtype=dtype, device=device)
    if len(shape) == 1:
        return torch.ones(shape, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, STANDARD_DEVIATION)
