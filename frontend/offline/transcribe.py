"""Transcribes sounds without a server, and `engine transcribe`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from ...protocol.errors import EngineError
from ...protocol.sampling_params import SamplingParams
from ..audio.arrays import ArraySound, mono_samples
from ..audio.windows import Samples
from ..cli.arguments import parse_settings
from ..client.engine_client import Delta, RequestGroup, SequenceRequest
from ..supervisor.console import Console
from ..transcription.decoding import Submission
from ..transcription.options import (
    Task,
    TranscriptionOptions,
    verify_options,
    verify_transcribes,
)
from ..transcription.subtitles import write_srt, write_vtt
from ..transcription.transcriber import Transcriber, Transcript
from .local_engine import LocalEngine

Sound: TypeAlias = str | Path | bytes | tuple[npt.ArrayLike, int]
"""The path or the content of an audio file, or samples of shape [N] or [N, channels] and their rate in Hz."""

SOUNDS_AT_ONCE: Final = 4
"""Sounds that are transcribed at the same time. Each has several windows at once."""


class LocalTranscriber:
    """Transcribes sounds with the model of an engine in this process.

    Raises:
        ParameterError: The model does not transcribe.
    """

    def __init__(self, engine: LocalEngine) -> None:
        model = engine.config.model
        self.audio = verify_transcribes(model)
        self._engine = engine
        self._transcriber = Transcriber(model, self.audio, engine.tokenizer, engine.client.executor)

    def transcribe(
        self, sounds: Sequence[Sound], options: TranscriptionOptions, numbers: Iterable[int]
    ) -> list[Transcript]:
        """Return the transcripts of sounds in their order. `numbers` become the IDs of requests.

        Raises:
            ParameterError: A sound cannot be read.
            EngineError: A window failed.
        """
        verify_options(options, self.audio)
        return self._engine.run(self._transcribe_all(sounds, options, iter(numbers)))

    async def _transcribe_all(
        self, sounds: Sequence[Sound], options: TranscriptionOptions, numbers: Any
    ) -> list[Transcript]:
        room = asyncio.Semaphore(SOUNDS_AT_ONCE)

        async def transcribe(index: int, sound: Sound) -> Transcript:
            request_id = str(next(numbers))

            async def start(sequence: SequenceRequest) -> RequestGroup:
                return await self._engine.client.submit([sequence], request_id=request_id)

            async with room:
                base = SequenceRequest(np.zeros(0, np.int32), SamplingParams())
                opened = await self._open(sound, f"audio[{index}]")
                submission = Submission(base, start, _verify)
                return await self._transcriber.transcribe(opened, options, submission)

        tasks = [asyncio.create_task(transcribe(*each)) for each in enumerate(sounds)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _open(self, sound: Sound, where: str) -> Samples:
        limit = self._engine.config.frontend.max_audio_s
        if isinstance(sound, tuple):
            samples, rate = sound
            return ArraySound(
                await asyncio.to_thread(
                    mono_samples,
                    samples,
                    rate,
                    self.audio.sampling_rate,
                    where,
                    limit,
                    "max_audio_s",
                )
            )
        data = sound if isinstance(sound, bytes) else await asyncio.to_thread(_read, sound)
        return await self._transcriber.open(data, where, limit)


def _read(path: str | Path) -> bytes:
    return Path(path).read_bytes()


def _verify(delta: Delta) -> None:
    if delta.error is not None:
        raise EngineError(delta.error)


FORMATS: Final = ("text", "json", "srt", "vtt")


def main(argv: Sequence[str] | None = None) -> int:
    """Write the transcript of each file. Return 1 after a failure; invalid arguments exit with code 2."""
    from .llm import DEFAULTS, LLM

    parser = argparse.ArgumentParser(
        prog="engine transcribe",
        usage="engine transcribe FILE... --model MODEL [flags]",
        description="Write down what is said in audio files. The flags of engine serve apply as well.",
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="Audio files")
    parser.add_argument("--model", required=True, metavar="MODEL", help="A speech model")
    parser.add_argument(
        "--language", metavar="CODE", help="The spoken language (default: detected)"
    )
    parser.add_argument(
        "--task", choices=[*Task], default="transcribe", help="translate: write English"
    )
    parser.add_argument("--prompt", default="", metavar="TEXT", help="Text before the sound")
    parser.add_argument(
        "--format", choices=FORMATS, default="text", help="Format of the output (default: text)"
    )
    own, flags = parser.parse_known_args(argv)
    defaults = (
        f"--no-{name}" if value is False else f"--{name}={value}"
        for name, value in DEFAULTS.items()
    )
    settings = parse_settings([own.model, *defaults, *flags])
    try:
        with ExitStack() as stack:
            llm = stack.enter_context(LLM.from_settings(settings))
            transcripts = llm.transcribe(
                own.files,
                language=own.language,
                task=own.task,
                prompt=own.prompt,
                timestamps=() if own.format == "text" else ("segment",),
            )
            for transcript in transcripts:
                sys.stdout.write(_render(transcript, own.format))
    except BrokenPipeError:
        return 0
    except (EngineError, OSError) as error:
        Console().error(str(error))
        return 1
    return 0


def _render(transcript: Transcript, output_format: str) -> str:
    match output_format:
        case "srt":
            return write_srt(transcript.segments)
        case "vtt":
            return write_vtt(transcript.segments)
        case "json":
            return msgspec.json.encode(transcript).decode() + "\n"
    return transcript.text + "\n"


if __name__ == "__main__":
    sys.exit(main())
