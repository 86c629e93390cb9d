"""Translate the metadata of towers in mmproj files that read squares: Gemma 3n, Granite, Janus and MiniCPM-V."""

from __future__ import annotations

import math

from .fields import Mmproj, Vision


def gemma3n(vision: Vision) -> Mmproj:
    """Return the fields of Gemma 3n without audio."""
    side = vision.integer("image_size")
    end_id = vision.token_id("<end_of_image>")
    return Mmproj(
        {
            "model_type": "gemma3n",
            "architectures": ["Gemma3nForConditionalGeneration"],
            "vision_config": {
                "architecture": "mobilenetv5_300m_enc",
                "model_args": {
                    "channel_multiplier": vision.num_channels("v.blk.0.0.conv_pwl.weight") / 128
                },
                "vocab_size": vision.num_rows("mm.embedding.weight"),
                "vocab_offset": end_id,
                "rms_norm_eps": vision.positive("attention.layer_norm_epsilon", 1e-6),
            },
            "eoi_token_id": end_id,
            "image_token_id": vision.token_id("<image_soft_token>"),
        },
        {"size": {"height": side, "width": side}, "resample": _BILINEAR, "do_normalize": False},
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    )


_BILINEAR = 2


def granite4_vision(vision: Vision) -> Mmproj:
    """Return the fields of Granite 4 Vision. The decoder's file says which of its layers read which projection.

    Raises:
        CheckpointError: The files do not fit each other.
    """
    side = vision.integer("image_size")
    features, offsets, sides = (
        vision.integers(name)
        for name in ("feature_layer", "projector.spatial_offsets", "image_grid_pinpoints")
    )
    if not features:
        raise vision.wrong("feature_layer", "at least one layer", features)
    targets = vision.decoder_layers(len(features))
    if len(features) != len(offsets):
        raise vision.wrong("projector.spatial_offsets", f"{len(features)} integers", offsets)
    # The file counts the layer after which features are taken, and configs count its outputs.
    parts = sorted(zip(offsets, targets, [layer + 1 for layer in features], strict=True))
    grids = [[y, x] for x, y in zip(sides[::2], sides[1::2], strict=False)]
    common = {"image_grid_pinpoints": grids}
    query_side, window_side = (
        vision.integer(f"projector.{name}_side") for name in ("query", "window")
    )
    return Mmproj(
        {
            "model_type": "granite4_vision",
            "architectures": ["Granite4VisionForConditionalGeneration"],
            "vision_config": vision.tower("gelu_pytorch_tanh")
            | {"model_type": "siglip_vision_model"},
            "vision_feature_select_strategy": "full",
            "downsample_rate": f"{query_side}/{window_side}",
            "deepstack_layer_map": [[layer, at] for offset, at, layer in parts if offset < 0],
            "spatial_vision_layer": parts[-1][2],
            "spatial_target_layers": [at for offset, at, _ in parts if offset >= 0],
            "qformer_config": {"intermediate_size": vision.num_rows("v.proj_blk.0.ffn_up.weight")},
            "image_token_index": vision.token_id("<image>"),
            **common,
        },
        vision.pixels({"height": side, "width": side}) | common,
    )


def janus(vision: Vision) -> Mmproj:
    """Return the fields of Janus-Pro."""
    side = vision.integer("image_size")
    tower = vision.tower("gelu")
    # The file's feed_forward_length is not that of the tensors.
    tower["mlp_ratio"] = vision.num_rows("v.blk.0.ffn_up.weight") / tower["hidden_size"]
    return Mmproj(
        {
            "model_type": "janus",
            "architectures": ["JanusForConditionalGeneration"],
            "vision_config": tower | {"projection_dim": vision.num_rows("mm.1.weight")},
            "image_token_id": vision.token_id("<image_placeholder>"),
        },
        vision.pixels({"height": side, "width": side}),
        {"boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"},
    )


def minicpmv4_6(vision: Vision) -> Mmproj:
    """Return the fields of MiniCPM-V 4.6."""
    tower = vision.tower("gelu_pytorch_tanh")
    patch_size, side = tower["patch_size"], tower["image_size"]
    # The file's size is that of slices. Positions are those of a larger image.
    tower["image_size"] = math.isqrt(vision.num_rows("v.position_embd.weight")) * patch_size
    mode = "4x" if vision.integer("projector.scale_factor", 4) == 2 else "16x"
    marks = ("<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>")
    return Mmproj(
        {
            "model_type": "minicpmv4_6",
            "architectures": ["MiniCPMV4_6ForConditionalGeneration"],
            "vision_config": tower,
            "insert_layer_id": vision.integer("wa_layer_indexes", 6, minimum=0),
            "downsample_mode": mode,
            "image_token_id": vision.token_id("<|image_pad|>"),
        },
        {
            "scale_resolution": side,
            "patch_size": patch_size,
            "downsample_mode": mode,
            **vision.statistics(),
        },
        dict(zip(_MARKS, marks, strict=True)),
    )


_MARKS = (
    "image_start_token",
    "image_end_token",
    "slice_start_token",
    "slice_end_token",
    "image_id_start_token",
    "image_id_end_token",
)
"""The names of the tokens around an image, a slice and the number of an image."""
