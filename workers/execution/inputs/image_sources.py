"""Store the keys and values of images for cross attention, when a request reaches them.

Shapes: E outputs of an encoder, D hidden size.
"""

from __future__ import annotations

from ....protocol.encoder_inputs.inputs import EncoderInput
from ....protocol.worker_messages import SchedulerOutput
from ...batch import PersistentBatch
from ..kv_cache import KVCache
from ..model_loader import Model
from .encoders import Encoders
from .sources import place_outputs


class ImageSources:
    """Stores the images that the next tokens of requests read.

    A token reads the last image before it, or at its position, and images directly before that. The scheduler begins a
    chunk at every image. So all tokens of a chunk read the same images.
    """

    def __init__(
        self, model: Model, batch: PersistentBatch, kv_cache: KVCache, encoders: Encoders
    ) -> None:
        self._model = model
        self._batch = batch
        self._kv_cache = kv_cache
        self._encoders = encoders
        self._groups = sorted(model.spec.cross_groups)
        self._waiting: dict[int, list[EncoderInput]] = {}

    def store(self, output: SchedulerOutput) -> None:
        """Store the images that the tokens of a step are the first to read."""
        batch = self._batch
        for new in output.new_requests:
            batch.source_lens[new.slot] = 0
            self._waiting[new.slot] = [
                item for item in new.encoder_inputs if item.read_until > new.num_computed_tokens
            ]
        if not any(self._waiting.values()):
            return
        for slot in batch.slots_of(output).tolist():
            waiting = self._waiting.get(slot, [])
            while waiting and waiting[0].position <= batch.num_computed_tokens[slot]:
                self._store(slot, waiting.pop(0))

    def _store(self, slot: int, item: EncoderInput) -> None:
        encoded_ED = self._encoders.output(item.content_hash)
        num_before = int(self._batch.source_lens[slot]) if item.follows else 0
        outputs = range(num_before, num_before + len(encoded_ED))
        metadata = {
            group: self._kv_cache.storing_metadata(
                group, place_outputs(self._batch, slot, group, outputs)
            )
            for group in self._groups
        }
        self._model.store_source(encoded_ED, self._kv_cache.layers, metadata)
        self._batch.source_lens[slot] = outputs.stop
