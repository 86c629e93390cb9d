"""Jet-Nemotron, a Qwen2 with recurrent layers (arXiv 2508.15884)."""

from __future__ import annotations

from .....protocol.checkpoint.config_fields import ConfigFields
from ....layers.layer_spec import LayerSpec
from ....layers.read_rope import read_rope
from ....layers.spec import ModelSpec
from ..common import Family, base_spec, head_dim
from ..hybrid import recurrent_layer


def _jet_nemotron(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Jet-Nemotron, whose other layers attend to all keys or have a window."""
    kinds = fields.per_layer("layer_types", fields.layer_count("num_hidden_layers")) or []
    if not {"attn", "jet", "swa"}.issuperset(kinds) or "jet" not in kinds:
        raise fields.wrong("layer_types", "'attn', 'swa' or 'jet' for each layer", kinds)
    windows = fields.first_section("efficient_attention_config").first_section("swa")
    rope = read_rope(fields, head_dim(fields))
    of_kind = {
        "attn": LayerSpec(rope),
        "jet": LayerSpec(None, recurrent=recurrent_layer(fields), attends=False),
    }
    if "swa" in kinds:
        # A token attends to itself and to as many tokens before it as the window has.
        of_kind["swa"] = LayerSpec(rope, windows.integer("window_size") + 1)
    numbers = "|".join(str(i) for i, kind in enumerate(kinds) if kind == "jet")
    return base_spec(
        fields.with_defaults(tie_word_embeddings=True),
        tuple(of_kind[kind] for kind in kinds),
        qkv_bias=True,
        tensor_names=(
            (rf"\.layers\.({numbers})\.self_attn\.", r".layers.\1.mixer."),
            (r"\.mixer\.o_proj\.", ".mixer.out_proj."),
            (r"\.mixer\.o_norm\.", ".mixer.norm."),
            (r"\.mixer\.dynamic_conv1d\.kernel_generator\.", ".mixer.taps."),
        ),
    )


FAMILIES = (Family("JetNemotronForCausalLM", "jet_nemotron", _jet_nemotron),)
