"""The encoder of an encoder-decoder model: from the data of an encoder input to its outputs.

Shapes: E outputs of an encoder, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from ....protocol.arrays import int32_view
from ....protocol.encoder_inputs.inputs import EncoderInput
from ....protocol.encoder_inputs.payloads import AudioPayload, TextPayload
from ....protocol.errors import EngineError
from ...batch import AttentionBatch
from ...cpu.decoder import NativeDecoder
from ...device.dtypes import torch_device, torch_dtype
from ...device.torch_threads import torch_threads
from ...device.transfers import to_device
from ...layers.spec import SourceSpec
from ...models.decoder import Decoder
from ...models.encoder import Encoder
from ...towers.placed import Placed
from .stem import AudioStem

P = TypeVar("P", AudioPayload, TextPayload)


class SourceEncoder:
    """Encodes one source at a time, so its numbers do not depend on other requests.

    Args:
        spec: The encoder and the convolutions before it.
        model: The encoder's layers, without a causal mask.
        stem: The convolutions; None for a source of tokens.
        num_threads: The threads with which torch computes the convolutions on a CPU.
        images: The tower for the images of a source of tokens; None if it has no images.
    """

    def __init__(
        self,
        spec: SourceSpec,
        model: Decoder | NativeDecoder,
        stem: AudioStem | None,
        num_threads: int = 1,
        images: Encoder | None = None,
    ) -> None:
        self._spec = spec
        self._model = model
        self._stem = stem
        self._images = images
        self._num_threads = num_threads
        attention = model.attention
        self._device = torch_device(attention.device)
        num_blocks = -(-spec.max_positions // attention.block_size)
        self._block_table = np.arange(1, num_blocks + 1, dtype=np.int32)[None]
        # A layer's keys and values are read by that layer only, so all of them share one cache.
        shape = attention.kv_cache_shape(num_blocks + 1)
        cache = torch.zeros(shape, dtype=torch_dtype(attention.dtype), device=self._device)
        self._kv_caches = [cache] * len(model.spec.layers)

    @torch.inference_mode()
    def encode(self, data: bytes) -> Tensor:
        """Return the outputs [E, D] for the data of an encoder input.

        Raises:
            EngineError: The data are invalid, which a correct frontend never sends.
        """
        if self._stem is not None:
            return self._run(self._convolve(self._stem, _decode(data, _decode_audio)))
        text = _decode(data, _decode_text)
        tokens = self._tokens(text)
        self._model.placed = self._place(text.images, len(tokens))
        try:
            return self._run(tokens)
        finally:
            self._model.placed = None

    def _place(self, images: Sequence[EncoderInput], num_tokens: int) -> Placed | None:
        """Return the embeddings of images that replace those of tokens; None without images."""
        if not images:
            return None
        if self._images is None:
            raise EngineError("a source has images, but the model has no vision tower")
        rows_T, parts, num_rows = np.full(num_tokens, -1, np.int32), [], 0
        for item in images:
            part = self._images.encode(item.data)
            end = item.position + item.num_tokens
            if not 0 <= item.position < end <= num_tokens or len(part) != item.num_tokens:
                raise EngineError(
                    f"an image with {len(part)} embeddings takes the tokens from {item.position} to {end} of a "
                    f"source with {num_tokens}"
                )
            rows_T[item.position : end] = np.arange(num_rows, num_rows + len(part))
            parts.append(part)
            num_rows += len(part)
        return Placed(rows_T, torch.cat(parts))

    def warm_up(self) -> None:
        """Encode a source of one output, because kernels are prepared on first use."""
        if self._images is not None:
            self._images.warm_up()
        if self._stem is None:
            self._run(torch.zeros(1, dtype=torch.int64, device=self._device))
        else:
            size = self._spec.hidden_size
            dtype = torch_dtype(self._model.hidden_dtype)
            self._run(torch.zeros((1, size), dtype=dtype, device=self._device))

    def _tokens(self, text: TextPayload) -> Tensor:
        if len(text.token_ids) % 4:
            raise EngineError(
                f"a source has {len(text.token_ids)} bytes, which is not a whole number of tokens"
            )
        token_ids = int32_view(text.token_ids)
        if not len(token_ids) or not 0 <= token_ids.min() <= token_ids.max() < self._vocab_size:
            raise EngineError(
                "an encoder input has no tokens, or has tokens outside the vocabulary"
            )
        return to_device(token_ids.astype(np.int64), self._device)

    @property
    def _vocab_size(self) -> int:
        return self._model.spec.vocab_size

    def _convolve(self, stem: AudioStem, clip: AudioPayload) -> Tensor:
        num_features = max(clip.num_mel_bins, 1)
        expected = num_features * clip.num_frames * (2 if clip.is_float16 else 4)
        if num_features != self._spec.num_inputs or len(clip.features) != expected:
            raise EngineError(
                f"an audio clip with {clip.num_frames} frames has {len(clip.features)} bytes for {num_features} "
                f"features, but the model reads {self._spec.num_inputs}"
            )
        with torch_threads(self._device, self._num_threads):
            return stem(clip)

    def _run(self, inputs: Tensor) -> Tensor:
        num_outputs = len(inputs)
        if not 0 < num_outputs <= self._spec.max_positions:
            raise EngineError(
                f"a source produces {num_outputs} outputs, but the model reads from 1 to "
                f"{self._spec.max_positions}"
            )
        attention = self._model.attention
        positions = np.arange(num_outputs, dtype=np.int32)
        ends = np.array((0, num_outputs), np.int32)
        batch = AttentionBatch(
            ends, ends[1:], self._block_table, positions + np.int32(attention.block_size)
        )
        metadata = [
            attention.build(batch, windows) for windows in self._model.spec.windows_by_group
        ]
        return self._model.forward(
            inputs, to_device(positions, self._device), self._kv_caches, metadata
        )


_decode_audio = msgspec.msgpack.Decoder(AudioPayload).decode
_decode_text = msgspec.msgpack.Decoder(TextPayload).decode


def _decode(data: bytes, decode: Callable[[bytes], P]) -> P:
    try:
        return decode(data)
    except msgspec.MsgspecError as error:
        raise EngineError(f"an encoder input is not what the model reads: {error}") from error
