"""Read the layers of CLIP and similar towers."""

from __future__ import annotations

import torch

from ...protocol.checkpoint.vision.spec import VisionSpec
from .layers import LayersSpec, LayerWeights
from .rotary import PatchRotary
from .weights import Linear, Norm, VisionWeights

_QK_NORM_EPS = 1e-6


def layers_spec(spec: VisionSpec) -> LayersSpec:
    """Return the layers of a tower that are needed to compute its features."""
    rotary: PatchRotary | None = None
    if spec.rope_theta:
        rotary = PatchRotary(
            spec.rotary,
            spec.rope_theta,
            spec.size_of_heads,
            in_float32=spec.rotary == "pairs",
            place_scale=spec.place_scale,
        )
    return LayersSpec(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        head_dim=spec.size_of_heads,
        feature_layers=tuple(sorted(set(spec.feature_layers))),
        activation=spec.activation,
        norm_kind=spec.norm_kind,
        norm_eps=spec.norm_eps,
        attention_scale=spec.attention_scale,
        rotary=rotary,
        qk_norm=spec.qk_norm,
        has_value_norm=spec.has_value_norm,
        has_gate=spec.has_gate,
        clips_products=spec.clips_products,
    )


def read_layer(spec: VisionSpec, tensors: VisionWeights, prefix: str) -> LayerWeights:
    """Return the weights of a layer."""
    size, num_inner, has_bias = spec.hidden_size, spec.intermediate_size, spec.product_bias
    attended_size = spec.num_heads * spec.size_of_heads

    def read(name: str, rows: int, columns: int, has_bias: bool) -> Linear:
        return tensors.read_linear(
            prefix + name, rows, columns, has_bias=has_bias, clips=spec.clips_products
        )

    def norm(name: str) -> Norm:
        return tensors.read_norm(prefix + name, size, spec.norm_kind, spec.norm_eps)

    def head_norm(name: str) -> Norm | None:
        if spec.qk_norm is None:
            return None
        norm_size = attended_size if spec.qk_norm == "full" else spec.size_of_heads
        return tensors.read_rms_norm(f"{prefix}self_attn.{name}_norm", norm_size, _QK_NORM_EPS)

    def projection(name: str) -> Linear:
        """Return the matrix of queries, keys or values, with the halves of a head after each other."""
        interleaved = f"self_attn.{name}_interleaved"
        if f"{prefix}{interleaved}.weight" in tensors:
            order_K = torch.arange(spec.size_of_heads).view(-1, 2).T.flatten()
            found = read(interleaved, attended_size, size, spec.qkv_bias)
            return found.reorder_heads(order_K)
        return read(f"self_attn.{name}_proj", attended_size, size, spec.qkv_bias)

    if f"{prefix}self_attn.qkv.weight" in tensors:
        qkv = [read("self_attn.qkv", 3 * attended_size, size, spec.qkv_bias)]
    else:
        qkv = [projection(name) for name in "qkv"]
    weights = LayerWeights(
        attention_norm=norm("layer_norm1") if spec.has_input_norms else None,
        qkv=qkv if spec.clips_products else [Linear.join(qkv)],
        output=read("self_attn.out_proj", size, attended_size, has_bias),
        mlp_norm=norm("layer_norm2") if spec.has_input_norms else None,
        gate=read("mlp.gate_proj", num_inner, size, has_bias) if spec.has_gate else None,
        up=read("mlp.fc1", num_inner, size, has_bias),
        down=read("mlp.fc2", size, num_inner, has_bias),
        query_norm=head_norm("q"),
        key_norm=head_norm("k"),
        attention_output_norm=norm("output_norm1") if spec.has_output_norms else None,
        mlp_output_norm=norm("output_norm2") if spec.has_output_norms else None,
    )
    if spec.has_layer_scales:
        for name, linear in (("lambda_1", weights.output), ("lambda_2", weights.down)):
            linear.scale_outputs(tensors.read(f"{prefix}{name}", size))
    return weights
