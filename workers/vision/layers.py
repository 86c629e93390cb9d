"""The layers of a vision tower in torch.

Shapes: P patches of an image and the class token, D hidden size of the tower, F intermediate size, H heads, K head
dimension.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ...protocol.checkpoint.vision.spec import VisionSpec
from .rotary import PatchRotation
from .weights import Linear, Norm, VisionWeights


class VisionLayer:
    """A layer of attention and an MLP, each after its norm."""

    def __init__(
        self,
        spec: VisionSpec,
        tensors: VisionWeights,
        prefix: str,
        activation: Callable[[Tensor], Tensor],
    ) -> None:
        self._spec = spec
        size, head_size = spec.hidden_size, spec.size_of_heads
        attended_size = spec.num_heads * head_size
        self._scale = spec.attention_scale or head_size**-0.5
        self._activation = activation
        self._norms = [
            tensors.read_norm(f"{prefix}layer_norm{i}", size, spec, spec.norm_kind) for i in (1, 2)
        ]
        self._output_norms: list[Norm] = [lambda x: x, lambda x: x]
        if spec.has_output_norms:
            self._output_norms = [
                tensors.read_norm(f"{prefix}output_norm{i}", size, spec, spec.norm_kind)
                for i in (1, 2)
            ]
        clips = spec.clips_products

        def read(name: str, rows: int, columns: int, has_bias: bool) -> Linear:
            return tensors.read_linear(prefix + name, rows, columns, has_bias=has_bias, clips=clips)

        names = [f"self_attn.{name}" for name in "qkv"]
        self._qkv = [read(f"{n}_proj", attended_size, size, spec.qkv_bias) for n in names]
        if not clips:
            self._qkv = [Linear.join(self._qkv)]
        self._qk_norms: list[Norm] = []
        if spec.qk_norm is not None:
            norm_size = attended_size if spec.qk_norm == "full" else head_size
            self._qk_norms = [
                tensors.read_rms_norm(f"{prefix}{name}_norm", norm_size, 1e-6) for name in names[:2]
            ]
        has_bias, num_inner = spec.product_bias, spec.intermediate_size
        self._output = read("self_attn.out_proj", size, attended_size, has_bias)
        self._gate = read("mlp.gate_proj", num_inner, size, has_bias) if spec.has_gate else None
        self._up = read("mlp.fc1", num_inner, size, has_bias)
        self._down = read("mlp.fc2", size, num_inner, has_bias)
        if spec.has_layer_scales:
            for name, linear in (("lambda_1", self._output), ("lambda_2", self._down)):
                linear.scale_outputs(tensors.read(f"{prefix}{name}", size))

    def __call__(self, x_PD: Tensor, rotation: PatchRotation | None) -> Tensor:
        """Return the hidden states after the layer."""
        x_PD = x_PD + self._output_norms[0](self._attend(self._norms[0](x_PD), rotation))
        return x_PD + self._output_norms[1](self._mlp(self._norms[1](x_PD)))

    def _attend(self, x_PD: Tensor, rotation: PatchRotation | None) -> Tensor:
        spec = self._spec
        q, k, v = torch.cat([linear(x_PD) for linear in self._qkv], -1).chunk(3, -1)
        if spec.qk_norm == "full":
            q, k = (norm(part) for norm, part in zip(self._qk_norms, (q, k), strict=True))
        q, k, v = (part.unflatten(-1, (spec.num_heads, -1)) for part in (q, k, v))
        if spec.qk_norm == "head":
            q, k = (norm(part) for norm, part in zip(self._qk_norms, (q, k), strict=True))
        if spec.has_value_norm:
            v = F.rms_norm(v, v.shape[-1:], None, spec.norm_eps)
        if rotation is not None:
            q, k = rotation.apply(q), rotation.apply(k)
        q_HPK, k_HPK, v_HPK = (part.transpose(0, 1)[None] for part in (q, k, v))
        attended = F.scaled_dot_product_attention(q_HPK, k_HPK, v_HPK, scale=self._scale)[0]
        return self._output(attended.transpose(0, 1).flatten(1))

    def _mlp(self, x_PD: Tensor) -> Tensor:
        up_PF = self._up(x_PD)
        if self._gate is None:
            return self._down(self._activation(up_PF))
        return self._down(self._activation(self._gate(x_PD)) * up_PF)
