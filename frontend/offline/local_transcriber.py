"""Transcribe audio without a server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ...protocol.errors import EngineError, ParameterError
from ...protocol.sampling_params import SamplingParams
from ..chat.special_tokens import SpecialTokenGuard
from ..chat.template import ChatTemplate
from ..client.engine_client import Delta, RequestGroup, SequenceRequest
from ..media.audio.arrays import AudioArray, mono_samples
from ..media.audio.windows import Samples
from ..media.transcription.decoding import Submission
from ..media.transcription.options import TranscriptionOptions, verify_options, verify_transcribes
from ..media.transcription.transcriber import Transcript, make_transcriber
from .local_engine import LocalEngine

AudioClip: TypeAlias = str | Path | bytes | tuple[npt.ArrayLike, int]
"""The path or the content of an audio file, or samples of shape [N] or [N, channels] and their rate in Hz."""

CLIPS_AT_ONCE: Final = 4
"""Number of audio clips that are transcribed at the same time. Several windows of each are decoded at once."""


class LocalTranscriber:
    """Transcribes audio clips with the model of an engine in this process.

    Raises:
        ParameterError: The model does not transcribe.
    """

    def __init__(
        self, engine: LocalEngine, template: ChatTemplate | None, guard: SpecialTokenGuard
    ) -> None:
        self.speech = verify_transcribes(engine.config)
        self._engine = engine
        transcriber = make_transcriber(
            engine.config, engine.tokenizer, engine.client.executor, template, guard
        )
        if transcriber is None:
            raise ParameterError("model", "has no chat template, which it needs to transcribe")
        self._transcriber = transcriber
        engine.close_together(self._transcriber.close)

    def transcribe(
        self, clips: Sequence[AudioClip], options: TranscriptionOptions, numbers: Iterable[int]
    ) -> list[Transcript]:
        """Return the transcripts of audio clips, in their order. `numbers` yields the IDs of the requests.

        Raises:
            ParameterError: An audio clip cannot be read.
            EngineError: A window failed.
        """
        verify_options(options, self.speech)
        return self._engine.run(self._transcribe_all(clips, options, iter(numbers)))

    async def _transcribe_all(
        self, clips: Sequence[AudioClip], options: TranscriptionOptions, numbers: Any
    ) -> list[Transcript]:
        room = asyncio.Semaphore(CLIPS_AT_ONCE)

        async def transcribe(index: int, clip: AudioClip) -> Transcript:
            request_id = str(next(numbers))

            async def start(sequences: list[SequenceRequest]) -> RequestGroup:
                return await self._engine.client.submit(sequences, request_id=request_id)

            async with room:
                lora = self._engine.config.model.media_lora
                base = SequenceRequest(np.zeros(0, np.int32), SamplingParams(), lora=lora)
                opened = await self._open(clip, f"audio[{index}]")
                submission = Submission(base, start, _verify, self._engine.client.append_inputs)
                return await self._transcriber.transcribe(opened, options, submission)

        tasks = [asyncio.create_task(transcribe(*each)) for each in enumerate(clips)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _open(self, clip: AudioClip, where: str) -> Samples:
        limit = self._engine.config.frontend.max_audio_s
        if isinstance(clip, tuple):
            samples, rate = clip
            return AudioArray(
                await asyncio.to_thread(
                    mono_samples,
                    samples,
                    rate,
                    self.speech.sampling_rate,
                    where,
                    limit,
                    "max_audio_seconds",
                )
            )
        data = clip if isinstance(clip, bytes) else await asyncio.to_thread(_read, clip)
        return await self._transcriber.open(data, where, limit)


def _read(path: str | Path) -> bytes:
    return Path(path).read_bytes()


def _verify(delta: Delta) -> None:
    if delta.error is not None:
        raise EngineError(delta.error)
