"""Decode a whole batch, each step in a single call of the native program, or two with a grammar.

Shapes: S rows of the batch, K sampled tokens (one per row, or more with accepted drafts).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ...protocol.arrays import Float32Array, Int32Array
from ...protocol.config import SpeculativeConfig
from ..batch import PersistentBatch
from ..device.dtypes import AnyArray, address
from ..sampling import Grammar, Logprobs, SamplingMetadata
from .abi.structs import DecodeBatch
from .drafts import Drafts
from .program import NativeProgram
from .sampling import NativeSampler, RowsToSample


class Decoded(NamedTuple):
    """The sampled tokens, int32 [K]; `num_failed` of them are marks for tokens that could not be sampled.

    With drafts, `num_sampled_S` and `num_verified_S` are the numbers of sampled tokens and of verified drafts per row,
    int32 [S].
    """

    tokens_K: Int32Array
    num_failed: int
    logprobs: Logprobs | None
    num_sampled_S: Int32Array | None = None
    num_verified_S: Int32Array | None = None


class NativeDecoding:
    """Decodes requests directly in the arrays of the persistent batch, without building a step."""

    def __init__(
        self,
        program: NativeProgram,
        batch: PersistentBatch,
        kv_caches: Sequence[AnyArray],
        sampler: NativeSampler,
        speculative: SpeculativeConfig | None = None,
        adapter_by_slot: Int32Array | None = None,
        hidden_width: int = 0,
    ) -> None:
        self._program = program
        self._sampler = sampler
        self.drafts = None if speculative is None else Drafts(speculative, batch)
        self._max_rows = batch.num_slots + (0 if self.drafts is None else self.drafts.max_drafts)
        self._tokens = np.empty(self._max_rows, np.int32)
        self._num_sampled = np.empty(batch.num_slots, np.int32)
        self._num_verified = np.empty(batch.num_slots, np.int32)
        self.hidden_KE: Float32Array | None = None
        """The hidden states of the last step, if they are kept: for each row, its last token and its drafts."""
        if hidden_width:
            self.hidden_KE = np.empty((self._max_rows, hidden_width), np.float32)
        # Native code has only the addresses of these arrays, so keep the arrays alive.
        tables = batch.block_tables
        strides = np.array([table.shape[1] for table in tables], np.int64)
        self._kept = batch, kv_caches, adapter_by_slot, strides
        self._metadata: SamplingMetadata | None = None
        self._rows: RowsToSample | None = None
        self._batch = DecodeBatch(
            num_groups=len(tables),
            max_model_len=batch.token_ids_NL.shape[1],
            token_ids=address(batch.token_ids_NL),
            num_tokens=batch.num_tokens.ctypes.data,
            num_computed_tokens=batch.num_computed_tokens.ctypes.data,
            block_tables=(ctypes.c_void_p * len(tables))(*(table.ctypes.data for table in tables)),
            block_table_strides=strides.ctypes.data,
            kv_caches=(ctypes.c_void_p * len(kv_caches))(*map(address, kv_caches)),
            lookup=None if self.drafts is None else ctypes.pointer(self.drafts.lookup),
            tokens=self._tokens.ctypes.data,
            num_sampled=self._num_sampled.ctypes.data,
            num_verified=self._num_verified.ctypes.data,
            adapters=None if adapter_by_slot is None else adapter_by_slot.ctypes.data,
            rotary_offsets=None if batch.rotary is None else batch.rotary.offsets_N.ctypes.data,
            source_lens=batch.source_lens.ctypes.data,
            hidden=None if self.hidden_KE is None else self.hidden_KE.ctypes.data,
            hidden_stride=hidden_width,
        )

    def step(
        self,
        metadata: SamplingMetadata,
        num_drafts_S: Int32Array | None = None,
        await_grammar: Callable[[], Grammar | None] | None = None,
    ) -> Decoded:
        """Compute each request's last token and at most `num_drafts_S` drafts, and sample.

        The next step overwrites the result.

        Args:
            metadata: The sampling features of the rows.
            num_drafts_S: The number of drafts to verify per row, int32; None for none.
            await_grammar: Called for the bitmasks once the logits are computed.

        Raises:
            ValueError: A request's last token is not in the vocabulary, or its slot is full.
        """
        if metadata is not self._metadata:
            self._metadata = metadata
            self._batch.num_slots = len(metadata.slots_S)
            self._batch.slots = metadata.slots_S.ctypes.data
            self._rows = None
        if self._rows is None and not (metadata.takes_most_likely and await_grammar is None):
            self._rows = RowsToSample(self._sampler, metadata, self._max_rows)
        rows = self._rows
        self._batch.sampling = None if rows is None else rows.pointer
        self._batch.num_drafts = None if num_drafts_S is None else num_drafts_S.ctypes.data
        self._batch.chooses_later = await_grammar is not None
        num_failed = self._program.decode(self._batch)
        if num_failed < 0:
            raise ValueError(
                f"slots {metadata.slots_S.tolist()}: a slot's last token is not in the vocabulary, or the "
                "slot has reached max_model_len"
            )
        if await_grammar is not None:
            with self._sampler.limited_to(await_grammar()):
                num_failed = self._program.choose_tokens(self._batch)
        num_rows = len(metadata.slots_S)
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
