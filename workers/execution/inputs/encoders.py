"""The encoder inputs of a worker's requests, and the encoder outputs that the worker has cached.

Shapes: T tokens of a step, D hidden size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from ....protocol.arrays import Int32Array, int32_view
from ....protocol.checkpoint.vision.spec import VisionSpec
from ....protocol.config.audio.bases import AddedSpec
from ....protocol.encoder_inputs.inputs import EncoderInput
from ....protocol.errors import EngineError
from ....protocol.worker_messages import EncoderWork, NewRequestData
from ...batch import StepPlan
from ...device.dtypes import HostDevice, torch_device
from ...layers.spec import ModelSpec
from ...models.encoder import Encoder
from ...towers.placed import Placed
from .clip_parts import ClipParts
from .stored_encoder import StoredEncoder

_DTYPES: Final = ("float32", "float16", "bfloat16")


class Encoders:
    """Encodes inputs when a step requires it, and keeps the outputs until a later step frees them.

    Without an `encoder`, all inputs are embeddings, which are copied to `device`.

    Attributes:
        are_results: True if the output for an image is the result of its request, which has no text.
    """

    def __init__(
        self, encoder: Encoder | None, spec: ModelSpec, device: torch.device | HostDevice
    ) -> None:
        self._encoder = encoder
        self._stored = encoder if isinstance(encoder, StoredEncoder) else None
        self._hidden_size = spec.hidden_size
        # The outputs for later layers are all zero for audio and for embeddings that the client sent.
        self._padding = len(spec.added_after) * spec.hidden_size
        # Cross attention reads outputs, which do not replace embeddings. Others are results themselves.
        self.are_results = isinstance(spec.encoder, VisionSpec) and spec.encoder.stands_alone
        self._are_placed = spec.source is None and not self.are_results
        self._device = torch_device(device)
        self._inputs: dict[int, list[EncoderInput]] = {}
        self._ends: dict[int, int] = {}
        self._outputs: dict[bytes, torch.Tensor] = {}
        self._clips: ClipParts | None = None
        if isinstance(spec.audio_encoder, AddedSpec):
            # Imported here, because it imports all towers.
            from ...towers.audio_tower import AudioTower

            assert isinstance(encoder, AudioTower)
            self._clips = ClipParts(encoder)

    def add_requests(self, new_requests: Sequence[NewRequestData]) -> None:
        """Store the inputs of requests that get a slot."""
        for new in new_requests:
            if new.encoder_inputs:
                last = new.encoder_inputs[-1]
                self._inputs[new.slot] = new.encoder_inputs
                self._ends[new.slot] = last.position + last.num_tokens
                self._expect(
                    item
                    for item in new.encoder_inputs
                    if item.position + item.num_tokens > new.num_computed_tokens
                )

    def _expect(self, inputs: Iterable[EncoderInput]) -> None:
        """Start to read the stored outputs of inputs that will be encoded."""
        if self._stored is not None:
            for item in inputs:
                if not item.embeddings and item.content_hash not in self._outputs:
                    self._stored.expect(item.content_hash)

    def remove_request(self, slot: int) -> None:
        """Discard the inputs of a slot."""
        inputs = self._inputs.pop(slot, [])
        if self._clips is not None:
            self._clips.remove_clip(inputs)
        self._ends.pop(slot, None)

    def clear(self) -> None:
        """Discard all inputs and outputs, because the next core starts with an empty cache."""
        for slot in list(self._inputs):
            self.remove_request(slot)
        self._outputs.clear()

    def apply_work(self, work: EncoderWork) -> None:
        """Append inputs to those of slots and remove outputs from the cache, then encode inputs into it."""
        for slot, appended in work.appended:
            inputs = self._inputs[slot] = [*self._inputs.get(slot, ()), *appended]
            self._ends[slot] = inputs[-1].position + inputs[-1].num_tokens
        for content_hash in work.freed_hashes:
            del self._outputs[content_hash]
        computed = int32_view(work.computed).reshape(-1, 2).tolist()
        self._expect(self._inputs[slot][index] for slot, index in computed)
        for slot, index in computed:
            inputs = self._inputs[slot]
            item = inputs[index]
            if self._clips is not None:
                self._outputs[item.content_hash] = self._clips.encode(inputs, index)
            else:
                self._outputs[item.content_hash] = self._encode(item)

    def _encode(self, item: EncoderInput) -> torch.Tensor:
        """Return the embeddings of an input.

        Raises:
            EngineError: The input is damaged, or the model has no encoder for its kind.
        """
        if not item.embeddings:
            if self._encoder is None:
                raise EngineError(
                    "an encoder input has no embeddings, and the model has no encoder"
                )
            if self._stored is not None:
                rows = self._stored.encode(item.data, item.content_hash)
            else:
                rows = self._encoder.encode(item.data)
            return self._with_later_layers(rows)
        dtype: torch.dtype | None = None
        if item.embeddings in _DTYPES:
            dtype = getattr(torch, item.embeddings)
        if dtype is None or len(item.data) != item.size * self._hidden_size * dtype.itemsize:
            raise EngineError(
                f"an encoder input has {len(item.data)} bytes of {item.embeddings}, which do not match "
                f"{item.size} embeddings"
            )
        flat = torch.frombuffer(bytearray(item.data), dtype=dtype)
        return self._with_later_layers(flat.view(item.size, self._hidden_size).to(self._device))

    def _with_later_layers(self, rows: torch.Tensor) -> torch.Tensor:
        """Return outputs with those for later layers, which some have already."""
        if not self._padding or rows.shape[1] != self._hidden_size:
            return rows
        return torch.nn.functional.pad(rows, (0, self._padding))

    def warm_up(self) -> None:
        """Encode a dummy input, because kernels are prepared on first use."""
        if self._encoder is not None:
            self._encoder.warm_up()

    def close(self) -> None:
        """Complete the writes of outputs."""
        if self._stored is not None:
            self._stored.close()

    def find_result(self, slot: int) -> torch.Tensor | None:
        """Return the output that is the result of a slot's request; None if it has a text instead of an image."""
        inputs = self._inputs.get(slot, ())
        return self._outputs[inputs[0].content_hash] if inputs else None

    def output(self, content_hash: bytes) -> torch.Tensor:
        """Return the cached outputs of an input."""
        return self._outputs[content_hash]

    def are_read(self, slots_S: Int32Array, num_computed_N: Int32Array) -> bool:
        """Return whether the next token of any of the slots reads an encoder output."""
        return self._are_placed and any(
            True
            for slot in self._inputs.keys() & set(slots_S.tolist())
            for _ in self._read(slot, int(num_computed_N[slot]), int(num_computed_N[slot]) + 1)
        )

    def _read(self, slot: int, start: int, end: int) -> Iterator[EncoderInput]:
        """Yield the inputs of a slot for its tokens [start, end)."""
        if start >= self._ends.get(slot, 0):
            return
        inputs = self._inputs[slot]
        first = bisect_right(inputs, start, key=lambda item: item.position + item.num_tokens)
        for item in inputs[first:]:
            if item.position >= end:
                return
            yield item

    def place(self, plan: StepPlan) -> Placed | None:
        """Return the outputs that the step's tokens read, or None if they read none."""
        if not self._inputs or not self._are_placed:
            return None
        rows_T = np.full(len(plan.positions_T), -1, np.int32)
        parts: list[torch.Tensor] = []
        num_rows = 0
        for row, slot in enumerate(plan.slots_S.tolist()):
            start, end = int(plan.num_computed_S[row]), int(plan.seq_lens_S[row])
            for item in self._read(slot, start, end):
                first = max(start, item.position)
                last = min(end, item.position + item.num_tokens)
                token = int(plan.query_start_loc[row]) + first - start
                rows = output_rows(item, first - item.position, last - item.position)
                tokens = token + np.flatnonzero(rows >= 0)
                rows_T[tokens] = np.arange(num_rows, num_rows + len(tokens))
                parts.append(self._outputs[item.content_hash][rows[rows >= 0]])
                num_rows += len(tokens)
        if not parts:
            return None
        return Placed(rows_T, torch.cat(parts), are_added=self._clips is not None)


def output_rows(item: EncoderInput, first: int, last: int) -> NDArray[np.int64]:
    """For the tokens [first, last) of an input, return the output row of each, or -1 for separators."""
    tokens = np.arange(first, last)
    if item.kept:
        kept = np.frombuffer(item.kept, "<i4")
        return np.where(np.isin(tokens, kept), -1, tokens - np.searchsorted(kept, tokens))
    if not item.row_length:
        return tokens + item.first
    row, column = np.divmod(tokens, item.row_length + 1)
    return np.where(column == item.row_length, -1, tokens - row)
