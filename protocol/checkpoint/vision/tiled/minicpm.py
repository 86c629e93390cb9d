"""Read the vision towers of MiniCPM-V and MiniCPM-OCR."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from ...config_fields import ConfigFields
from ..gemma import siglip
from ..spec import VisionSpec


def minicpmv4_6(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower, a SigLIP for images of any size that merges squares of patches after one of its layers."""
    for section, name in ((fields, "merge_kernel_size"), (vision, "window_kernel_size")):
        side = section.get(name, [2, 2])
        if side not in ([2, 2], (2, 2)):
            raise section.wrong(name, "[2, 2]", side)
    fields.require("merger_times", 1)
    mode = fields.choice("downsample_mode", ("4x", "16x"), "16x")
    spec = siglip(vision, output_size, projection="mlp")
    layer = fields.integer("insert_layer_id", 6, minimum=-1) + 1 if mode == "16x" else 0
    if layer >= spec.feature_layers[0]:
        most = spec.feature_layers[0] - 2
        raise fields.wrong("insert_layer_id", f"at most {most}", layer - 1)
    return replace(
        spec,
        max_outputs=(spec.image_size // spec.patch_size // (4 if layer else 2)) ** 2,
        positions="nearest",
        window_layer=layer,
        merge_factor=2,
        adapter_size=4 * spec.hidden_size,
        has_projection_norm=True,
        projection_eps=1e-6,
        tensor_names=_MINICPM_NAMES,
    )


def minicpmv4_7(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of MiniCPM-V 4.7, which is that of MiniCPM-V 4.6."""
    return replace(minicpmv4_6(fields, vision, output_size), has_axes=True)


def minicpm_ocr(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of MiniCPM-OCR, which merges patches only at its end."""
    return minicpmv4_6(fields.with_defaults(downsample_mode="4x"), vision, output_size)


def minicpmv(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of MiniCPM-V 2.5, 2.6, 4 and 4.5, whose patches are read by learned queries.

    Raises:
        CheckpointError: A field is missing or invalid, or the model has another version.
    """
    check_version(fields)
    if output_size % HEAD_SIZE:
        raise fields.wrong("hidden_size", f"a multiple of {HEAD_SIZE}", output_size)
    spec = siglip(vision, output_size, projection="resampler")
    [num_layers] = spec.feature_layers
    if fields.boolean("drop_vision_last_layer", False):
        num_layers -= 1
    return replace(
        spec,
        feature_layers=(num_layers,),
        max_outputs=fields.integer("query_num", 64, maximum=4096),
        positions="stepped",
        projection_eps=1e-6,
    )


def check_version(fields: ConfigFields) -> str:
    """Return the version of MiniCPM-V, from which the model's own code chooses the decoder.

    Raises:
        CheckpointError: It is not supported.
    """
    # The config of version 2.5 does not name it. Neither does that of 2.0, whose queries are 64.
    own = "2.5" if fields.get("query_num") == NUM_QUERIES_2_5 else None
    version = str(fields.get("version", own))
    if version not in VERSIONS:
        raise fields.wrong("version", f"one of {', '.join(VERSIONS)}", fields.get("version"))
    return version


HEAD_SIZE: Final = 128
"""The number of elements of a head of the queries."""

NUM_QUERIES_2_5: Final = 96
"""The number of queries of version 2.5."""

VERSIONS: Final = ("2.5", "2.6", "4.0", "4.5")
"""The versions of MiniCPM-V whose images are read in the same way."""

_MINICPM_NAMES: Final = (
    (r"(model\.)?merger\.mlp\.0\.pre_norm\.", "multi_modal_projector.layer_norm."),
    (r"(model\.)?merger\.mlp\.0\.", "multi_modal_projector."),
)
