"""The command `engine transcribe`: transcribe audio files without a server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

import msgspec

from ..cli.parsers import add_option, command_parser
from ..media.transcription.options import Task
from ..media.transcription.subtitles import write_srt, write_vtt
from ..media.transcription.transcriber import Transcript
from ..supervisor.console import reports_errors
from .llm import LLM

FORMATS: Final = ("text", "json", "srt", "vtt")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `engine transcribe`, without the flags of `engine serve`."""
    parser = command_parser(
        "transcribe",
        "Transcribe audio files. All flags of engine serve are accepted.",
        "FILE... --model MODEL [flags]",
        takes_serve_flags=True,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="Audio files to transcribe")
    about = "Speech model, such as a Whisper checkpoint"
    add_option(parser, "--model", about, "MODEL", required=True)
    add_option(parser, "--language", "Spoken language (default: detected)", "CODE")
    about = "transcribe, or translate into English"
    add_option(parser, "--task", about, default="transcribe", choices=[*Task])
    add_option(parser, "--prompt", "Example of the style and spelling to use", "TEXT", default="")
    add_option(parser, "--format", "Output format", default="text", choices=FORMATS)
    return parser


@reports_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Write the transcript of each file. Return 1 after a failure; invalid arguments exit with code 2."""
    parser = make_parser()
    own, flags = parser.parse_known_args(argv)
    with ExitStack() as stack:
        llm = stack.enter_context(LLM.from_flags([own.model, *flags]))
        transcripts = llm.transcribe(
            own.files,
            language=own.language,
            task=own.task,
            prompt=own.prompt,
            timestamps=() if own.format == "text" else ("segment",),
        )
        for transcript in transcripts:
            sys.stdout.write(_render(transcript, own.format))
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
