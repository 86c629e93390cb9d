"""Makes the vision tower of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from ...protocol.checkpoint.vision.grid import GridVisionSpec
from ...protocol.checkpoint.vision.read import AnyVisionSpec
from ..loaders import Checkpoint
from .grid_tower import GridTower
from .tower import VisionTower

ImageTower: TypeAlias = VisionTower | GridTower


def make_tower(
    spec: AnyVisionSpec,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    num_threads: int = 1,
    run_layers: Callable[[Tensor], Tensor] | None = None,
) -> ImageTower:
    """Return the tower of `spec`. With `run_layers` these are the layers of a `VisionTower`.

    Raises:
        CheckpointError: A tensor is missing or has another shape.
    """
    if isinstance(spec, GridVisionSpec):
        return GridTower(spec, checkpoint, device, dtype, num_threads)
    return VisionTower(spec, checkpoint, device, dtype, num_threads, run_layers)
