"""The files of a checkpoint that describe image preprocessing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.vision.convolutional.fastvit import FastVitSpec
from ....protocol.checkpoint.vision.convolutional.mobilenet import ConvVisionSpec
from ....protocol.checkpoint.vision.deepseek import SamVisionSpec
from ....protocol.checkpoint.vision.gemma import PatchVisionSpec
from ....protocol.checkpoint.vision.llama import TilesVisionSpec
from ....protocol.checkpoint.vision.spec import VisionSpec
from .fields import pixel_values, side_of_tile, sides

MAX_TILES: Final = 64
"""Maximum number of tiles of an image that the files of processors may allow."""


@dataclass(frozen=True)
class ProcessorSource:
    """The fields of the image processor and of the model's config, and the directory `path` of the checkpoint.

    `tokens` maps names of special tokens to their texts, for checkpoints whose files lack them. `token_id` is the
    placeholder token of images.
    """

    path: Path
    fields: ConfigFields
    config: ConfigFields
    tokens: Mapping[str, str]
    token_id: int

    def with_values(self, values: dict[str, object]) -> ProcessorSource:
        """Return the source with other values of the processor's fields; None removes a field."""
        return replace(self, fields=self.fields.with_values(values))

    def with_defaults(self, **values: object) -> ProcessorSource:
        """Return the source with values for fields that the processor lacks."""
        return replace(self, fields=self.fields.with_defaults(**values))

    def pixel_values(self, resample: int) -> dict[str, Any]:
        """Return the settings that image and video processors share; `resample` is the default filter."""
        return pixel_values(self.fields, self.token_id, resample)

    def values(
        self,
        vision: VisionSpec
        | TilesVisionSpec
        | ConvVisionSpec
        | FastVitSpec
        | PatchVisionSpec
        | SamVisionSpec,
        resample: int,
    ) -> dict[str, Any]:
        """Return the settings that all image processors share; `resample` is the default filter."""
        sizes = {"output_size": vision.output_size, "num_outputs": vision.num_outputs}
        return sizes | self.pixel_values(resample)

    def tile_side(self, vision: VisionSpec | TilesVisionSpec) -> int:
        """Return the side of a tile in pixels, which must equal the image size of the vision tower."""
        return side_of_tile(sides(self.fields, "size"), "height", vision)

    def tile_counts(self, least: int, most: int, limit: int = MAX_TILES) -> tuple[int, int]:
        """Return the minimum and maximum number of tiles; `least` and `most` are the defaults."""
        least = self.fields.integer("min_patches", least, maximum=limit)
        return least, self.fields.integer("max_patches", most, minimum=least, maximum=limit)

    def special_token(self, name: str, default: str | None = None) -> str:
        """Return the text of a special token, which tokenizer_config.json names.

        Raises:
            CheckpointError: The file does not name the token, and there is no default.
        """
        if name in self.tokens:
            return self.tokens[name]
        fields = ConfigFields.read_if_present(self.path / "tokenizer_config.json")
        token = fields.get(name)
        if isinstance(token, dict):
            return ConfigFields(token, fields.path, f"{name}.").text("content")
        return fields.text(name, default)
