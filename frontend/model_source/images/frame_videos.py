"""Read the video processors of models that encode frames one by one, such as SmolVLM2, InternVL and MiniCPM-V."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.vision.gemma import PatchVisionSpec
from ....protocol.checkpoint.vision.spec import MAX_SIDE, VisionSpec
from ....protocol.config.videos import FrameProcessor
from .fields import (
    BICUBIC,
    CLIP_VALUES,
    HALF_VALUES,
    IMAGENET_VALUES,
    LANCZOS,
    pixel_values,
    side_of_tile,
    sides,
)
from .gemma import read_budget
from .read import image_token_id
from .source import ProcessorSource
from .tiled.minicpm import slices_of_queries

_MAX_FRAMES: Final = 1024
_MARK: Final = "<video>"
_AROUND: Final = "<fake_token_around_image>"


class FrameSource(NamedTuple):
    """The fields of the video processor, the model and its decoder, and the vision tower, from the directory `path`."""

    path: Path
    fields: ConfigFields
    config: ConfigFields
    text: ConfigFields
    vision: VisionSpec | PatchVisionSpec

    @property
    def tower(self) -> VisionSpec:
        """The vision tower of a model that has one."""
        assert isinstance(self.vision, VisionSpec)
        return self.vision

    @property
    def image_token(self) -> int:
        """The token of images."""
        return image_token_id(self.path, self.config, self.text.integer("vocab_size"))

    @property
    def video_token(self) -> int:
        """The token of videos. Its field has one of two names."""
        name, old_name = "video_token_id", "video_token_index"
        name = name if self.config.get(name) is not None else old_name
        return self.config.integer(name, minimum=0, maximum=self.text.integer("vocab_size") - 1)

    def num_frames(self, default: int) -> int:
        """Return the number of frames that are read from a file."""
        return self.fields.integer("num_frames", default, maximum=_MAX_FRAMES)


def _smolvlm(source: FrameSource) -> FrameProcessor:
    """Return the processor of SmolVLM2, which treats frames as images that are not split."""
    fields = source.fields
    sampling = fields.first_section("video_sampling")
    # In transformers, the size of images has priority.
    size = fields.section("size") or sampling.first_section("video_size")
    side = side_of_tile(fields.first_section("max_image_size"), "longest_edge", source.tower)
    most = sampling.integer("max_frames", source.num_frames(64), maximum=_MAX_FRAMES)
    return FrameProcessor(
        **pixel_values(fields, source.image_token, LANCZOS),
        sampling="inner",
        fps=sampling.positive("fps", fields.positive("fps", 1.0)),
        max_frames=most,
        mark=_MARK,
        side=side,
        num_outputs=source.tower.num_outputs,
        longest_edge=size.integer("longest_edge", 4 * side, maximum=MAX_SIDE),
        labels="times",
        start=f"{_AROUND}<global-img>",
        end=_AROUND,
    )


def _llava_onevision(source: FrameSource) -> FrameProcessor:
    """Return the processor of LLaVA-OneVision, which has a separate token for videos."""
    side = side_of_tile(sides(source.fields, "size"), "height", source.tower)
    num_patches = source.tower.image_size // source.tower.patch_size
    return FrameProcessor(
        **CLIP_VALUES | _values(source, source.video_token, 32),
        sampling="floors",
        side=side,
        num_outputs=(-(-num_patches // 2)) ** 2,
        is_pooled=True,
    )


def _perception_lm(source: FrameSource) -> FrameProcessor:
    """Return the processor of Perception LM, which has a separate token for videos."""
    return FrameProcessor(
        **HALF_VALUES | _values(source, source.video_token, 32),
        sampling="floors",
        side=side_of_tile(sides(source.fields, "size"), "height", source.tower),
        num_outputs=source.tower.num_outputs,
    )


def _internvl(source: FrameSource) -> FrameProcessor:
    """Return the processor of InternVL, which treats frames as images that are not split."""
    return _numbered(source, CLIP_VALUES)


def _internvl_chat(source: FrameSource) -> FrameProcessor:
    """Return the processor of InternVL in the format of its authors, with other default means and deviations."""
    return _numbered(source, IMAGENET_VALUES)


def _numbered(source: FrameSource, defaults: dict[str, Any]) -> FrameProcessor:
    return FrameProcessor(
        **defaults | _values(source, source.image_token, 8),
        sampling="middles",
        mark=_MARK,
        side=side_of_tile(sides(source.fields, "size"), "height", source.tower),
        num_outputs=source.tower.num_outputs,
        labels="numbers",
        start="<img>",
        end="</img>",
    )


def _minicpmv(source: FrameSource) -> FrameProcessor:
    """Return the processor of MiniCPM-V, which treats frames as images without slices and numbers."""
    own = ProcessorSource(source.path, source.fields, source.config, {}, source.image_token)
    images = slices_of_queries(own, source.tower)
    return FrameProcessor(
        token_id=images.token_id,
        resample=images.resample,
        scale=images.scale,
        mean=images.mean,
        std=images.std,
        sampling="middles",
        fps=1.0,
        max_frames=64,
        mark="(<video>./</video>)",
        side=images.side,
        side_factor=images.unit,
        num_outputs=images.num_outputs,
        start=images.start,
        end=images.end,
    )


def _gemma4(source: FrameSource) -> FrameProcessor:
    """Return the processor of Gemma 4, whose frames have up to 70 embeddings. Its tower maps pixels to -1..1."""
    half = (0.5,) * 3
    return msgspec.structs.replace(_gemma4_unified(source), mean=half, std=half)


def _gemma4_unified(source: FrameSource) -> FrameProcessor:
    """Return the processor of Gemma 4's unified models, whose projection reads pixels as they are."""
    token_id = source.video_token
    tokens = ProcessorSource(source.path, source.fields, source.config, {}, token_id)
    plain = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
    return FrameProcessor(
        **plain | _values(source, token_id, 32),
        sampling="floors",
        side_factor=source.vision.side_factor,
        num_outputs=read_budget(source.fields, source.vision, 70),
        labels="clock",
        start=tokens.special_token("boi_token"),
        end=tokens.special_token("eoi_token"),
    )


def _values(source: FrameSource, token_id: int, num_frames: int) -> dict[str, Any]:
    values = pixel_values(source.fields, token_id, BICUBIC)
    return values | {"num_frames": source.num_frames(num_frames), "max_frames": _MAX_FRAMES}


FRAME_READERS: Final[dict[str, Callable[[FrameSource], FrameProcessor]]] = {
    "gemma4": _gemma4,
    "gemma4_unified": _gemma4_unified,
    "interns1": _internvl,
    "internvl": _internvl,
    "internvl_chat": _internvl_chat,
    "llava_onevision": _llava_onevision,
    "minicpmo": _minicpmv,
    "minicpmv": _minicpmv,
    "perception_lm": _perception_lm,
    "smolvlm": _smolvlm,
}
