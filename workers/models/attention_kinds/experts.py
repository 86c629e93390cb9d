"""Attention whose projections to queries and from outputs are those of experts (mixture of attention heads).

Shapes: T tokens of a step, D hidden size, E experts, C experts that a token chooses, A = T * C choices ordered by
expert, G key/value heads of this shard, H = G * C query heads, K head dimension, F = G * K.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....protocol.errors import ConfigError
from ...attention import AttentionBackend
from ...layers.layer_spec import LayerSpec
from ...layers.parallel.tensor_parallel import elements
from ...layers.specs.experts import ExpertsSpec
from ..experts.router import Router
from ..layer_source import LayerSource
from ..weights import Rows
from .kind import Attend, AttentionKind


class ExpertAttention(AttentionKind):
    """Attention in which each expert that a token chooses gives one query for each key/value head (JetMoe).

    All experts of a layer read the same keys and values. The output is the sum of the experts' outputs, times their
    weights (arXiv 2210.05144 and 2404.07413).

    Raises:
        ConfigError: More ranks than key/value heads divide the layer.
    """

    def __init__(self, layer: LayerSpec, source: LayerSource, backend: AttentionBackend) -> None:
        super().__init__(layer, source, backend)
        spec, weights, prefix, shard, kernels = source
        self._kernels = kernels
        self._head_dim = spec.head_dim
        heads, self._count = shard.kv_heads(spec), spec.num_attention_experts
        self._num_chosen = spec.num_heads // spec.num_kv_heads
        if len(shard.heads(spec)) != len(heads) * self._num_chosen:
            raise ConfigError(
                f"--tensor-parallel-size {shard.tensor_parallel.size}: at most {spec.num_kv_heads} ranks, the number of "
                "key/value heads, can divide the experts of attention"
            )
        size, part = spec.num_kv_heads * spec.head_dim, elements(heads, spec.head_dim)
        parts = [range(start + part.start, start + part.stop) for start in (0, size)]
        rows = [Rows(f"{prefix}kv_proj", 2 * size, each) for each in parts]
        self._keys_and_values = source.read_rows(rows, spec.hidden_size)
        described = ExpertsSpec(self._count, self._num_chosen, size)
        self._router = Router(
            described, spec.hidden_size, spec.vocab_size, weights, f"{prefix}router.", kernels
        )
        names = [f"{prefix}experts.{i}." for i in range(self._count)]
        hidden = spec.hidden_size
        self._queries = kernels.grouped_linear(
            [weights.read_matrix(f"{x}q_proj.weight", size, hidden, part=part) for x in names], []
        )
        self._outputs = kernels.grouped_linear(
            [
                weights.read_matrix(f"{x}o_proj.weight", hidden, size, part=part, dim=1)
                for x in names
            ],
            [],
        )
        self._bias_D = weights.read_vector(f"{prefix}experts.bias", hidden)

    def _compute(self, x_TD: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        kv_THK = self._keys_and_values(x_TD).unflatten(-1, (-1, self._head_dim))
        k_TGK, v_TGK = kv_THK.chunk(2, 1)
        experts_TC, weights_TC = self._router(x_TD, None)
        order = self._kernels.order_choices(experts_TC, self._count)
        q_AF = self._queries(x_TD.index_select(0, order.token_A), order.ends_E)
        q_TCGK = q_AF.index_select(0, order.place_A).view(
            len(x_TD), self._num_chosen, -1, self._head_dim
        )
        # The query heads of one key/value head are next to each other.
        q_THK = q_TCGK.transpose(1, 2).flatten(1, 2)
        attended_THK = attend(torch.cat((q_THK, k_TGK), 1), v_TGK)
        attended_TGCK = attended_THK.unflatten(1, (-1, self._num_chosen))
        attended_AF = attended_TGCK.transpose(1, 2).flatten(0, 1).flatten(1)[order.choice_A]
        y_AD = self._outputs(attended_AF, order.ends_E)
        y_TD = self._tensor_parallel.sum(self._kernels.combine(y_AD, order.place_A, weights_TC))
        return (y_TD + self._bias_D).to(y_TD.dtype)
