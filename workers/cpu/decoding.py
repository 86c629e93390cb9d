"""Steps in which every request of a batch decodes, each one call of the native program.

S rows of the batch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from ...protocol.arrays import Int32Array
from ..batch import PersistentBatch
from ..sampling import SamplingMetadata
from .library import DecodeBatch
from .program import NativeProgram
from .sampling import sampling_rows


class NativeDecoding:
    """Reads the persistent batch where it lies, and advances it."""

    def __init__(
        self, program: NativeProgram, batch: PersistentBatch, kv_caches: Sequence[Tensor]
    ) -> None:
        self._program = program
        self._tokens = np.empty(batch.num_slots, np.int32)
        # The native side has addresses only.
        self._kept = batch, kv_caches
        self._metadata: SamplingMetadata | None = None
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
            tokens=self._tokens.ctypes.data,
        )

    def step(self, metadata: SamplingMetadata) -> tuple[Int32Array, int]:
        """Return what each row samples, or what is in its place, and in how many rows that is: int32 [S].

        The next step overwrites it. Raises ValueError if a request has no last token in the vocabulary, or no room
        for the next.
        """
        if metadata is not self._metadata:
            self._metadata = metadata
            self._batch.num_slots = len(metadata.slots_S)
            self._batch.slots = metadata.slots_S.ctypes.data
            self._batch.sampling = None if metadata.is_greedy else sampling_rows(metadata)
            self._tokens_S = self._tokens[: len(metadata.slots_S)]
        num_failed = self._program.decode(self._batch)
        if num_failed < 0:
            raise ValueError(
                f"slots {metadata.slots_S.tolist()}: the last token of one is not in the vocabulary, "
                "or it has reached max_model_len"
            )
        return self._tokens_S, num_failed
