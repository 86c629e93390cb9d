"""Read the windows of a clip with a model whose encoder writes the tokens of their texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from msgspec.structs import replace

from ....protocol.arrays import float32_view
from ....protocol.config.audio.processor import AudioProcessorConfig
from ....protocol.config.model import TOKEN_FIELDS
from ....protocol.encoder_inputs.inputs import EncoderInput
from ....protocol.pooling_params import PoolingKind, PoolingParams
from ...client.engine_client import Delta, PositionLogprobs
from ...tokenizer.tokenizer import Tokenizer
from ..audio.windows import Window
from .decoding import Deltas, Submission
from .options import TranscriptionOptions
from .segments import DecodedWindow
from .words import words_at

_POOLING: Final = PoolingParams(PoolingKind.ALL, True)


class WrittenTokens:
    """Reads the windows of one clip. Several may be read at the same time.

    Attributes:
        language: The language that the caller gave, because the model does not report it.
    """

    def __init__(
        self,
        audio: AudioProcessorConfig,
        tokenizer: Tokenizer,
        options: TranscriptionOptions,
        submission: Submission,
    ) -> None:
        self._audio = audio
        self._tokenizer = tokenizer
        self._options = options
        self.language = options.language
        self._submission = submission

    async def decode(
        self, window: Window, inputs: Sequence[EncoderInput], deltas: Deltas
    ) -> DecodedWindow:
        """Return the text of a window.

        Args:
            window: The window.
            inputs: The encoder input of the window.
            deltas: Receives the text, if the transcription is streamed.
        """
        try:
            decoded = await self._read(window, inputs)
            if self._options.is_streamed:
                deltas.put_nowait(Delta(decoded.text, decoded.token_ids, decoded.logprobs))
        finally:
            deltas.put_nowait(None)
        return decoded

    async def _read(self, window: Window, inputs: Sequence[EncoderInput]) -> DecodedWindow:
        request = replace(
            self._submission.base,
            prompt_token_ids=np.zeros(1, np.int32),
            encoder_inputs=list(inputs),
            pooling=_POOLING,
        )
        group = await self._submission.start([request])
        try:
            [delta] = await group.result()
            self._submission.verify(delta)
            tokens = float32_view(group.sequences[0].pooled).reshape(-1, TOKEN_FIELDS)
            tokens = tokens[~np.isin(tokens[:, 0], [*self._tokenizer.special_ids])]
        finally:
            group.abort()
        token_ids = tokens[:, 0].astype(int).tolist()
        logprobs = [
            PositionLogprobs(token, logprob, 1, [])
            for token, logprob in zip(token_ids, tokens[:, 1].tolist(), strict=True)
        ]
        audio = self._audio
        start = window.start / audio.sampling_rate
        duration = len(window.samples) / audio.sampling_rate
        # The last row may end after the window.
        times = np.minimum(tokens[:, 2:].astype(float) * audio.seconds_per_output, duration)
        return DecodedWindow(
            start=start,
            duration=duration,
            token_ids=token_ids,
            num_generated_tokens=len(token_ids),
            text=self._tokenizer.decode(token_ids),
            temperature=0.0,
            mean_logprob=float(tokens[:, 1].mean()) if len(tokens) else 0.0,
            logprobs=logprobs,
            words=words_at(token_ids, (start + times).tolist(), self._tokenizer)
            if self._options.has_words
            else [],
        )
