"""Layers that tensor-parallel ranks divide: each rank's part of the weights, and the exchange of results.

Shapes: T tokens of a step, S of them sampled, D hidden size, I input features, O output features, V vocabulary, v this
rank's part of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

from ...loaders.quantization.matrix import Weight
from ...loaders.quantization.row_tables import RowTable
from ..layers import LayerKernels, Linear
from ..spec import ModelSpec
from .tensor_parallel import TensorParallel

_NEVER: Final = -1e30
"""The logit of a token that is never sampled."""


class RowParallelLinear:
    """Computes x_TI -> x @ weight.T + bias, where each rank has a part of the inputs.

    `adapt` changes the product of this rank's part.
    """

    def __init__(
        self,
        weight: Weight,
        bias_O: Tensor | None,
        tensor_parallel: TensorParallel,
        kernels: LayerKernels,
        adapt: Callable[[Linear], Linear] | None = None,
    ) -> None:
        is_alone = tensor_parallel.size == 1
        self.own = kernels.linear(weight, bias_O if is_alone else None)
        if adapt is not None:
            self.own = adapt(self.own)
        self._bias_O = None if is_alone else bias_O
        self._tensor_parallel = tensor_parallel

    def __call__(self, x: Any) -> Tensor:
        """Return the product, summed over the ranks."""
        y_TO = self._tensor_parallel.sum(self.own(x))
        return y_TO if self._bias_O is None else y_TO.add_(self._bias_O)


class VocabParallelEmbedding:
    """The embedding; each rank has the rows for a part of the vocabulary, which may stay quantized.

    `change` changes the outputs of this rank's part. The token ids that it gets count from the first token of the part.
    """

    def __init__(
        self,
        weight_vD: Tensor | RowTable,
        vocab_size: int,
        tensor_parallel: TensorParallel,
        change: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        self._weight_vD = weight_vD
        self._change = change
        # Ranks may share a row of a small table, which must not be added twice.
        self._vocabulary = tensor_parallel.own(vocab_size)
        self._tensor_parallel = tensor_parallel

    def __call__(self, input_ids_T: Tensor) -> Tensor:
        """Return the embeddings [T, D] of tokens, summed over the ranks."""
        return self._sum(input_ids_T, self._change)

    def base_rows(self, input_ids_T: Tensor) -> Tensor:
        """Return the embeddings [T, D] of tokens, summed over the ranks, without `change`."""
        return self._sum(input_ids_T, None)

    def mix(self, probabilities_KV: Tensor) -> Tensor:
        """Return the mean embeddings [K, D] of the tokens of distributions, summed over the ranks, without `change`."""
        assert isinstance(self._weight_vD, Tensor)
        part = self._vocabulary
        probabilities_Kv = probabilities_KV[:, part.start : part.stop].to(self._weight_vD.dtype)
        return self._tensor_parallel.sum(probabilities_Kv @ self._weight_vD[: len(part)])

    def _sum(self, input_ids_T: Tensor, change: Callable[[Tensor, Tensor], None] | None) -> Tensor:
        if self._tensor_parallel.size == 1:
            return self._own_rows(input_ids_T, change)
        index_T = input_ids_T - self._vocabulary.start
        is_elsewhere_T = (index_T < 0) | (index_T >= len(self._vocabulary))
        x_TD = self._own_rows(index_T.masked_fill_(is_elsewhere_T, 0), change)
        x_TD.masked_fill_(is_elsewhere_T.unsqueeze(1), 0)
        return self._tensor_parallel.sum(x_TD)

    def _own_rows(self, index_T: Tensor, change: Callable[[Tensor, Tensor], None] | None) -> Tensor:
        if isinstance(self._weight_vD, Tensor):
            x_TD = F.embedding(index_T, self._weight_vD)
        else:
            x_TD = self._weight_vD.rows(index_T)
        if change is not None:
            change(x_TD, index_T)
        return x_TD


class VocabParallelHead:
    """The output projection; each rank has the rows for a part of the vocabulary."""

    def __init__(
        self,
        weight: Weight,
        bias_v: Tensor | None,
        spec: ModelSpec,
        tensor_parallel: TensorParallel,
        kernels: LayerKernels,
    ) -> None:
        self._multiply = kernels.linear(weight, bias_v)
        self._parts = tensor_parallel.parts(spec.vocab_size)
        self._spec = spec
        self._tensor_parallel = tensor_parallel

    def logits(
        self, hidden_SD: Tensor, change: Callable[[Tensor, Tensor], None] | None = None
    ) -> Tensor:
        """Return all logits, float32 [S, V], on every rank.

        `change` changes this rank's part of the logits.
        """
        product_Sv = self._multiply(hidden_SD)
        if change is not None:
            change(product_Sv, hidden_SD)
        logits_SV = self._gather(product_Sv).float()
        if self._spec.logits_divisor != 1.0:
            logits_SV /= self._spec.logits_divisor
        if (cap := self._spec.final_softcap) is not None:
            logits_SV = logits_SV.div_(cap).tanh_().mul_(cap)
        return logits_SV

    def _gather(self, product_Sv: Tensor) -> Tensor:
        """Return the products of all ranks [S, V], which are sent without a change of dtype."""
        if self._tensor_parallel.size == 1:
            return product_Sv
        sizes = [len(part) for part in self._parts]
        products_RSv = self._tensor_parallel.stack(
            F.pad(product_Sv, (0, max(sizes) - product_Sv.shape[1]))
        )
        return torch.cat([x_Sv[:, :n] for x_Sv, n in zip(products_RSv, sizes, strict=True)], 1)


def unsampled_bias(spec: ModelSpec, part: range) -> Tensor:
    """Return a bias of a part of the vocabulary, float32, that makes the logits of these tokens very small."""
    ids, (start, stop) = torch.arange(part.start, part.stop), spec.silent_tokens
    is_last = ids >= spec.vocab_size - spec.num_unsampled
    return (is_last | ((ids >= start) & (ids < stop))) * _NEVER
