"""Read the video processors of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.vision.gemma import PatchVisionSpec
from ....protocol.checkpoint.vision.grid import GridVisionSpec
from ....protocol.checkpoint.vision.read import vision_spec
from ....protocol.checkpoint.vision.spec import VisionSpec
from ....protocol.checkpoint.vision_kind import model_kind
from ....protocol.checkpoint.vision_presence import has_vision
from ....protocol.config.videos import AnyVideoProcessor, SoundFormat, VideoProcessor
from ...tokenizer.config import TokenizerConfig
from .fields import BICUBIC, CLIP_VALUES, pixel_values
from .frame_videos import FRAME_READERS, FrameSource
from .qwen import check_patches, pixel_limits, resize_words
from .read import image_token_id
from .source import ProcessorSource

_MAX_FRAMES: Final = 1024
_GLM_MAX_PIXELS: Final = 28 * 28 * 2 * 30000


class _Family(NamedTuple):
    """The differences between model families: settings, defaults of fields, and the tokens around a grid."""

    values: Mapping[str, Any] = MappingProxyType({})
    around: str = ""
    around_ids: tuple[int, int] = (0, 0)
    defaults: Mapping[str, Any] = MappingProxyType({})


_QWEN: Final = _Family()
_QWEN3: Final = _Family(
    {"limits_whole": True, "sampling": "ends", "times": "mean"}, "vision", (151652, 151653)
)
_COMPASS: Final = _QWEN3._replace(around_ids=(255028, 255029))
_LFM3: Final = _QWEN3._replace(around_ids=(125009, 125010))
_GLM41: Final = _Family(
    {"limits_whole": True, "sampling": "seconds", "times": "whole"}, "image", (151339, 151340)
)
_GLM46: Final = _Family({**_GLM41.values, "sampling": "dynamic", "times": "first"}, *_GLM41[1:])
_HY4: Final = _Family(
    {"sampling": "ends"},
    defaults={
        "size": {"shortest_edge": 4096, "longest_edge": 1 << 25},
        "min_frames": 2,
        "max_frames": 1024,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    },
)

_VIDEO_LLAMA: Final = _Family(
    {"shares_pixels": True, "least_change": 0.1, "times": "named"},
    defaults={
        "patch_size": 14,
        "temporal_patch_size": 1,
        "merge_size": 2,
        "max_frames": 180,
        "fps": 1.0,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    },
)

_FAMILIES: Final = {
    "cohere_compass": _COMPASS,
    "cosmos3_omni": _QWEN3,
    "glm4v": _GLM41,
    "glm4v_moe": _GLM41,
    "glm46v": _GLM46,
    "glm_ocr": _GLM46,
    "hy_v4_vl": _HY4,
    "interns1_pro": _QWEN3,
    "lfm3_vl": _LFM3,
    "llavaonevision1_5": _QWEN,
    "qwen2_vl": _QWEN,
    "qwen2_5_omni_thinker": _QWEN._replace(values={"nominal_fps": 2.0}),
    "qwen3_omni_moe_thinker": _QWEN._replace(values={"nominal_fps": 1.0}),
    "qwen2_5_vl": _QWEN,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "qwen4_exp": _QWEN3,
    "video_llama_3": _VIDEO_LLAMA,
}


def read_video_processor(
    path: Path, config: ConfigFields, text: ConfigFields, overrides: Mapping[str, object]
) -> AnyVideoProcessor | None:
    """Return the model's video preprocessing; None if it reads no videos, or if the processor's file is missing.

    Args:
        path: The directory of the checkpoint.
        config: The config of the checkpoint.
        text: The text decoder's section of the config.
        overrides: Fields that replace those of the processor.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    processor = _read(path, config, text, overrides)
    if processor is None or not overrides.get("use_audio_in_video"):
        return processor
    return replace(processor, reads_sound=True)


def _read(
    path: Path, config: ConfigFields, text: ConfigFields, overrides: Mapping[str, object]
) -> AnyVideoProcessor | None:
    model_type = config.text("model_type", "")
    # In the formats of LLaVA's authors and the like, prompts have no marks of videos.
    if not (has_vision(config) and path.is_dir()) or config.get("image_mark") is not None:
        return None
    found = _video_fields(path)
    if found is None:
        return None
    vision = vision_spec(config, text.integer("hidden_size"))
    if "_omni_" in model_type:
        # Their processors replace the limits of the file, and one of their configs has an old name of the token.
        found = found.with_values(dict.fromkeys(("size", "min_pixels", "max_pixels")))
        config = config.with_defaults(video_token_id=config.get("video_token_index"))
    fields = found.with_values(dict(overrides))
    if model_kind(config) == "nemotron_h_omni" and isinstance(vision, GridVisionSpec):
        return _read_tubelets(path, fields, config, text, vision)
    if model_kind(config) == "ovis2_5" and isinstance(vision, GridVisionSpec):
        return _read_between_marks(path, fields, config, text, vision)
    read = FRAME_READERS.get(model_type)
    if read is not None and isinstance(vision, VisionSpec | PatchVisionSpec):
        return read(FrameSource(path, fields, config, text, vision))
    if model_type not in _FAMILIES or config.get("video_token_id") is None:
        return None
    assert isinstance(vision, GridVisionSpec)
    return _read_grids(path, fields, config, text, vision)


def _read_grids(
    path: Path,
    fields: ConfigFields,
    config: ConfigFields,
    text: ConfigFields,
    vision: GridVisionSpec,
) -> VideoProcessor:
    """Return the processor of Qwen-VL, GLM or Hy4-VL."""
    model_type = config.text("model_type")
    family = _FAMILIES[model_type]
    fields = fields.with_defaults(**family.defaults)
    if vision.has_class_angles:
        # The authors' file is that of Qwen2.5-VL, whose patches have two frames.
        fields = fields.with_values({"temporal_patch_size": vision.frames_per_patch})
    merge, highest = vision.merge_size * vision.frame_merge, text.integer("vocab_size") - 1
    check_patches(fields, replace(vision, merge_size=merge))
    unit = vision.patch_size * merge

    def token(name: str, *default: int) -> int:
        return config.integer(f"{name}_token_id", *default, minimum=0, maximum=highest)

    values = dict(family.values)
    is_glm = model_type.startswith("glm")
    if is_glm:
        # The frames use the placeholder token of images.
        token_id, values["mark_id"] = token("image"), token("video")
        least, most = pixel_limits(fields, 112 * 112, _GLM_MAX_PIXELS)
    else:
        token_id = token("video")
        least, most = pixel_limits(fields, 128 * unit**2, 768 * unit**2)
    if most < unit**2:
        raise fields.error(f"max_pixels {most} must be at least {unit**2}")
    if model_type == "qwen2_5_vl":
        seconds = config.required_section("vision_config")
        values["steps_per_second"] = seconds.positive("tokens_per_second", 4.0)
    elif "nominal_fps" in values:
        values["steps_per_second"] = config.positive("position_id_per_seconds", 25.0)
        values["sound"] = _sound_format(path, config, values["steps_per_second"])
    if vision.frame_merge > 1 and not fields.boolean("use_token_compression", True):
        # No change is below this one.
        values["least_change"] = -1.0
    if vision.newlines is not None:
        of_frame = fields.first_section("max_image_size")
        values["max_frame_pixels"] = of_frame.integer("longest_edge", 1 << 20)
    if family.around:
        ids = zip(("start", "end"), family.around_ids, strict=True)
        values |= {f"{end}_token_id": token(f"{family.around}_{end}", each) for end, each in ids}
    return VideoProcessor(
        **CLIP_VALUES | pixel_values(fields, token_id, BICUBIC),
        **values,
        unit=unit,
        frames_per_patch=vision.frames_per_patch,
        min_pixels=least,
        max_pixels=most,
        max_seconds=fields.positive("max_duration", 300.0),
        fps=fields.positive("fps", 2.0),
        min_frames=fields.integer("min_frames", 4),
        max_frames=fields.integer("max_frames", 768, maximum=_MAX_FRAMES),
    )


def _sound_format(path: Path, config: ConfigFields, steps_per_second: float) -> SoundFormat | None:
    """Return the format of videos with sound in Qwen-Omni; None if the tokenizer lacks the tokens around them."""
    tokenizer = TokenizerConfig(path)
    begin, end = (
        next((found for text in texts if (found := tokenizer.added_token_id(text))), None)
        for texts in (("<|audio_bos|>", "<|audio_start|>"), ("<|audio_eos|>", "<|audio_end|>"))
    )
    if begin is None or end is None:
        return None
    if config.text("model_type") == "qwen3_omni_moe_thinker":
        return SoundFormat(begin, end)
    steps = int(steps_per_second * config.positive("seconds_per_chunk", 2.0))
    return SoundFormat(begin, end, chunk_steps=max(1, steps), has_joint_marks=True)


def _read_tubelets(
    path: Path,
    fields: ConfigFields,
    config: ConfigFields,
    text: ConfigFields,
    vision: GridVisionSpec,
) -> VideoProcessor | None:
    """Return the processor of Nemotron Omni; None for Nemotron Nano VL 2, whose videos are not read."""
    if not vision.frames_per_tubelet:
        return None
    fields.require("patch_size", vision.patch_size, ", as in vision_config")
    target = fields.integer("video_target_num_patches", 1024, maximum=1 << 20)
    means = {"image_mean": fields.get("norm_mean"), "image_std": fields.get("norm_std")}
    token_id = image_token_id(path, config, text.integer("vocab_size"))
    return VideoProcessor(
        **CLIP_VALUES | pixel_values(fields.with_defaults(**means), token_id, BICUBIC),
        unit=vision.unit,
        frames_per_patch=vision.frames_per_tubelet,
        min_pixels=0,
        max_pixels=max(target * vision.patch_size**2, vision.unit**2),
        target_patches=target,
        patch_size=vision.patch_size,
        is_square=not fields.boolean("video_maintain_aspect_ratio", True),
        times="each",
        mark="<video>",
        start="<img>",
        end="</img>",
        sampling="floors",
        num_frames=fields.integer("num_frames", 0, minimum=0, maximum=_MAX_FRAMES),
        fps=fields.positive("fps", 2.0),
        min_frames=1,
        max_frames=fields.integer("max_frames", 768, maximum=_MAX_FRAMES),
    )


def _read_between_marks(
    path: Path,
    fields: ConfigFields,
    config: ConfigFields,
    text: ConfigFields,
    vision: GridVisionSpec,
) -> VideoProcessor:
    """Return the processor of Ovis 2.5, which resizes frames like images and puts two marks around all of them."""
    token_id = image_token_id(path, config, text.integer("vocab_size"))
    images = resize_words(ProcessorSource(path, fields, config, {}, token_id), vision)
    return VideoProcessor(
        token_id=token_id,
        resample=images.resample,
        scale=images.scale,
        mean=images.mean,
        std=images.std,
        unit=images.unit,
        min_pixels=images.min_pixels,
        max_pixels=images.max_pixels,
        has_ends=True,
        mark="<video>",
        sampling="floors",
        num_frames=fields.integer("num_frames", 32, maximum=_MAX_FRAMES),
        min_frames=1,
        max_frames=_MAX_FRAMES,
    )


def _video_fields(path: Path) -> ConfigFields | None:
    """Return the fields of the video processor. In older checkpoints the image processor has them."""
    for name, section in (
        ("video_preprocessor_config.json", None),
        ("processor_config.json", "video_processor"),
        ("preprocessor_config.json", None),
    ):
        if (path / name).is_file():
            fields = ConfigFields.read(path / name)
            found = fields if section is None else fields.section(section)
            if found is not None:
                return found
    return None
