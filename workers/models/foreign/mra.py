"""The products of blocks that MRA (arXiv 2207.10284) computes by CUDA kernels in transformers, in torch.

Shapes: X texts times heads, N chosen pairs of blocks, Q blocks of queries, K blocks of keys, D elements of a head, B
tokens of a block. A chosen pair is the number q * K + k.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

import torch
from torch import Tensor

_LEAST: Final = -1e5
"""The maximum of the scores of a block of queries for which no block of keys is chosen."""


class BlockProducts:
    """The functions that transformers calls as kernels. The rows of scores [X, N, B, B] are those of keys."""

    @staticmethod
    def mm_to_sparse(q_XQDB: Tensor, k_XKDB: Tensor, pairs_XN: Tensor) -> Tensor:
        """Return the products of all tokens of the chosen pairs of blocks."""
        rows_X1 = torch.arange(len(pairs_XN), device=pairs_XN.device)[:, None]
        count = k_XKDB.shape[1]
        q_XNDB = q_XQDB[rows_X1, pairs_XN.long() // count]
        k_XNDB = k_XKDB[rows_X1, pairs_XN.long() % count]
        return k_XNDB.transpose(-1, -2) @ q_XNDB

    @staticmethod
    def sparse_dense_mm(
        scores_XNBB: Tensor, pairs_XN: Tensor, v_XKDB: Tensor, num_queries: int
    ) -> Tensor:
        """Return for each block of queries the sum of values [X, Q, D, B], weighted by scores."""
        rows_X1 = torch.arange(len(pairs_XN), device=pairs_XN.device)[:, None]
        count = v_XKDB.shape[1]
        products_XNDB = v_XKDB[rows_X1, pairs_XN.long() % count] @ scores_XNBB
        sums_XQDB = v_XKDB.new_zeros(len(v_XKDB), num_queries, *v_XKDB.shape[2:])
        blocks_XN = pairs_XN.long() // count
        return sums_XQDB.index_put((rows_X1, blocks_XN), products_XNDB, accumulate=True)

    @staticmethod
    def index_max(
        best_XBN: Tensor, pairs_XN: Tensor, num_queries: int, num_keys: int
    ) -> tuple[Tensor, Tensor]:
        """Return the maximum for each query [X, Q * B], and the same for each chosen pair [X, B, N]."""
        blocks_XBN = (pairs_XN.long() // num_keys)[:, None].expand_as(best_XBN)
        most_XBQ = best_XBN.new_full((*best_XBN.shape[:2], num_queries), _LEAST)
        most_XBQ = most_XBQ.scatter_reduce(2, blocks_XBN, best_XBN, "amax")
        return most_XBQ.transpose(1, 2).flatten(1), most_XBQ.gather(2, blocks_XBN)


def use_block_products() -> None:
    """Let transformers compute MRA by `BlockProducts`. Without kernels, it returns zeros as outputs of attention."""
    module: Any = importlib.import_module("transformers.models.mra.modeling_mra")
    module.mra_cuda_kernel = BlockProducts
