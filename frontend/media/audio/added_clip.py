"""Make encoder inputs of an audio clip whose outputs are added to all tokens, while the clip arrives."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

import msgspec
import numpy as np

from ....protocol.arrays import Float32Array, float32_bytes
from ....protocol.config.audio.processor import AddedAudioConfig, AudioProcessorConfig
from ....protocol.encoder_inputs.inputs import EncoderInput
from ....protocol.encoder_inputs.payloads import AudioPayload
from .log_mel import HOP, WINDOW, framed_log_mel

_encoder = msgspec.msgpack.Encoder()


class AddedClip:
    """An audio clip that is cut into encoder inputs as its samples arrive.

    The features of a frame depend on no later frames. So the inputs of a clip that arrives in pieces have the features
    of the whole clip. The content hash of an input covers the whole clip up to its end.

    Attributes:
        num_outputs: The number of outputs of all inputs so far.
    """

    def __init__(self, audio: AudioProcessorConfig, added: AddedAudioConfig) -> None:
        self._added = added
        self._num_mel_bins = audio.num_mel_bins
        self._hash = b""
        self._num_samples = 0
        self.num_outputs = 0
        # Frames are centered. So half of the first one precedes the silence before the clip.
        num_silent = added.samples_before + (WINDOW // 2 if audio.num_mel_bins else 0)
        self._kept = np.zeros(num_silent, np.float32)
        # The last frame of an output ends with the first samples of the next.
        self._shared = WINDOW - HOP if audio.num_mel_bins else 0

    def append(self, samples: Float32Array) -> list[EncoderInput]:
        """Return the inputs that are complete with the next samples of the clip."""
        self._num_samples += len(samples)
        self._kept = np.concatenate((self._kept, samples))
        num_outputs = (len(self._kept) - self._shared) // self._added.samples_per_output
        return list(self._take(max(num_outputs, 0)))

    def finish(self) -> list[EncoderInput]:
        """Return the inputs that are complete with the silence after the clip."""
        added = self._added
        missing = added.num_outputs(self._num_samples) - self.num_outputs
        num_needed = missing * added.samples_per_output + self._shared
        self._kept = np.pad(self._kept, (0, max(0, num_needed - len(self._kept))))
        return list(self._take(missing))

    def _take(self, num_outputs: int) -> Iterator[EncoderInput]:
        """Yield inputs with this number of outputs."""
        size = self._added.samples_per_output
        while num_outputs:
            count = min(num_outputs, self._added.outputs_per_part)
            features = self._kept[: count * size + self._shared]
            if self._num_mel_bins:
                features = framed_log_mel(features, self._num_mel_bins)
            num_frames = features.shape[-1]
            payload = AudioPayload(self._num_mel_bins, num_frames, float32_bytes(features))
            data = _encoder.encode(payload)
            self._hash = sha256(self._hash + data).digest()
            yield EncoderInput(self.num_outputs, count, self._hash, count, data)
            self._kept = self._kept[count * size :]
            self.num_outputs += count
            num_outputs -= count
