"""Llama 3.2 Vision, some of whose layers read images by cross attention."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from .....protocol.checkpoint.field_names import NUM_IMAGE_TOKENS
from .....protocol.checkpoint.vision.llama import TilesVisionSpec
from ....layers.layer_spec import LayerSpec
from ....layers.read_rope import read_rope
from ....layers.spec import ModelSpec, SourceSpec
from ....layers.specs.norm_names import NormNames
from ..common import Family, base_spec, head_dim

_MAX_IMAGES: Final = 4
"""The maximum number of consecutive images, which a token sees together."""

_NORMS: Final = NormNames(
    None, None, "post_attention_layernorm", None, cross_input="input_layernorm"
)


def _mllama(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the text part of Llama 3.2 Vision. Without images, layers with cross attention do nothing."""
    crossing = fields.get("cross_attention_layers", [3, 8, 13, 18, 23, 28, 33, 38])
    fields = fields.with_defaults(num_key_value_heads=8, rms_norm_eps=1e-5)
    rope = read_rope(fields, head_dim(fields), theta=500_000.0)
    layers = tuple(
        LayerSpec(None, attends=False, has_mlp=False) if i in crossing else LayerSpec(rope)
        for i in range(fields.layer_count("num_hidden_layers"))
    )
    unused = "|".join(map(str, crossing)) or "none"
    return base_spec(
        fields,
        layers,
        tensor_names=((rf".*\.layers\.({unused})\..*", ""),),
        num_unused_embeddings=NUM_IMAGE_TOKENS,
    )


def with_images(spec: ModelSpec, tower: TilesVisionSpec) -> ModelSpec:
    """Return the spec of a model whose layers with cross attention read images. The last tokens represent images."""
    layers = tuple(
        layer if layer.attends else replace(layer, has_mlp=True, reads_source=True, norms=_NORMS)
        for layer in spec.layers
    )
    source = SourceSpec(
        None,
        are_images=True,
        has_norms=True,
        max_positions=_MAX_IMAGES * tower.num_outputs,
        output_size=tower.output_size,
    )
    return replace(
        spec,
        layers=layers,
        source=source,
        num_unused_embeddings=0,
        num_unsampled=NUM_IMAGE_TOKENS,
        tensor_names=(),
    )


FAMILIES = (
    Family("MllamaForCausalLM", "mllama_text_model", _mllama),
    Family("MllamaForConditionalGeneration", "mllama", _mllama),
)
