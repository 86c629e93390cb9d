"""Read the vision tower of MiMo-V2.5 and MiMo-V2 Omni."""

from __future__ import annotations

from typing import Final, Literal

from ...config_fields import ConfigFields
from ..grid import NAMES, GridVisionSpec, grid_sizes


def mimo_v2(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of MiMo-V2.5, in which most patches attend to those near them in rows or columns."""
    vision.require("out_hidden_size", output_size, _OUTPUT_SIZE, default=2048)
    vision = vision.with_defaults(depth=28, num_heads=32)
    sizes = grid_sizes(vision, vision.integer("hidden_size", 1280), 16)
    head_dim = vision.integer("qk_channels", 64)
    if head_dim % 4:
        raise vision.wrong("qk_channels", "a multiple of 4", head_dim)
    vision.require("kv_channels", head_dim, ", which is qk_channels", default=64)
    bands = _bands(vision, sizes["num_layers"])
    return GridVisionSpec(
        **sizes,
        intermediate_size=vision.integer("intermediate_size", 4608),
        activation=vision.text("hidden_act", "silu"),
        output_size=output_size,
        norm_kind="rms",
        norm_eps=vision.positive("rms_norm_eps", 1e-6),
        has_gate=True,
        num_kv_heads=vision.divisor("num_key_value_heads", sizes["num_heads"], 8),
        head_dim=head_dim,
        bands=bands if any(bands) else (),
        band_size=vision.integer("visual_token_window_size", 64) if any(bands) else 0,
        has_first_biases=any(bands) and vision.boolean("use_sink", False),
        has_axes=False,
        merger_norm_kind="layer",
        merger_eps=1e-6,
        has_merger_norm_bias=False,
        has_merger_biases=False,
        tensor_names=NAMES,
    )


def _bands(vision: ConfigFields, num_layers: int) -> tuple[Literal["rows", "columns"] | None, ...]:
    """Return the order in which the patches of each layer are near each other; None if they attend to all."""
    types = vision.get("vit_window_attn_types", [-1] * num_layers)
    if (
        not isinstance(types, list)
        or len(types) != num_layers
        or not all(type(kind) is int and kind in _ORDERS for kind in types)
    ):
        raise vision.wrong(
            "vit_window_attn_types", f"-1, 0 or 1 for each of {num_layers} layers", types
        )
    full = [index for index, kind in enumerate(types) if _ORDERS[kind] is None]
    vision.require(
        "fullatt_block_indexes", full, ", the layers of vit_window_attn_types", default=full
    )
    return tuple(_ORDERS[kind] for kind in types)


_ORDERS: Final[dict[int, Literal["rows", "columns"] | None]] = {-1: None, 0: "rows", 1: "columns"}
_OUTPUT_SIZE: Final = ", which is the decoder's hidden_size"
