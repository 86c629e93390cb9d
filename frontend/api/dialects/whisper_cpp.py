"""`POST /inference`, the route of whisper.cpp's server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from ....protocol.config import EngineConfig
from ...http.errors import json_response, verify_choice, wrong
from ...http.request_headers import read_deadline
from ...http.routing import Asgi
from ...media.transcription.languages import LANGUAGE_NAMES
from ...media.transcription.options import verify_transcribes
from ...media.transcription.subtitles import write_srt, write_vtt
from ..bodies.form import FormDecoder
from ..bodies.intake import Intake, RouteHandlers
from ..logprobs import Json
from ..routes.transcriptions import Plan, Sent, Transcriptions
from ..schema.audio import TranscriptionRequest
from ..schema.whisper_cpp import InferenceRequest
from ..serving import Serving

if TYPE_CHECKING:
    from ...media.transcription.transcriber import Transcript

PATH: Final = "/inference"

FORMATS: Final = ("json", "text", "srt", "vtt", "verbose_json")

ONLY: Final[dict[str, Any]] = {
    "temperature_inc": 0.2,
    "no_speech_thold": 0.6,
    "entropy_thold": 2.4,
    "logprob_thold": -1.0,
    "offset_t": 0,
    "duration": 0,
    "audio_ctx": 0,
    "max_len": 0,
    "beam_size": -1,
    "diarize": False,
    "tinydiarize": False,
    "suppress_nst": False,
    "suppress_non_speech": False,
    "vad": False,
}
"""Field -> its only value, the default of whisper.cpp, by which this server works."""


class Inference(RouteHandlers):
    """The endpoint, which transcribes a file, or translates it to English."""

    body_type = "multipart/form-data"
    body_schema = InferenceRequest

    def __init__(
        self,
        serving: Serving,
        intake: Intake,
        transcriptions: Transcriptions,
        translations: Transcriptions,
    ) -> None:
        super().__init__(serving, intake)
        self._transcriptions, self._translations = transcriptions, translations
        self._decoder = FormDecoder(InferenceRequest, serving.config.frontend.strict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        asgi = Asgi(scope, receive, send)
        with self._intake.lease() as lease:
            deadline = read_deadline(scope, self._serving.config.frontend.default_deadline_s)
            request, files = await self._intake.receive_form(asgi, self._decoder, lease)
            translated = _translate(request, self._serving.config)
            route = self._translations if request.translate else self._transcriptions

            def write(transcript: Transcript, plan: Plan) -> Response:
                return _write(transcript, plan, request)

            sent = Sent(translated, files, lease, deadline)
            await route.answer(sent, asgi, write)


def _translate(request: InferenceRequest, config: EngineConfig) -> TranscriptionRequest:
    """Return the request for the common route.

    Raises:
        APIError: A value is not allowed (400).
        ParameterError: The model does not transcribe.
    """
    for name, only in ONLY.items():
        if getattr(request, name) not in (None, only):
            raise wrong(name, str(only).lower(), getattr(request, name))
    verify_choice("response_format", request.response_format, FORMATS)
    if not 0 <= (request.offset_n or 0) < 1 << 31:
        raise wrong("offset_n", "between 0 and 2147483647", request.offset_n)
    languages = verify_transcribes(config).languages
    language = request.language or ("en" if "en" in languages else None)
    if request.detect_language or language == "auto":
        language = None
    has_words = request.token_timestamps and request.response_format == "verbose_json"
    is_plain = request.no_timestamps and request.response_format in (None, "json", "text")
    return TranscriptionRequest(
        model=request.model,
        # Texts have a line for each segment.
        response_format="json" if is_plain else "verbose_json",
        timestamp_granularities=["segment", "word"] if has_words else None,
        language=language,
        prompt=request.prompt,
        temperature=request.temperature,
    )


def _write(transcript: Transcript, plan: Plan, request: InferenceRequest) -> Response:
    segments = transcript.segments
    text = "".join(f"{each.text}\n" for each in segments) or f"{transcript.text}\n"
    match request.response_format:
        case "text":
            return PlainTextResponse(text)
        case "srt":
            subtitles = write_srt(segments, first=1 + (request.offset_n or 0))
            return PlainTextResponse(subtitles, media_type="application/x-subrip")
        case "vtt":
            return PlainTextResponse(write_vtt(segments), media_type="text/vtt")
        case None | "json":
            return json_response({"text": text})
    language = LANGUAGE_NAMES.get(transcript.language, transcript.language)
    shown: list[Json] = []
    for each in segments:
        found: Json = {
            "id": each.id,
            "text": each.text,
            "start": each.start,
            "end": each.end,
            "tokens": each.tokens,
            "temperature": each.temperature,
            "avg_logprob": each.avg_logprob,
            "no_speech_prob": each.no_speech_prob,
        }
        if plan.options.has_words:
            found["words"] = [
                {"word": word.word, "start": word.start, "end": word.end}
                for word in transcript.words
                if each.start <= word.start < each.end
            ]
        shown.append(found)
    return json_response(
        {
            "task": str(plan.options.task),
            "language": language,
            "duration": round(transcript.duration, 2),
            "text": text,
            "segments": shown,
        }
    )
