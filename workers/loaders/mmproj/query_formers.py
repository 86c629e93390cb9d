"""Translate the names of Q-Formers' tensors in mmproj files (Granite 4 Vision, Granite Speech)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

_LAYER: Final = {
    **{
        f"{kind}_attn_{x[0]}": f"{name}.attention.{x}"
        for kind, name in (("self", "attention"), ("cross", "crossattention"))
        for x in ("query", "key", "value")
    },
    **{
        f"{kind}_attn_{ours}": f"{name}.output.{theirs}"
        for kind, name in (("self", "attention"), ("cross", "crossattention"))
        for ours, theirs in (("out", "dense"), ("norm", "LayerNorm"))
    },
    "ffn_down": "output_query.dense",
    "ffn_norm": "output_query.LayerNorm",
    "ffn_up": "intermediate_query.dense",
}
_WINDOW: Final = {
    **{name: f"qformer.encoder.layer.0.{found}" for name, found in _LAYER.items()},
    "img_pos": "image_positions",
    "linear": "out_linear",
    "norm": "norm",
    "post_norm": "qformer.layernorm",
    "query": "query",
}
_TENSOR: Final = re.compile(r"[av]\.proj_blk\.(\d+)\.(\w+)(\.\w+)?")


def former_name(name: str) -> str | None:
    """Return the name of a tensor of a layer of Granite Speech's Q-Former; None if it has no other name."""
    match = _TENSOR.fullmatch(name)
    if match is None or match[2] not in _LAYER:
        return None
    return f"projector.qformer.encoder.layer.{match[1]}.{_LAYER[match[2]]}{match[3] or ''}"


def window_names(others: Callable[[str], str], offsets: Sequence[int]) -> Callable[[str], str]:
    """Return a function that names the tensors of Granite 4 Vision. `others` names those outside of projections."""
    plain = [index for index, offset in enumerate(offsets) if offset < 0]

    def rename(name: str) -> str:
        if name == "v.image_newline":
            return "model.image_newline"
        match = _TENSOR.fullmatch(name)
        if match is None or match[2] not in _WINDOW or int(match[1]) >= len(offsets):
            return others(name)
        index = int(match[1])
        part = (
            f"layerwise_projectors.{plain.index(index)}"
            if index in plain
            else f"spatial_projectors.{offsets[index]}"
        )
        return f"model.{part}.{_WINDOW[match[2]]}{match[3] or ''}"

    return rename
