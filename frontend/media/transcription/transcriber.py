"""Transcribe audio: cut it into windows, decode several windows at the same time, and join their texts in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeAlias

import numpy as np

from ....protocol.arrays import Float32Array, float32_bytes
from ....protocol.config import EngineConfig
from ....protocol.config.audio.processor import SpeechKind
from ....protocol.config.chat_audio import ChatAudioConfig
from ....protocol.encoder_inputs.inputs import EncoderInput
from ....protocol.encoder_inputs.payloads import AudioPayload
from ....protocol.errors import ParameterError
from ...chat.special_tokens import SpecialTokenGuard
from ...chat.template import ChatTemplate
from ...client.encoder_inputs import encoder_source
from ...client.engine_client import PositionLogprobs
from ...client.executor import ThreadExecutor
from ...tokenizer.tokenizer import Tokenizer
from ..audio.added_clip import AddedClip
from ..audio.clips import prepare_clip
from ..audio.live_samples import LiveSamples
from ..audio.log_mel import (
    log_mel,
    medical_log_mel,
    normed_log_mel,
    paired_kaldi_log_mel,
    paired_log_mel_changes,
    standardized,
    standardized_kaldi_log_mel,
)
from ..audio.windows import Samples, Window, Windows
from ..decoding.messages import OpenAudio
from ..decoding.processes import MediaProcesses
from ..sources.media_urls import MediaUrls
from .chat_prompt import ChatPrompts
from .decoder_prompt import DecoderPrompts
from .decoding import Deltas, Prompts, Submission, WindowDecoder
from .live import LiveDecoder
from .options import SpeechModel, TranscriptionOptions, speech_model
from .segments import DecodedWindow, Segment, Turn, Word, separator, split_segments
from .written_tokens import WrittenTokens

WINDOWS_AT_ONCE: Final = 8
"""Maximum windows of one clip that are decoded at the same time. The limit bounds the memory of long audio clips."""

MAX_WINDOWS: Final = 32
"""Windows of all audio clips that are decoded at the same time. One of 30 s takes 3 MB."""

MAX_LONG_WINDOWS: Final = 4
"""The same for windows of more than a minute, of which one clip has a single one at the same time."""

MAX_CLIPS: Final = 8
"""Number of files that are read at the same time, each in its own process. A short file is read in one call."""

_normed: Final = partial(normed_log_mel, has_dither=False)

_FEATURES: Final[dict[SpeechKind, Callable[[Float32Array, int], Float32Array]]] = {
    SpeechKind.SPEECH_TO_TEXT: standardized_kaldi_log_mel,
    SpeechKind.COHERE: normed_log_mel,
    SpeechKind.CANARY: _normed,
    SpeechKind.PARAKEET_CTC: _normed,
    SpeechKind.PARAKEET_RNNT: _normed,
    SpeechKind.PARAKEET_TDT: _normed,
    SpeechKind.GRANITE_CTC: paired_log_mel_changes,
    SpeechKind.WAV2VEC2_BERT: paired_kaldi_log_mel,
    SpeechKind.SEAMLESS: paired_kaldi_log_mel,
    SpeechKind.SEAMLESS_2: paired_kaldi_log_mel,
    SpeechKind.LASR_CTC: medical_log_mel,
}
"""Functions of a window and the number of features. Others read Whisper's features, or samples."""

TextReceiver: TypeAlias = Callable[[str, list[PositionLogprobs]], Awaitable[None]]
"""Function that receives a piece of text and the log-probabilities of its tokens."""

TurnReceiver: TypeAlias = Callable[[int, float, float, str], Awaitable[None]]
"""Function that receives a speaker's number, the start and the end of a turn in seconds, and its words."""


@dataclass(slots=True)
class Transcript:
    """The transcript of one clip.

    Attributes:
        language: The code of the spoken language.
        duration: The length of the clip in seconds.
        text: The text.
        segments: The segments, if they were requested.
        words: The words, if they were requested.
        logprobs: The log-probability of each token of the text.
        num_prompt_tokens: The tokens of all prompts; known to servers only.
        num_generated_tokens: The tokens that were generated for the text, with timestamps and ends.
    """

    language: str = ""
    duration: float = 0.0
    text: str = ""
    segments: list[Segment] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0


@dataclass(slots=True)
class _Job:
    """A window that is being decoded, with its text so far if the transcription is streamed."""

    window: Window
    task: asyncio.Task[DecodedWindow | None]
    deltas: Deltas


class _CountedAudio:
    """An audio clip that counts as being read until it ends or is closed.

    It may be read in any thread, and is created on the event loop.
    """

    def __init__(self, clip: Samples, room: asyncio.Semaphore) -> None:
        self._clip = clip
        self._room: asyncio.Semaphore | None = room
        self._loop = asyncio.get_running_loop()

    def read(self, num_samples: int) -> Float32Array:
        """Return at least this many of the next samples, or fewer at the end."""
        samples = self._clip.read(num_samples)
        if len(samples) < num_samples:
            self._loop.call_soon_threadsafe(self._leave)
        return samples

    def close(self) -> None:
        """Release what is held for the rest of the clip. It must be called on the event loop."""
        self._clip.close()
        self._leave()

    def _leave(self) -> None:
        if self._room is not None:
            self._room.release()
            self._room = None


class Transcriber:
    """Transcribes audio clips with one model. Files are decoded in separate processes."""

    def __init__(
        self,
        speech: SpeechModel,
        prompts: Prompts,
        chat_audio: ChatAudioConfig | None,
        tokenizer: Tokenizer,
        executor: ThreadExecutor,
        urls: MediaUrls,
    ) -> None:
        self.urls = urls
        self._speech, self._prompts = speech, prompts
        self._time_precision = 0.0 if speech.audio is None else speech.audio.time_precision
        self._chat_audio = chat_audio
        self._tokenizer = tokenizer
        self._processes = MediaProcesses()
        self._executor = executor.create_separate()
        self._room_for_clips = asyncio.Semaphore(MAX_CLIPS)
        is_long = speech.window_seconds > 60
        self._windows_at_once = 1 if is_long else WINDOWS_AT_ONCE
        self._room_for_windows = asyncio.Semaphore(MAX_LONG_WINDOWS if is_long else MAX_WINDOWS)

    @property
    def is_live(self) -> bool:
        """True if the model writes text while a clip arrives."""
        return self._speech.audio is not None and self._speech.audio.added is not None

    def start(self) -> None:
        """Start the decoder processes, so that the first file does not have to wait for them."""
        self._processes.start()

    def close(self) -> None:
        """Stop the decoder processes and threads."""
        self._processes.close()
        self._executor.close()
        self.urls.close()

    async def open(self, data: bytes, where: str, max_seconds: float) -> Samples:
        """Open an audio file in a separate process, as mono samples, once the limits allow one more file.

        It must be closed.

        Raises:
            ParameterError: The file cannot be read, or is too long; `where` names the field.
        """
        opening = OpenAudio(where, self._speech.sampling_rate, max_seconds)
        await self._room_for_clips.acquire()
        try:
            clip = await self._executor.in_thread(self._processes.open_audio, data, opening)
        except BaseException:
            self._room_for_clips.release()
            raise
        return _CountedAudio(clip, self._room_for_clips)

    async def transcribe(
        self,
        clip: Samples | LiveSamples,
        options: TranscriptionOptions,
        submission: Submission,
        on_text: TextReceiver | None = None,
        on_turn: TurnReceiver | None = None,
    ) -> Transcript:
        """Return the transcript of an audio clip.

        Args:
            clip: The clip, which is closed afterwards. A model must be able to read live samples (see `is_live`).
            options: The options of the transcription.
            submission: A function that submits sequences to the engine.
            on_text: Receives the text as it is generated.
            on_turn: Receives the turns of speakers as they end.

        Raises:
            ParameterError: The clip is damaged or too long.
            ClipDropped: The live samples were dropped.
        """
        if isinstance(clip, LiveSamples):
            return await self._transcribe_live(clip, options, submission, on_text)
        decoder = self._decoder(options, submission)
        transcript = Transcript()
        try:
            async with aclosing(self._jobs(clip, decoder)) as jobs:
                async for job in jobs:
                    is_begun = False
                    while (delta := await job.deltas.get()) is not None:
                        if isinstance(delta, Turn):
                            if on_turn is not None:
                                seconds = len(job.window.samples) / self._speech.sampling_rate
                                await on_turn(delta.speaker, *delta.times(seconds), delta.text)
                            continue
                        text = delta.text
                        if text and not is_begun:
                            text = separator(transcript.text, text) + text
                            is_begun = True
                        if on_text is not None:
                            await on_text(text, list(delta.logprobs or ()))
                    decoded = await job.task
                    num_samples = job.window.start + len(job.window.samples)
                    transcript.duration = num_samples / self._speech.sampling_rate
                    if options.has_speakers and job.window.start:
                        raise ParameterError(
                            "response_format",
                            "must not be diarized_json for this clip: the model knows a speaker again only within "
                            f"{self._speech.window_seconds:.0f} s",
                        )
                    if decoded is not None:
                        transcript.language = transcript.language or decoded.language
                        self._append(transcript, decoded, options)
        finally:
            clip.close()
        transcript.language = decoder.language or transcript.language
        transcript.text = transcript.text.strip()
        return transcript

    def _decoder(
        self, options: TranscriptionOptions, submission: Submission
    ) -> WindowDecoder | WrittenTokens:
        audio = self._speech.audio
        if audio is not None and audio.writes_tokens:
            return WrittenTokens(audio, self._tokenizer, options, submission)
        return WindowDecoder(self._speech, self._prompts, self._tokenizer, options, submission)

    async def _transcribe_live(
        self,
        samples: LiveSamples,
        options: TranscriptionOptions,
        submission: Submission,
        on_text: TextReceiver | None,
    ) -> Transcript:
        prompts, audio = self._prompts, self._speech.audio
        assert isinstance(prompts, DecoderPrompts)
        assert audio is not None
        assert audio.added is not None
        decoder = LiveDecoder(prompts, audio.added, options, submission, on_text, self._executor)
        await decoder.decode(samples)
        return Transcript(
            duration=decoder.num_samples / self._speech.sampling_rate,
            text=prompts.text(decoder.token_ids).strip(),
            logprobs=decoder.logprobs,
            num_generated_tokens=len(decoder.token_ids),
        )

    async def _jobs(
        self, clip: Samples, decoder: WindowDecoder | WrittenTokens
    ) -> AsyncGenerator[_Job]:
        """Yield the windows of an audio clip in order, while later windows are already being decoded."""
        windows = Windows(clip, self._speech.sampling_rate, self._speech.window_seconds)
        queue: asyncio.Queue[_Job | None] = asyncio.Queue()
        room = asyncio.Semaphore(self._windows_at_once)
        num_held = 0
        tasks: list[asyncio.Task[DecodedWindow | None]] = []

        def release() -> None:
            nonlocal num_held
            num_held -= 1
            self._room_for_windows.release()

        async def produce() -> None:
            nonlocal num_held
            try:
                while True:
                    await room.acquire()
                    await self._room_for_windows.acquire()
                    num_held += 1
                    window = await self._executor.in_thread(windows.next_window)
                    if window is None:
                        return
                    inputs = await self._executor.in_thread(self._encode, window.samples)
                    if isinstance(decoder, WindowDecoder) and decoder.needs_language:
                        await decoder.detect_language(inputs)
                    deltas: Deltas = asyncio.Queue()
                    task = asyncio.create_task(decoder.decode(window, inputs, deltas))
                    tasks.append(task)
                    queue.put_nowait(_Job(window, task, deltas))
            finally:
                queue.put_nowait(None)

        producer = asyncio.create_task(produce())
        try:
            while (job := await queue.get()) is not None:
                yield job
                tasks.remove(job.task)
                release()
                room.release()
            await producer
        finally:
            for task in (producer, *tasks):
                task.cancel()
            try:
                await asyncio.gather(producer, *tasks, return_exceptions=True)
            finally:
                while num_held:
                    release()

    def _encode(self, samples: Float32Array) -> list[EncoderInput]:
        audio = self._speech.audio
        if audio is None:
            assert self._chat_audio is not None
            return prepare_clip(samples, self._chat_audio, "file").inputs
        if audio.added is not None:
            clip = AddedClip(audio, audio.added)
            return [*clip.append(samples), *clip.finish()]
        if audio.writes_tokens or audio.frame_length:
            # The encoder makes at least one output.
            samples = np.pad(samples, (0, max(0, audio.least_samples - len(samples))))
        features = samples
        if audio.variance_term:
            features = standardized(samples, audio.variance_term)
        elif (compute := _FEATURES.get(audio.kind)) is not None:
            features = compute(samples, audio.num_mel_bins)
        elif audio.num_mel_bins:
            num_samples = int(audio.chunk_seconds * audio.sampling_rate)
            features = log_mel(samples, num_samples, audio.num_mel_bins)
        num_frames = features.shape[-1]
        payload = AudioPayload(audio.num_mel_bins, num_frames, float32_bytes(features))
        return [encoder_source(payload, audio.num_outputs(num_frames))]

    def _append(
        self, transcript: Transcript, decoded: DecodedWindow, options: TranscriptionOptions
    ) -> None:
        transcript.text += separator(transcript.text, decoded.text) + decoded.text
        transcript.logprobs += decoded.logprobs
        transcript.num_generated_tokens += decoded.num_generated_tokens
        transcript.words += decoded.words
        if options.has_segments:
            transcript.segments += split_segments(
                decoded,
                self._tokenizer,
                first_timestamp_id=self._prompts.first_timestamp_id,
                time_precision=self._time_precision,
                first_id=len(transcript.segments),
            )


def make_transcriber(
    config: EngineConfig,
    tokenizer: Tokenizer,
    executor: ThreadExecutor,
    template: ChatTemplate | None,
    guard: SpecialTokenGuard,
) -> Transcriber | None:
    """Return the transcriber for a model; None if it does not transcribe, or lacks the chat template that it needs."""
    model = config.model
    speech = speech_model(config)
    if speech is None:
        return None
    urls = MediaUrls(config.frontend, executor)
    if speech.audio is not None:
        prompts: Prompts = DecoderPrompts(model, speech.audio, tokenizer)
        return Transcriber(speech, prompts, None, tokenizer, executor, urls)
    audio = model.chat_audio
    assert audio is not None
    assert audio.speech is not None
    if template is None and not audio.speech.prompt:
        return None
    prompts = ChatPrompts(model, audio, audio.speech, tokenizer, template, guard)
    return Transcriber(speech, prompts, audio, tokenizer, executor, urls)
