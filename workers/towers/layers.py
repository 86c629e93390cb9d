"""The layers of a vision or audio tower, and their implementation in torch.

Shapes: P patches of an image (with the class token), or rows of a clip; D hidden size of the tower, F intermediate
size, H heads, K head dimension, E experts of an MLP, N experts chosen for a patch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, Protocol, TypeAlias

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from .rotary import PatchRotary, PatchRotation
from .weights import Linear, Norm, activation

Windows: TypeAlias = Sequence[tuple[int, int]]
"""Pairs (number of windows, patches per window) for consecutive windows of the same size."""


class Patches(NamedTuple):
    """The rows and columns of patches, int64 [P, 2], and the windows within which they attend, or None.

    If `visible_P2` int64 is given, patches attend to those from its first to before its second number instead.
    """

    places_P2: Tensor | None = None
    windows: Windows | None = None
    visible_P2: Tensor | None = None


class LayersSpec(msgspec.Struct, frozen=True):
    """Layers of attention and an MLP, each after an optional norm. Optional parts exist if there are weights for them.

    If `norms_sums`, these norms follow the sums with the inputs instead. If `has_score_biases`, numbers that depend on
    the inputs are added to the scores of attention. If `has_first_biases`, each head adds a number to the scores of the
    first patch.

    The features are the hidden states after each of `feature_layers`, counted from 1; the largest is the last layer. If
    there are windows, patches attend within them, except in `full_layers`. Norms of queries and keys are over all heads
    together ("full") or per head ("head"). If `has_value_norm`, values are divided by their root mean square. If
    `has_gate`, MLPs compute down(activation(gate(x)) * up(x)). With a `gate_limit`, gate(x) is at most that, and up(x)
    is within plus or minus that. If `clips_products`, the inputs and outputs of all
    products are clipped to stored bounds. If `num_chosen`, the inner elements of an MLP are those of all its experts,
    and each patch passes through this many of them.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    head_dim: int
    feature_layers: tuple[int, ...]
    activation: str
    norm_kind: Literal["layer", "rms"] = "layer"
    norm_eps: float = 1e-6
    attention_scale: float = 0.0
    rotary: PatchRotary | None = None
    full_layers: tuple[int, ...] = ()
    qk_norm: Literal["full", "head"] | None = None
    has_value_norm: bool = False
    has_gate: bool = False
    clips_products: bool = False
    gate_limit: float = 0.0
    norms_sums: bool = False
    has_score_biases: bool = False
    has_first_biases: bool = False
    num_chosen: int = 0

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return self.feature_layers[-1]

    @property
    def scale(self) -> float:
        """The factor by which attention scores are multiplied."""
        return self.attention_scale or self.head_dim**-0.5


class Router(NamedTuple):
    """Scores the experts of an MLP: the weights [E, D], and the numbers [E] by which chosen experts are preferred."""

    weight_ED: Tensor
    bias_E: Tensor


class LayerWeights(msgspec.Struct):
    """The weights of a layer. `qkv` is one product, or three if products are clipped.

    `score_bias` returns what is added to the scores [H, P, P] of inputs [P, D], and `first_bias_H` is added to those of
    the first patch.
    """

    attention_norm: Norm | None
    qkv: list[Linear]
    output: Linear
    mlp_norm: Norm | None
    gate: Linear | None
    up: Linear
    down: Linear
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    attention_output_norm: Norm | None = None
    mlp_output_norm: Norm | None = None
    score_bias: Callable[[Tensor], Tensor] | None = None
    first_bias_H: Tensor | None = None
    router: Router | None = None


class Layers(Protocol):
    """Computes the layers of a tower. `TorchLayers` and the native program implement this protocol."""

    def __call__(self, x_PD: Tensor, patches: Patches) -> dict[int, Tensor]:
        """Return the hidden states [P, D] after each of the feature layers."""


MakeLayers: TypeAlias = Callable[[LayersSpec, Iterable[LayerWeights]], Layers]


class TorchLayers:
    """Computes the layers of a tower in torch."""

    def __init__(self, spec: LayersSpec, layers: Iterable[LayerWeights]) -> None:
        self._spec = spec
        self._layers = [_TorchLayer(spec, weights) for weights in layers]

    def __call__(self, x_PD: Tensor, patches: Patches) -> dict[int, Tensor]:
        """Return the hidden states [P, D] after each of the feature layers."""
        spec = self._spec
        rotation: PatchRotation | None = None
        if spec.rotary is not None and patches.places_P2 is not None:
            rotation = spec.rotary.rotation(patches.places_P2, x_PD.dtype)
        whole: Windows = [(1, len(x_PD))]
        mask_PP: Tensor | None = None
        if patches.visible_P2 is not None:
            at, (first_P, end_P) = torch.arange(len(x_PD), device=x_PD.device), patches.visible_P2.T
            mask_PP = (at >= first_P[:, None]) & (at < end_P[:, None])
        features = {}
        for number, layer in enumerate(self._layers, 1):
            attends_all = patches.windows is None or number in spec.full_layers
            windows = whole if patches.windows is None or attends_all else patches.windows
            x_PD = layer(x_PD, rotation, windows, mask_PP)
            if number in spec.feature_layers:
                features[number] = x_PD
        return features


class _TorchLayer:
    def __init__(self, spec: LayersSpec, weights: LayerWeights) -> None:
        self._spec, self._weights = spec, weights
        self._activation = activation(spec.activation)

    def __call__(
        self,
        x_PD: Tensor,
        rotation: PatchRotation | None,
        windows: Windows,
        mask_PP: Tensor | None,
    ) -> Tensor:
        weights = self._weights
        if self._spec.norms_sums:
            assert weights.attention_norm is not None
            assert weights.mlp_norm is not None
            x_PD = weights.attention_norm(x_PD + self._attend(x_PD, rotation, windows, mask_PP))
            return weights.mlp_norm(x_PD + self._mlp(x_PD))
        normed = x_PD if weights.attention_norm is None else weights.attention_norm(x_PD)
        output = self._attend(normed, rotation, windows, mask_PP)
        if weights.attention_output_norm is not None:
            output = weights.attention_output_norm(output)
        x_PD = x_PD + output
        output = self._mlp(x_PD if weights.mlp_norm is None else weights.mlp_norm(x_PD))
        if weights.mlp_output_norm is not None:
            output = weights.mlp_output_norm(output)
        return x_PD + output

    def _attend(
        self,
        x_PD: Tensor,
        rotation: PatchRotation | None,
        windows: Windows,
        mask_PP: Tensor | None,
    ) -> Tensor:
        spec, weights = self._spec, self._weights
        parts = [linear(x_PD) for linear in weights.qkv]
        q, k, v = parts if len(parts) == 3 else parts[0].chunk(3, -1)
        if spec.qk_norm == "full":
            q, k = self._normed(q, k)
        q, k, v = (part.unflatten(-1, (spec.num_heads, -1)) for part in (q, k, v))
        bias = mask_PP if weights.score_bias is None else weights.score_bias(x_PD)
        if spec.qk_norm == "head":
            q, k = self._normed(q, k)
        if spec.has_value_norm:
            v = F.rms_norm(v, v.shape[-1:], None, spec.norm_eps)
        if rotation is not None:
            q, k = rotation.apply(q), rotation.apply(k)
        if weights.first_bias_H is not None:
            q, k = _with_first_bias(q, k, weights.first_bias_H / spec.scale)
        attended = []
        start = 0
        for count, length in windows:
            window = slice(start, start + count * length)
            start = window.stop
            q_HPK, k_HPK, v_HPK = (
                part[window].unflatten(0, (count, length)).transpose(1, 2) for part in (q, k, v)
            )
            out = F.scaled_dot_product_attention(
                q_HPK, k_HPK, v_HPK, attn_mask=bias, scale=spec.scale
            )
            attended.append(out.transpose(1, 2).reshape(count * length, -1))
        return weights.output(attended[0] if len(attended) == 1 else torch.cat(attended))

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        assert self._weights.query_norm is not None
        assert self._weights.key_norm is not None
        return self._weights.query_norm(q), self._weights.key_norm(k)

    def _mlp(self, x_PD: Tensor) -> Tensor:
        weights = self._weights
        if weights.router is not None:
            return self._mix_experts(x_PD, weights.router)
        up_PF = weights.up(x_PD)
        if weights.gate is None:
            return weights.down(self._activation(up_PF))
        gate_PF = weights.gate(x_PD)
        if limit := self._spec.gate_limit:
            gate_PF, up_PF = limited(gate_PF, up_PF, limit)
        return weights.down(self._activation(gate_PF) * up_PF)

    def _mix_experts(self, x_PD: Tensor, router: Router) -> Tensor:
        """Return the mean of the outputs of each patch's experts, weighted by their scores."""
        weights, num_experts = self._weights, len(router.weight_ED)
        assert weights.gate is not None
        num_chosen = min(self._spec.num_chosen, num_experts)
        scores_PE = F.linear(x_PD.float(), router.weight_ED.float()).sigmoid()
        chosen_PN = (scores_PE + router.bias_E.float()).topk(num_chosen).indices
        factors_PN = scores_PE.gather(1, chosen_PN)
        factors_PN = (factors_PN / factors_PN.sum(1, keepdim=True)).to(x_PD.dtype)
        experts = zip(
            weights.gate.split(num_experts),
            weights.up.split(num_experts),
            weights.down.weight.chunk(num_experts, 1),
            strict=True,
        )
        mixed_PD = torch.zeros_like(x_PD)
        for number, (gate, up, down_DF) in enumerate(experts):
            at, choice = (chosen_PN == number).nonzero(as_tuple=True)
            own = x_PD[at]
            output = F.linear(self._activation(gate(own)) * up(own), down_DF)
            mixed_PD[at] += output * factors_PN[at, choice, None]
        return mixed_PD


def _with_first_bias(q: Tensor, k: Tensor, bias_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys with another element, whose product is the bias of the first patch.

    A mask with the biases would be as many times larger as there are heads.
    """
    size = q.shape[-1]
    # Kernels of GPUs need a multiple of 8 elements.
    q, k = F.pad(q, (0, 8)), F.pad(k, (0, 8))
    q[..., size] = 1
    k[0, :, size] = bias_H
    return q, k


def limited(gate_PF: Tensor, up_PF: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Return the gates of an MLP and their other factors, limited by `limit`."""
    return gate_PF.clamp(max=limit), up_PF.clamp(-limit, limit)
