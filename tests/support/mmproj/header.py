"""The fields of an mmproj file with a vision tower."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFWriter

_HALVES = (0.5, 0.5, 0.5)


def vision_writer(
    path: Path,
    projector: str,
    numbers: Mapping[str, int],
    *,
    eps: float = 1e-6,
    uses_gelu: bool | None = True,
    mean: Sequence[float] = _HALVES,
    std: Sequence[float] = _HALVES,
) -> GGUFWriter:
    """Return a writer of a tower with these fields. If `uses_gelu` is None, the file does not say it."""
    writer = GGUFWriter(path, "clip")
    writer.add_string("clip.projector_type", projector)
    for name, value in numbers.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", eps)
    if uses_gelu is not None:
        writer.add_bool("clip.use_gelu", uses_gelu)
    writer.add_array("clip.vision.image_mean", mean)
    writer.add_array("clip.vision.image_std", std)
    return writer


def tower_sizes(vision: Mapping[str, Any]) -> dict[str, int]:
    """Return the fields of a tower whose config has the common names."""
    return {
        "patch_size": vision["patch_size"],
        "embedding_length": vision["hidden_size"],
        "feed_forward_length": vision["intermediate_size"],
        "block_count": vision["num_hidden_layers"],
        "attention.head_count": vision["num_attention_heads"],
    }
