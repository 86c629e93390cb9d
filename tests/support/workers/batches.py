"""Build the arrays of one step from each request's computed tokens, scheduled tokens and blocks."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from engine.workers.batch import AttentionBatch


class Scheduled(NamedTuple):
    """One request in a step: tokens before it, tokens of it, and the ids of its blocks."""

    num_computed: int
    num_scheduled: int
    blocks: Sequence[int]


def attention_batch(requests: Sequence[Scheduled], block_size: int) -> AttentionBatch:
    """Lay the requests out one after the other."""
    width = max(len(request.blocks) for request in requests)
    block_table = np.zeros((len(requests), width), np.int32)
    lengths = np.array([r.num_computed + r.num_scheduled for r in requests], np.int32)
    slots = []
    for row, request in zip(block_table, requests, strict=True):
        row[: len(request.blocks)] = request.blocks
        positions = np.arange(request.num_computed, request.num_computed + request.num_scheduled)
        slots.append(row[positions // block_size] * block_size + positions % block_size)
    num_scheduled = [request.num_scheduled for request in requests]
    return AttentionBatch(
        query_start_loc=np.concatenate(([0], np.cumsum(num_scheduled))).astype(np.int32),
        seq_lens=lengths,
        block_table=block_table,
        slot_mapping=np.concatenate(slots).astype(np.int32),
        num_prompt_tokens=lengths,
    )


def positions(requests: Sequence[Scheduled]) -> torch.Tensor:
    """Return the position of each token of the step."""
    return torch.cat(
        [torch.arange(r.num_computed, r.num_computed + r.num_scheduled) for r in requests]
    )
