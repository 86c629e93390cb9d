"""The layout of EAGLE heads (arXiv 2401.15077): a projection and a few layers of the model's family.

The first heads have a layer without input norm, and no final norm. Later ones have both, and norms before the
projection. The tensors of a head say which of them it has.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from msgspec.structs import replace

from ....layers.layer_spec import LayerSpec
from ....layers.spec import ModelSpec
from ....loaders import Checkpoint
from ....models.families import model_spec
from .head_layout import HeadLayout, headless

_ARCHITECTURES: Final = {"EagleDeepSeekMTPModel": "DeepseekV3ForCausalLM"}
"""The architectures of heads whose names are not that of a model after `Eagle`, and the models with the same layers."""

_START: Final = r"^(?:model\.)?"
_PARTS: Final = (
    (_START + r"(?:fc|eagle_linear)\.", "projection."),
    (_START + r"(?:enorm|input_norm1)\.", "embedding_norm."),
    (_START + r"(?:hnorm|input_norm2)\.", "hidden_norm."),
)


def read_eagle(checkpoint: Checkpoint) -> HeadLayout:
    """Return the layout of an EAGLE head."""
    config = dict(checkpoint.config)
    name = str((config.get("architectures") or ["LlamaForCausalLM"])[0])
    family = _ARCHITECTURES.get(name, re.sub(r"^Eagle(?=[A-Z])", "", name))
    config["architectures"] = [family]
    spec = model_spec(config, checkpoint.config_path)
    stored = checkpoint.names()
    # The heads of MiniCPM contain a final norm, which they do not apply.
    has_norm = family != "MiniCPMForCausalLM" and _has(stored, r"norm\.weight")
    has_head = _has(stored, r"lm_head\.weight")
    first = spec.layers[0]
    if not _has(stored, r"(eagle_)?layers\.0\.(input_layernorm|attention_norm)\.weight"):
        first = _without_input_norm(spec, first)
    unread = "fc|eagle_linear|enorm|hnorm|input_norm[12]|embed_tokens"
    unread += "" if has_norm else "|norm"
    unread += "" if has_head else "|lm_head"
    spec = replace(
        headless(spec),
        layers=(first, *spec.layers[1:]),
        has_final_norm=has_norm,
        has_head=has_head,
        tensor_names=(
            (rf"{_START}({unread})\..*", ""),
            (rf"{_START}eagle_layers\.", "model.layers."),
            (r"^(?=layers\.|norm\.)", "model."),
            *spec.tensor_names,
        ),
    )
    return HeadLayout(spec, _PARTS, returns_normed=has_norm)


def _has(stored: Collection[str], pattern: str) -> bool:
    return any(re.fullmatch(rf"(model\.)?{pattern}", name) for name in stored)


def _without_input_norm(spec: ModelSpec, layer: LayerSpec) -> LayerSpec:
    return replace(layer, norms=replace(layer.norms or spec.norms, attention_input=None))
