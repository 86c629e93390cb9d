"""Steps in which every request of a batch decodes, each one call of the native program.

S rows of the batch, K tokens that they sample: one each, and more where drafts were right.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ...protocol.arrays import Int32Array
from ...protocol.config import SpeculativeConfig
from ..batch import PersistentBatch
from ..sampling import Logprobs, SamplingMetadata
from .drafts import Drafts
from .library import DecodeBatch
from .program import NativeProgram
from .sampling import NativeSampler, RowsToSample


class Decoded(NamedTuple):
    """What was sampled, or what is in its place, and how often that is: int32 [K]. And log-probabilities.

    With drafts also how many tokens each row sampled, and how many drafts of it were verified: int32 [S].
    """

    tokens_K: Int32Array
    num_failed: int
    logprobs: Logprobs | None
    num_sampled_S: Int32Array | None = None
    num_verified_S: Int32Array | None = None


class NativeDecoding:
    """Reads the persistent batch where it lies, and advances it."""

    def __init__(
        self,
        program: NativeProgram,
        batch: PersistentBatch,
        kv_caches: Sequence[Tensor],
        sampler: NativeSampler,
        speculative: SpeculativeConfig | None = None,
    ) -> None:
        self._program = program
        self._sampler = sampler
        self.drafts = None if speculative is None else Drafts(speculative, batch)
        self._most_rows = batch.num_slots + (0 if self.drafts is None else self.drafts.max_drafts)
        self._tokens = np.empty(self._most_rows, np.int32)
        self._num_sampled = np.empty(batch.num_slots, np.int32)
        self._num_verified = np.empty(batch.num_slots, np.int32)
        # The native side has addresses only.
        self._kept = batch, kv_caches
        self._metadata: SamplingMetadata | None = None
        self._rows: RowsToSample | None = None
        tables = batch.block_tables
        self._batch = DecodeBatch(
            num_groups=len(tables),
            max_model_len=batch.token_ids_NL.shape[1],
            token_ids=batch.token_ids_NL.data_ptr(),
            num_tokens=batch.num_tokens.ctypes.data,
            num_computed_tokens=batch.num_computed_tokens.ctypes.data,
            block_tables=(ctypes.c_void_p * len(tables))(*(table.ctypes.data for table in tables)),
            block_table_stride=tables[0].shape[1],
            kv_caches=(ctypes.c_void_p * len(kv_caches))(*(kv.data_ptr() for kv in kv_caches)),
            lookup=None if self.drafts is None else ctypes.pointer(self.drafts.lookup),
            tokens=self._tokens.ctypes.data,
            num_sampled=self._num_sampled.ctypes.data,
            num_verified=self._num_verified.ctypes.data,
        )

    def step(self, metadata: SamplingMetadata, num_drafts_S: Int32Array | None = None) -> Decoded:
        """Compute the last token of each row's request and at most `num_drafts_S` drafts, and sample; see `Decoded`.

        The next step overwrites it. Raises ValueError if a request has no last token in the vocabulary, or no room
        for the next.
        """
        if metadata is not self._metadata:
            self._metadata = metadata
            self._batch.num_slots = len(metadata.slots_S)
            self._batch.slots = metadata.slots_S.ctypes.data
            self._rows = self._sampler.rows(metadata, self._most_rows)
            self._batch.sampling = None if self._rows is None else self._rows.pointer
        self._batch.num_drafts = None if num_drafts_S is None else num_drafts_S.ctypes.data
        num_failed = self._program.decode(self._batch)
        if num_failed < 0:
            raise ValueError(
                f"slots {metadata.slots_S.tolist()}: the last token of one is not in the vocabulary, "
                "or it has reached max_model_len"
            )
        num_rows = len(metadata.slots_S)
        rows = self._rows
        if num_drafts_S is None:
            logprobs = None if rows is None else rows.logprobs()
            return Decoded(self._tokens[:num_rows], num_failed, logprobs)
        num_sampled_S = self._num_sampled[:num_rows]
        return Decoded(
            self._tokens[: num_sampled_S.sum()],
            num_failed,
            None if rows is None else rows.logprobs(num_sampled_S),
            num_sampled_S,
            self._num_verified[:num_rows],
        )
