"""Create the vision tower of a model."""

from __future__ import annotations

from ...protocol.checkpoint.vision.convolutional.codes import CodesVisionSpec
from ...protocol.checkpoint.vision.convolutional.fastvit import FastVitSpec
from ...protocol.checkpoint.vision.convolutional.mobilenet import ConvVisionSpec
from ...protocol.checkpoint.vision.deepseek import (
    JoinedVisionSpec,
    QueryVisionSpec,
    SamVisionSpec,
)
from ...protocol.checkpoint.vision.gemma import PatchVisionSpec
from ...protocol.checkpoint.vision.grid import GridVisionSpec
from ...protocol.checkpoint.vision.llama import TilesVisionSpec
from ...protocol.checkpoint.vision.read import AnyVisionSpec
from ...protocol.checkpoint.vision.tiled.molmo import PooledVisionSpec
from .convolutional.codes import CodesTower
from .convolutional.fastvit import FastVitTower
from .convolutional.mobilenet import MobileNetTower
from .grid_tower import GridTower
from .image_tower import ImageTower, TowerSource
from .patch_tower import PatchTower
from .query_tower import QueryTower
from .sam_tower import SamTower
from .tiles.crops_tower import CropsTower
from .tiles.joined_tower import JoinedTower
from .tiles.pooled_tower import PooledTower
from .tiles.rows_tower import RowsTower
from .tiles.tiles_tower import TilesTower
from .vision_tower import VisionTower


def make_tower(spec: AnyVisionSpec, source: TowerSource) -> ImageTower:
    """Return the tower described by `spec`.

    Raises:
        CheckpointError: A tensor is missing or has another shape.
    """
    if isinstance(spec, GridVisionSpec):
        return GridTower(spec, source)
    if isinstance(spec, QueryVisionSpec):
        return QueryTower(spec, source)
    if isinstance(spec, JoinedVisionSpec):
        return JoinedTower(spec, source)
    if isinstance(spec, ConvVisionSpec):
        return MobileNetTower(spec, source)
    if isinstance(spec, FastVitSpec):
        return FastVitTower(spec, source)
    if isinstance(spec, TilesVisionSpec):
        return TilesTower(spec, source)
    if isinstance(spec, PooledVisionSpec):
        return PooledTower(spec, source)
    if isinstance(spec, CodesVisionSpec):
        return CodesTower(spec, source)
    if isinstance(spec, SamVisionSpec):
        return SamTower(spec, source)
    if isinstance(spec, PatchVisionSpec):
        return PatchTower(spec, source)
    if spec.has_rows:
        return RowsTower(spec, source)
    if spec.has_crops:
        return CropsTower(spec, source)
    return VisionTower(spec, source)
