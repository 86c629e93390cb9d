"""Block-diffusion families. Their layers are those of models that generate by tokens."""

from __future__ import annotations

from msgspec.structs import replace

from ....protocol.checkpoint.config_fields import ConfigFields
from ...layers.spec import ModelSpec
from .common import Family
from .experts import qwen3_moe
from .gemma import gemma4
from .llama import qwen3
from .sigmoid_experts import ling2


def _llada2(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an LLaDA 2 (arXiv 2512.15745), whose layers are those of a Ling 2.

    With `expert_capacity`, the tokens of a block choose among the same experts, instead of the best groups.
    """
    spec = ling2(fields)
    capacity = fields.optional_integer("expert_capacity")
    if capacity is None:
        return spec
    num_experts, num_chosen = fields.integer("num_experts"), fields.integer("num_experts_per_tok")
    if not num_chosen <= capacity <= num_experts:
        raise fields.error(
            f"expert_capacity {capacity} must be between num_experts_per_tok, which is {num_chosen}, and "
            f"num_experts, which is {num_experts}"
        )
    layers = tuple(
        replace(
            layer,
            experts=replace(
                layer.experts,
                block_size=fields.integer("block_size", 32, minimum=1),
                num_experts_per_block=capacity,
                num_groups=1,
                renormalizes=num_chosen > 1,
            ),
        )
        if layer.experts is not None
        else layer
        for layer in spec.layers
    )
    return replace(spec, layers=layers)


def _diffusion_gemma(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a DiffusionGemma, a Gemma 4 with experts whose tokens in canvases attend to each other.

    A context encoder and a decoder of canvases share all weights but the scales of layers.
    """
    spec = gemma4(
        fields.with_defaults(final_logit_softcapping=30.0).with_values(
            {
                "enable_moe_block": True,
                "attention_k_eq_v": True,
                "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 0,
                "use_double_wide_mlp": False,
            }
        )
    )
    size = fields.optional_integer("self_conditioning_size") or fields.integer("intermediate_size")
    encoder = r"\.encoder\.language_model\."
    return replace(
        spec,
        self_conditioning_size=size,
        unit_norms=(*spec.unit_norms, "post_norm"),
        tensor_names=(
            (rf"{encoder}(layers\.\d+)\.layer_scalar$", r".decoder.\1.scale_before_canvas"),
            (rf".*{encoder}.*", ""),
            *spec.tensor_names,
        ),
    )


FAMILIES = (
    Family("DiffusionGemmaForBlockDiffusion", "diffusion_gemma", _diffusion_gemma),
    Family("LLaDA2MoeModelLM", "llada2_moe", _llada2),
    Family("SDARForCausalLM", "sdar", qwen3),
    Family("SDARMoeForCausalLM", "sdar_moe", qwen3_moe),
)
