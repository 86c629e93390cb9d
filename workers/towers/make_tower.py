"""Create the vision tower of a model."""

from __future__ import annotations

from typing import TypeAlias

import torch

from ...protocol.checkpoint.vision.deepseek import QueryVisionSpec
from ...protocol.checkpoint.vision.fastvit import FastVitSpec
from ...protocol.checkpoint.vision.grid import GridVisionSpec
from ...protocol.checkpoint.vision.llama import TilesVisionSpec
from ...protocol.checkpoint.vision.mobilenet import ConvVisionSpec
from ...protocol.checkpoint.vision.read import AnyVisionSpec
from ...protocol.checkpoint.vision.tiled.molmo import PooledVisionSpec
from ..loaders import Checkpoint
from .convolutional.fastvit import FastVitTower
from .convolutional.mobilenet import MobileNetTower
from .grid_tower import GridTower
from .layers import MakeLayers, TorchLayers
from .query_tower import QueryTower
from .tiles.crops_tower import CropsTower
from .tiles.pooled_tower import PooledTower
from .tiles.tiles_tower import TilesTower
from .vision_tower import VisionTower

ImageTower: TypeAlias = (
    VisionTower
    | GridTower
    | QueryTower
    | MobileNetTower
    | FastVitTower
    | CropsTower
    | TilesTower
    | PooledTower
)


def make_tower(
    spec: AnyVisionSpec,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    num_threads: int = 1,
    make_layers: MakeLayers = TorchLayers,
) -> ImageTower:
    """Return the tower described by `spec`, with the layers that `make_layers` returns.

    Raises:
        CheckpointError: A tensor is missing or has another shape.
    """
    if isinstance(spec, GridVisionSpec):
        return GridTower(spec, checkpoint, device, dtype, num_threads, make_layers)
    if isinstance(spec, QueryVisionSpec):
        return QueryTower(spec, checkpoint, device, dtype, num_threads, make_layers)
    if isinstance(spec, ConvVisionSpec):
        return MobileNetTower(spec, checkpoint, device, dtype, num_threads)
    if isinstance(spec, FastVitSpec):
        return FastVitTower(spec, checkpoint, device, dtype, num_threads)
    if isinstance(spec, TilesVisionSpec):
        return TilesTower(spec, checkpoint, device, dtype, num_threads, make_layers)
    if isinstance(spec, PooledVisionSpec):
        return PooledTower(spec, checkpoint, device, dtype, num_threads, make_layers)
    if spec.has_crops:
        return CropsTower(spec, checkpoint, device, dtype, num_threads, make_layers)
    return VisionTower(spec, checkpoint, device, dtype, num_threads, make_layers)
