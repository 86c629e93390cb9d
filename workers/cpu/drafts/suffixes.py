"""The memory of suffix drafts: for each request, chains of places with equal contexts, and recent answers of all."""

from __future__ import annotations

import ctypes
from collections import deque
from typing import Final

import numpy as np

from ....protocol.arrays import Int32Array, Int64Array
from ....protocol.config import SpeculativeConfig
from ...batch import PersistentBatch
from ..abi.structs import Suffixes
from ..library import native_library

_NUM_BUCKETS: Final = 1 << 13
_HISTORY_BUCKETS: Final = 1 << 17
_HISTORY_TOKENS: Final = 1 << 20
"""Maximum number of tokens in stored answers, which take 13 MiB."""


class SuffixStore:
    """The arrays of `csrc/sampling/suffixes.h`, which have a fixed size.

    The chains of a slot take 4 bytes per token of the request. Pages that were never written take no memory.
    """

    def __init__(self, config: SpeculativeConfig, batch: PersistentBatch) -> None:
        self._batch = batch
        self._remember = native_library().engine_remember_answer
        num_slots = batch.num_slots
        self._heads: Int32Array = np.zeros((num_slots, _NUM_BUCKETS), np.int32)
        self._previous: Int32Array = np.zeros((num_slots, batch.max_model_len), np.int32)
        self._num_indexed: Int32Array = np.zeros(num_slots, np.int32)
        self._source_distance: Int32Array = np.zeros(num_slots, np.int32)
        self._source_length: Int32Array = np.zeros(num_slots, np.int32)
        self._max_answers = config.suffix_decoding_max_cached_requests
        self._starts: deque[int] = deque()
        size, buckets = (_HISTORY_TOKENS, _HISTORY_BUCKETS) if self._max_answers else (0, 0)
        self._tokens: Int32Array = np.zeros(size, np.int32)
        self._history_previous: Int64Array = np.zeros(size, np.int64)
        self._history_heads: Int64Array = np.zeros(buckets, np.int64)
        self.suffixes = Suffixes(
            context_length=config.prompt_lookup_min,
            longest_match=config.suffix_decoding_max_tree_depth,
            drafts_per_match=config.suffix_decoding_max_spec_factor,
            least_share=config.suffix_decoding_min_token_prob,
            num_buckets=_NUM_BUCKETS,
            history_buckets=buckets,
            heads=self._heads.ctypes.data,
            previous=self._previous.ctypes.data,
            num_indexed=self._num_indexed.ctypes.data,
            source_distance=self._source_distance.ctypes.data,
            source_length=self._source_length.ctypes.data,
            history_size=size,
            history_tokens=self._tokens.ctypes.data,
            history_previous=self._history_previous.ctypes.data,
            history_heads=self._history_heads.ctypes.data,
        )

    def add_request(self, slot: int) -> None:
        """Empty the chains of a slot, which has a new request."""
        self._heads[slot] = 0
        self._num_indexed[slot] = self._source_distance[slot] = 0

    def keep_answer(self, slot: int) -> None:
        """Add the output of a request that leaves its slot to the stored answers, removing the oldest if necessary."""
        first, end = self._batch.num_prompt_tokens[slot], self._batch.num_tokens[slot]
        count = int(end - first)
        if count <= self.suffixes.context_length or not self._max_answers:
            return
        self._starts.append(int(self.suffixes.history_end))
        row = self._batch.host_token_ids_NL[slot, first:end]
        self._remember(ctypes.byref(self.suffixes), row.ctypes.data, count)
        while (
            len(self._starts) > self._max_answers
            or self._starts[0] < self.suffixes.history_end - _HISTORY_TOKENS
        ):
            self._starts.popleft()
        self.suffixes.history_begin = self._starts[0]
