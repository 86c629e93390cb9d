"""Create the vision tower of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ...protocol.checkpoint.vision.convolutional.codes import CodesVisionSpec
from ...protocol.checkpoint.vision.convolutional.davit import DavitSpec
from ...protocol.checkpoint.vision.convolutional.fastvit import FastVitSpec
from ...protocol.checkpoint.vision.convolutional.mobilenet import ConvVisionSpec
from ...protocol.checkpoint.vision.convolutional.swin import SwinSpec
from ...protocol.checkpoint.vision.deepseek import JoinedVisionSpec, QueryVisionSpec, SamVisionSpec
from ...protocol.checkpoint.vision.gemma import PatchVisionSpec
from ...protocol.checkpoint.vision.grid import GridVisionSpec
from ...protocol.checkpoint.vision.llama import TilesVisionSpec
from ...protocol.checkpoint.vision.pairs.prismatic import PairVisionSpec
from ...protocol.checkpoint.vision.read import AnyVisionSpec
from ...protocol.checkpoint.vision.spec import VisionSpec
from ...protocol.checkpoint.vision.tiled.molmo import PaddedVisionSpec, PooledVisionSpec
from ...protocol.checkpoint.vision.tiled.moondream import WindowsVisionSpec
from .convolutional.codes import CodesTower
from .convolutional.davit import DavitTower
from .convolutional.fastvit import FastVitTower
from .convolutional.mobilenet import MobileNetTower
from .convolutional.swin import SwinTower
from .grid_tower import GridTower
from .image_tower import ImageTower, TowerSource
from .instructed_tower import InstructedTower
from .patch_tower import PatchTower
from .query_tower import QueryTower
from .sam_tower import SamTower
from .tiles.crops_tower import CropsTower
from .tiles.joined_tower import JoinedTower
from .tiles.pair_tower import PairTower
from .tiles.pooled_tower import PooledTower
from .tiles.rows_tower import RowsTower
from .tiles.tiles_tower import TilesTower
from .tiles.windows_tower import WindowsTower
from .vision_tower import VisionTower

_TOWERS: Final[dict[type[AnyVisionSpec], Callable[[Any, TowerSource], ImageTower]]] = {
    GridVisionSpec: GridTower,
    QueryVisionSpec: QueryTower,
    JoinedVisionSpec: JoinedTower,
    ConvVisionSpec: MobileNetTower,
    FastVitSpec: FastVitTower,
    DavitSpec: DavitTower,
    SwinSpec: SwinTower,
    TilesVisionSpec: TilesTower,
    PooledVisionSpec: PooledTower,
    PaddedVisionSpec: PooledTower,
    CodesVisionSpec: CodesTower,
    SamVisionSpec: SamTower,
    PairVisionSpec: PairTower,
    PatchVisionSpec: PatchTower,
    WindowsVisionSpec: WindowsTower,
}
"""The class of towers for each class of specs but `VisionSpec`."""


def make_tower(spec: AnyVisionSpec, source: TowerSource) -> ImageTower:
    """Return the tower described by `spec`. Raise CheckpointError if a tensor is missing or has another shape."""
    if not isinstance(spec, VisionSpec):
        return _TOWERS[type(spec)](spec, source)
    if spec.has_rows:
        return RowsTower(spec, source)
    if spec.has_crops:
        return CropsTower(spec, source)
    if spec.former is not None and spec.former.max_text_tokens:
        return InstructedTower(spec, source)
    return VisionTower(spec, source)
