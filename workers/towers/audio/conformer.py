"""A conformer that reads log-mel features of audio clips, and a projector of queries or a decoder, in torch.

Shapes: C features of a row, P rows, D hidden size, H heads, K head dimension, B blocks, L rows of a block, Q queries of
a block, K outputs, R written tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.config.audio.tower import ConformerSpec
from ...loaders import Checkpoint
from ..image_tower import TowerSource
from ..projections.query_former import QueryFormer
from ..weights import Linear, VisionWeights
from .token_decoders import read_token_decoder

_NORM_EPS = 1e-5
_MARKER = "encoder.input_linear.weight"


class Conformer:
    """The conformer and the projector."""

    def __init__(self, spec: ConformerSpec, source: TowerSource) -> None:
        tensors, checkpoint = source.weights(_MARKER, spec.tensor_names), source.checkpoint
        self._spec = spec
        size, classes = spec.hidden_size, spec.num_classes
        self._input = tensors.read_linear("encoder.input_linear", size, spec.num_mel_bins)
        self._classes = tensors.read_linear("encoder.out", classes, size)
        self._from_classes = tensors.read_linear("encoder.out_mid", size, classes)
        self._layers = [_ConformerLayer(spec, tensors, index) for index in range(spec.num_layers)]
        self._projector = (
            read_token_decoder(spec.decoder, size, tensors, checkpoint, head="encoder.out")
            if spec.decoder is not None
            else _Projector(spec, tensors, checkpoint)
        )

    def __call__(self, features_CP: Tensor) -> Tensor:
        """Return the outputs [K, output size], or with a decoder the tokens [R, `TOKEN_FIELDS`]."""
        x_PD = self._input(features_CP.T)
        outputs = [x_PD]
        for number, layer in enumerate(self._layers, 1):
            x_PD = layer(x_PD)
            if number == len(self._layers) // 2:
                x_PD = x_PD + self._from_classes(self._classes(x_PD).softmax(-1))
            outputs.append(x_PD)
        read = [outputs[index] for index in self._spec.read_layers]
        return self._projector(torch.cat((*read, x_PD), 1))


class _ConformerLayer:
    def __init__(self, spec: ConformerSpec, tensors: VisionWeights, index: int) -> None:
        self._spec = spec
        self._halves = index in spec.halving_layers
        prefix = f"encoder.layers.{index}."
        size, inner = spec.hidden_size, spec.intermediate_size
        heads, channels = spec.num_heads * spec.head_dim, spec.conv_channels

        def linear(name: str, rows: int, columns: int, *, has_bias: bool = True) -> Linear:
            return tensors.read_linear(prefix + name, rows, columns, has_bias=has_bias)

        self._mlps = [
            (
                tensors.read_layer_norm(f"{prefix}ff{number}.pre_norm", size, _NORM_EPS),
                linear(f"ff{number}.up_proj", inner, size),
                linear(f"ff{number}.down_proj", size, inner),
            )
            for number in (1, 2)
        ]
        self._attention_norm = tensors.read_layer_norm(f"{prefix}attn.pre_norm", size, _NORM_EPS)
        self._query = linear("attn.to_q", heads, size, has_bias=False)
        if f"{prefix}attn.to_k.weight" in tensors:
            parts = [linear(f"attn.to_{name}", heads, size, has_bias=False) for name in "kv"]
            self._key_value = Linear.join(parts)
        else:
            self._key_value = linear("attn.to_kv", 2 * heads, size, has_bias=False)
        self._output = linear("attn.to_out", size, heads)
        distances = torch.arange(spec.block_rows)
        table = tensors.read(
            f"{prefix}attn.rel_pos_emb.weight", 2 * spec.max_distance + 1, spec.head_dim
        )
        self._distances_LLK = table[distances[:, None] - distances + spec.max_distance]
        self._conv_norm = tensors.read_layer_norm(f"{prefix}conv.norm", size, _NORM_EPS)
        self._up = linear("conv.up_conv", 2 * channels, size)
        self._taps = tensors.read(
            f"{prefix}conv.depth_conv.conv.weight", channels, 1, spec.kernel_size
        )
        self._batch_norm = read_batch_norm(tensors, f"{prefix}conv.batch_norm.", channels)
        self._down = linear("conv.down_conv", size, channels)
        self._norm = tensors.read_layer_norm(f"{prefix}post_norm", size, _NORM_EPS)

    def __call__(self, x_PD: Tensor) -> Tensor:
        x_PD = x_PD + 0.5 * self._mlp(x_PD, 0)
        x_PD = x_PD + self._attend(self._attention_norm(x_PD))
        convolved = self._convolve(self._conv_norm(x_PD))
        if self._halves:
            x_PD = x_PD[: len(x_PD) // 2 * 2].unflatten(0, (-1, 2)).mean(1)
        x_PD = x_PD + convolved[: len(x_PD)]
        return self._norm(x_PD + 0.5 * self._mlp(x_PD, 1))

    def _mlp(self, x_PD: Tensor, index: int) -> Tensor:
        norm, up, down = self._mlps[index]
        return down(F.silu(up(norm(x_PD))))

    def _attend(self, x_PD: Tensor) -> Tensor:
        spec = self._spec
        heads = (spec.num_heads, spec.head_dim)
        attended = []
        # Blocks are computed one by one, so that the last one has no other rows to attend to.
        for rows_LD in x_PD.split(spec.block_rows):
            length = len(rows_LD)
            q_HLK = self._query(rows_LD).unflatten(1, heads).transpose(0, 1)
            keys, values = self._key_value(rows_LD).chunk(2, 1)
            k_HLK, v_HLK = (part.unflatten(1, heads).transpose(0, 1) for part in (keys, values))
            distances = self._distances_LLK[:length, :length]
            bias = torch.einsum("hck,crk->hcr", q_HLK, distances) * spec.head_dim**-0.5
            out_HLK = F.scaled_dot_product_attention(q_HLK, k_HLK, v_HLK, attn_mask=bias)
            attended.append(out_HLK.transpose(0, 1).flatten(1))
        return self._output(torch.cat(attended))

    def _convolve(self, x_PD: Tensor) -> Tensor:
        before = self._spec.kernel_size // 2
        x = F.glu(self._up(x_PD), 1).T
        x = F.pad(x, (before, self._spec.kernel_size - 1 - before))
        x = F.conv1d(x[None], self._taps, stride=1 + self._halves, groups=len(self._taps))
        mean, variance, weight, bias = self._batch_norm
        x = F.silu(F.batch_norm(x, mean, variance, weight, bias, eps=_NORM_EPS))
        return self._down(x[0].T)


def read_batch_norm(tensors: VisionWeights, prefix: str, size: int) -> list[Tensor]:
    """Return the mean, the variance, the weight and the bias, each of shape [size]."""
    weight, bias = (tensors.read(prefix + name, size) for name in ("weight", "bias"))
    if f"{prefix}running_mean" in tensors:
        statistics = [tensors.read(f"{prefix}running_{name}", size) for name in ("mean", "var")]
    else:
        # In mmproj files, the weight and the bias contain them.
        statistics = [torch.zeros_like(bias), torch.full_like(bias, 1 - _NORM_EPS)]
    return [*statistics, weight, bias]


class _Projector:
    """Queries that attend to each other and to the rows of a block (BLIP-2, arXiv 2301.12597)."""

    def __init__(self, spec: ConformerSpec, tensors: VisionWeights, checkpoint: Checkpoint) -> None:
        self._spec = spec
        assert spec.queries is not None
        size = spec.queries.size
        self._queries_QD = tensors.read("projector.query", spec.outputs_per_block, size)
        self._former = QueryFormer(spec.queries, tensors, "projector.qformer.", checkpoint)
        self._output = tensors.read_linear("projector.linear", spec.output_size, size)

    def __call__(self, x_PD: Tensor) -> Tensor:
        length = self._spec.rows_per_query_block
        rows_BLD = F.pad(x_PD, (0, 0, 0, -len(x_PD) % length)).unflatten(0, (-1, length))
        queries_BQD = self._former(self._queries_QD.expand(len(rows_BLD), -1, -1), rows_BLD)
        return self._output(queries_BQD.flatten(0, 1)) * self._spec.output_scale
