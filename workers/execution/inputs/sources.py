"""Fill the caches of cross attention with the keys and values of a source, when its request gets a slot.

Shapes: E outputs of an encoder, D hidden size.
"""

from __future__ import annotations

import numpy as np

from ....protocol.errors import EngineError
from ....protocol.pooling_params import PoolingKind
from ....protocol.worker_messages import SchedulerOutput
from ...batch import AttentionBatch, PersistentBatch
from ..kv_cache import KVCache
from ..model_loader import Model
from .alignment import Alignments
from .encoders import Encoders


class Sources:
    """Encodes the sources of requests that get a slot, and stores the keys, the values and the number of outputs."""

    def __init__(
        self,
        model: Model,
        batch: PersistentBatch,
        kv_cache: KVCache,
        encoders: Encoders,
        alignments: Alignments | None,
    ) -> None:
        self._alignments = alignments
        self._model = model
        self._batch = batch
        self._kv_cache = kv_cache
        self._encoders = encoders
        self._groups = sorted(model.spec.cross_groups)

    def store(self, output: SchedulerOutput) -> None:
        """Encode and store the sources of a step's new requests.

        Raises:
            EngineError: A request does not have exactly one source, or its size differs from the request's.
        """
        for new in output.new_requests:
            if len(new.encoder_inputs) != 1:
                raise EngineError(f"a request has {len(new.encoder_inputs)} sources, expected one")
            (item,) = new.encoder_inputs
            encoded_ED = self._encoders.output(item.content_hash)
            num_outputs = len(encoded_ED)
            if num_outputs != item.size:
                raise EngineError(f"a source has {num_outputs} outputs, expected {item.size}")
            self._batch.source_lens[new.slot] = num_outputs
            metadata = {
                group: self._kv_cache.storing_metadata(
                    group, place_outputs(self._batch, new.slot, group, range(num_outputs))
                )
                for group in self._groups
            }
            self._model.store_source(encoded_ED, self._kv_cache.layers, metadata)
            pooling = new.pooling_params
            if self._alignments is not None and pooling and pooling.kind is PoolingKind.ALIGNMENT:
                self._alignments.add_prompt(new.slot, pooling.num_frames, encoded_ED)


def place_outputs(batch: PersistentBatch, slot: int, group: int, outputs: range) -> AttentionBatch:
    """Return a plan that places some outputs of a slot's source into its blocks like tokens of a sequence."""
    length, block_size = len(outputs), batch.block_size
    table = batch.block_tables[group][slot : slot + 1]
    positions = np.arange(outputs.start, outputs.stop)
    slot_mapping = table[0, positions // block_size] * block_size + positions % block_size
    lens = np.array((length,), np.int32)
    return AttentionBatch(
        np.array((0, length), np.int32), lens, table, slot_mapping.astype(np.int32)
    )
