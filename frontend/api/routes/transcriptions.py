"""`POST /v1/audio/transcriptions` and `POST /v1/audio/translations`."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

import msgspec
import numpy as np
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from ....protocol.sampling_params import MAX_SEED, SamplingParams
from ...client.engine_client import PositionLogprobs, RequestGroup, SequenceRequest
from ...http.errors import APIError, bad_request, json_response, verify_choice, wrong
from ...http.json_pieces import encode_list
from ...http.request_headers import read_deadline
from ...http.routing import Asgi
from ...media.sources.data_urls import is_data_url, read_base64, read_data_url
from ...media.transcription.languages import LANGUAGE_NAMES
from ...media.transcription.options import (
    SpeechModel,
    Task,
    TranscriptionOptions,
    parse_language,
    parse_languages,
    verify_options,
    verify_transcribes,
)
from ...media.transcription.subtitles import write_srt, write_vtt
from ..bodies.disconnection import while_connected
from ..bodies.form import FormDecoder, FormFile, is_json
from ..bodies.intake import Intake, RouteHandlers
from ..bodies.request_memory import MemoryLease
from ..generation import find_origin, raise_if_failed, translate_refusals, verify_priority
from ..logprobs import Json
from ..schema import SamplingFields
from ..schema.audio import TranscriptionRequest, TranslationRequest
from ..serving import Serving
from ..streaming.text_events import TextEvents
from ..streaming.transcription_chunks import TranscriptionChunks

# Few models transcribe, so only their frontends import these modules at run time.
if TYPE_CHECKING:
    from ...media.audio.live_samples import LiveSamples
    from ...media.audio.windows import Samples
    from ...media.transcription.transcriber import (
        TextReceiver,
        Transcriber,
        Transcript,
        TurnReceiver,
    )

FORMATS: Final = ("json", "text", "srt", "vtt", "verbose_json", "diarized_json")
_STREAMED_FORMATS: Final = ("json", "text", "diarized_json")
_GRANULARITIES: Final = ("segment", "word")

MAX_PROMPT_CHARACTERS: Final = 1 << 14
"""Maximum characters of a prompt. The model reads only its last few hundred tokens."""

FILE: Final = "file"

OpenClip: TypeAlias = "Callable[[], Awaitable[Samples | LiveSamples]]"
"""Function that opens an audio clip."""


class Work(Protocol):
    """Function that transcribes a clip. It passes pieces of text to `on_text` and turns to `on_turn`."""

    def __call__(
        self, on_text: TextReceiver | None, on_turn: TurnReceiver | None = None
    ) -> Coroutine[Any, Any, Transcript]:
        """Return the transcript."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The verified fields of a request."""

    options: TranscriptionOptions
    response_format: str
    has_logprobs: bool


class Sent(NamedTuple):
    """A received form: its fields, its files, its share of the memory, and its deadline in CLOCK_MONOTONIC seconds."""

    request: TranslationRequest
    files: dict[str, FormFile]
    lease: MemoryLease
    deadline: float


class Transcriptions(RouteHandlers):
    """A route that transcribes or translates the speech in a file."""

    body_type = "multipart/form-data"

    def __init__(
        self, serving: Serving, intake: Intake, task: Task, transcriber: Transcriber | None
    ) -> None:
        super().__init__(serving, intake)
        self._task = task
        self._transcriber = transcriber
        self.body_schema: type[TranslationRequest] = (
            TranscriptionRequest if task is Task.TRANSCRIBE else TranslationRequest
        )
        self._decoder = FormDecoder(self.body_schema, serving.config.frontend.strict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        asgi = Asgi(scope, receive, send)
        with self._intake.lease() as lease:
            deadline = read_deadline(scope, self._serving.config.frontend.default_deadline_s)
            if is_json(scope):
                schema = self.body_schema
                request, _ = await self._intake.receive(asgi, schema, lease)
                files: dict[str, FormFile] = {}
            else:
                request, files = await self._intake.receive_form(asgi, self._decoder, lease)
            sent = Sent(request, files, lease, deadline)
            await self.answer(sent, asgi, self._whole)

    async def answer(
        self, sent: Sent, asgi: Asgi, write: Callable[[Transcript, Plan], Response]
    ) -> None:
        """Transcribe a file and send what `write` makes of the transcript, or a stream.

        Raises:
            APIError: A field is not allowed, the file is missing or damaged (400), or the request failed.
        """
        serving, request = self._serving, sent.request
        serving.verify_model(request.model)
        plan = self.plan(request)
        file = await self._read_file(sent)
        sent.lease.count_media(len(file))
        chunks = self._chunks(request, asgi.scope)
        open_clip = partial(self._open_file, file)
        work = self.work(open_clip, plan, request, asgi.scope, sent.deadline, chunks)
        serving.verify_serving()
        if request.stream:
            await while_connected(asgi.receive, self._stream(plan, work, chunks, asgi))
            return
        transcript = await while_connected(asgi.receive, work(None))
        size = len(transcript.text) + len(transcript.logprobs)
        response = await serving.executor.run(size, write, transcript, plan)
        await response(*asgi)

    def work(
        self,
        open_clip: OpenClip,
        plan: Plan,
        request: TranslationRequest,
        scope: Scope,
        deadline: float,
        chunks: TranscriptionChunks | None = None,
    ) -> Work:
        """Return the function that transcribes a clip until the deadline in CLOCK_MONOTONIC seconds.

        The tokens of prompts are counted in `chunks`, if it is given.
        """
        transcriber = self._transcriber
        assert transcriber is not None
        engine = self._serving.engine
        base = self._base(scope, request, deadline)
        request_id = scope["state"]["request_id"]
        core_index = num_prompt_tokens = 0

        async def start(sequences: list[SequenceRequest]) -> RequestGroup:
            nonlocal core_index, num_prompt_tokens
            with translate_refusals(self._serving):
                group = await engine.submit(sequences, request_id=request_id)
            core_index = group.sequences[0].core_index
            num_prompt_tokens += sum(
                each[0].num_prompt_tokens for each in group.outputs_by_prompt()
            )
            if chunks is not None:
                chunks.num_prompt_tokens = num_prompt_tokens
            return group

        async def work(
            on_text: TextReceiver | None, on_turn: TurnReceiver | None = None
        ) -> Transcript:
            clip = await open_clip()
            from ...media.transcription.decoding import Submission

            submission = Submission(base, start, raise_if_failed, engine.append_inputs)
            transcript = await transcriber.transcribe(
                clip, plan.options, submission, on_text, on_turn
            )
            transcript.num_prompt_tokens = num_prompt_tokens
            engine.metrics.record_audio(core_index, transcript.duration)
            return transcript

        return work

    @property
    def is_live(self) -> bool:
        """True if the model writes text while a clip arrives."""
        return self._transcriber is not None and self._transcriber.is_live

    async def _read_file(self, sent: Sent) -> memoryview:
        """Return the audio file of the form, the one in base64, or the one at the URL."""
        assert self._transcriber is not None
        if FILE in sent.files:
            return sent.files[FILE].content
        request, content, where = sent.request, sent.request.file, FILE
        if request.input_audio is not None:
            content, where = request.input_audio.data, "input_audio.data"
        if content:
            read = read_data_url if is_data_url(content) else read_base64
            return memoryview(await self._serving.executor.run(len(content), read, content, where))
        if request.file_url is None:
            raise APIError(400, "file is required: send an audio file in the form", param=FILE)
        return memoryview(await self._transcriber.urls.read(request.file_url, "file_url"))

    async def _open_file(self, file: memoryview) -> Samples:
        assert self._transcriber is not None
        limit = self._serving.config.frontend.max_audio_s
        return await self._transcriber.open(bytes(file), FILE, limit)

    def plan(self, request: TranslationRequest) -> Plan:
        """Verify all fields.

        Raises:
            APIError: A value is not allowed (400).
            ParameterError: The model does not support the task or the language.
        """
        speech = verify_transcribes(self._serving.config)
        if self._transcriber is None:
            raise APIError(
                400,
                "this model has no chat template, which it needs to transcribe; "
                "start the server with --chat-template",
                param="model",
            )
        verify_choice("response_format", request.response_format, FORMATS)
        target = request.to_language
        is_english = self._task is Task.TRANSLATE and target in ("en", "english")
        if target and not is_english:
            raise wrong("to_language", "en in /v1/audio/translations", target)
        response_format = request.response_format or "json"
        granularities: Sequence[str] = ()
        include: Sequence[str] = ()
        languages: tuple[str, ...] = ()
        words = [request.hotwords] if request.hotwords else []
        if isinstance(request, TranscriptionRequest):
            granularities, include = request.timestamp_granularities or (), request.include or ()
            languages = parse_languages(request.languages or (), speech)
            if languages and request.language:
                raise bad_request("languages", "must not be given together with language")
            _verify_chunking(request.chunking_strategy)
            words += request.keywords or ()
        _verify_format(response_format, granularities, include, speech)
        if request.stream and response_format not in _STREAMED_FORMATS:
            raise bad_request(
                "stream",
                f"needs response_format json, text or diarized_json, got {response_format}",
            )
        temperature = request.temperature or 0.0
        if not 0 <= temperature <= 1:
            raise bad_request("temperature", f"must be in [0, 1], got {temperature}")
        max_tokens = request.max_completion_tokens
        if max_tokens is not None and max_tokens < 1:
            raise wrong("max_completion_tokens", "at least 1", max_tokens)
        if request.seed is not None and not 0 <= request.seed <= MAX_SEED:
            raise wrong("seed", f"between 0 and {MAX_SEED}", request.seed)
        sampling = {
            name: value
            for name in SamplingFields.__struct_fields__
            if name != "temperature" and (value := getattr(request, name)) is not None
        }
        self._serving.verify_sampling(SamplingParams(**sampling))
        has_words = "word" in granularities
        has_speakers = response_format == "diarized_json"
        has_segments = response_format in ("srt", "vtt", "diarized_json") or (
            response_format == "verbose_json" and (not granularities or "segment" in granularities)
        )
        options = TranscriptionOptions(
            task=self._task,
            language=languages[0]
            if len(languages) == 1
            else parse_language(request.language, speech),
            languages=languages,
            prompt=(request.prompt or "").strip(),
            keywords=tuple(words),
            temperature=temperature,
            seed=request.seed,
            sampling=sampling,
            max_tokens=max_tokens,
            has_segments=has_segments,
            has_words=has_words,
            has_speakers=has_speakers,
            is_streamed=bool(request.stream),
        )
        if (length := len(options.context)) > MAX_PROMPT_CHARACTERS:
            limit = f"must have at most {MAX_PROMPT_CHARACTERS} characters, got {length}"
            raise bad_request("prompt", limit)
        verify_options(options, speech)
        return Plan(options, response_format, bool(include))

    def _base(self, scope: Scope, request: TranslationRequest, deadline: float) -> SequenceRequest:
        origin = find_origin(scope, request, deadline, self._serving.num_replicas)
        return SequenceRequest(
            prompt_token_ids=np.zeros(0, np.int32),
            params=SamplingParams(),
            priority=verify_priority(request.priority),
            cache_owner=origin.cache_owner,
            tenant=origin.tenant,
            deadline=deadline,
            data_parallel_rank=origin.data_parallel_rank,
            trace_headers=origin.trace_headers,
            lora=self._serving.find_lora(request.model) or self._serving.config.model.media_lora,
        )

    async def _stream(
        self, plan: Plan, work: Work, chunks: TranscriptionChunks | None, asgi: Asgi
    ) -> None:
        async with TextEvents(asgi, self._serving.config.frontend.max_silence_s) as events:
            is_first = True

            async def on_text(text: str, logprobs: list[PositionLogprobs]) -> None:
                nonlocal is_first
                # The first token of a text begins with a space, which the complete text does not have.
                text = text.lstrip() if is_first else text
                if not text:
                    return
                is_first = False
                if chunks is not None:
                    await events.write(chunks.write(text, len(logprobs)))
                    return
                content: Json = {"type": "transcript.text.delta", "delta": text}
                if plan.has_logprobs:
                    content["logprobs"] = self.render_logprobs(logprobs)
                await events.write(content)

            segments = _DiarizedSegments()

            async def on_turn(speaker: int, start: float, end: float, text: str) -> None:
                await events.write(segments.render(speaker, start, end, text))

            transcript = await work(on_text, on_turn if plan.options.has_speakers else None)
            if chunks is not None:
                for chunk in chunks.end(transcript.num_generated_tokens):
                    await events.write(chunk)
                return
            done: Json = {"type": "transcript.text.done", "text": transcript.text}
            if plan.has_logprobs:
                done["logprobs"] = self.render_logprobs(transcript.logprobs)
            await events.write(done | {"usage": usage_of(transcript)})

    def _chunks(self, request: TranslationRequest, scope: Scope) -> TranscriptionChunks | None:
        """Return the chunks of vLLM's streams; None if the client does not use its fields."""
        usage, continuous = request.stream_include_usage, request.stream_continuous_usage_stats
        if not request.stream or (usage is None and continuous is None):
            return None
        return TranscriptionChunks(
            "transcription" if self._task is Task.TRANSCRIBE else "translation",
            scope["state"]["request_id"],
            request.model or self._serving.served_name,
            has_usage=bool(usage),
            is_continuous=bool(continuous),
        )

    def _whole(self, transcript: Transcript, plan: Plan) -> Response:
        match plan.response_format:
            case "text":
                return PlainTextResponse(transcript.text + "\n")
            case "srt":
                return PlainTextResponse(
                    write_srt(transcript.segments), media_type="application/x-subrip"
                )
            case "vtt":
                return PlainTextResponse(write_vtt(transcript.segments), media_type="text/vtt")
        usage = usage_of(transcript)
        if plan.options.has_speakers:
            segments = _DiarizedSegments()
            diarized: Json = {
                "task": str(self._task),
                "duration": round(transcript.duration, 2),
                "text": transcript.text,
                "segments": [
                    segments.render(int(each.speaker or 0), each.start, each.end, each.text)
                    for each in transcript.segments
                ],
            }
            return json_response(diarized | {"usage": usage})
        if plan.response_format == "json":
            answer: Json = {"text": transcript.text, "usage": usage}
            if plan.has_logprobs:
                answer["logprobs"] = self.render_logprobs(transcript.logprobs)
            return json_response(answer)
        answer = {
            "task": str(self._task),
            "language": LANGUAGE_NAMES.get(transcript.language, transcript.language),
            "duration": round(transcript.duration, 2),
            "text": transcript.text,
        }
        if plan.options.has_words:
            answer["words"] = encode_list(transcript.words)
        if plan.options.has_segments:
            answer["segments"] = encode_list(transcript.segments)
        return json_response(answer | {"usage": usage})

    def render_logprobs(self, logprobs: list[PositionLogprobs]) -> list[Json]:
        """Return the log-probabilities of tokens as OpenAI's API writes them."""
        rendered: list[Json] = []
        for each in logprobs:
            data = self._serving.tokenizer.token_bytes(each.token_id)
            rendered.append(
                {
                    "token": data.decode(errors="replace"),
                    "logprob": each.logprob,
                    "bytes": list(data),
                }
            )
        return rendered


def _verify_format(
    response_format: str, granularities: Sequence[str], include: Sequence[str], speech: SpeechModel
) -> None:
    """Verify the parts that the answer should have. Raise APIError 400 if its format or the model has none of them."""
    for each in granularities:
        verify_choice("timestamp_granularities", each, _GRANULARITIES)
    for each in include:
        verify_choice("include", each, ("logprobs",))
    if granularities and response_format != "verbose_json":
        raise bad_request(
            "timestamp_granularities",
            f"needs response_format verbose_json, got {response_format}",
        )
    if include and response_format != "json":
        raise bad_request("include", f"needs response_format json, got {response_format}")
    if include and speech.names_speakers:
        raise bad_request("include", "is not supported by models that name speakers")


def _verify_chunking(given: str | Mapping[str, Any] | None) -> None:
    """Raise APIError 400 unless the strategy leaves the cuts to the server."""
    where = "chunking_strategy"
    if isinstance(given, str) and given.startswith("{"):
        try:
            given = msgspec.json.decode(given, type=dict[str, Any])
        except msgspec.MsgspecError:
            raise wrong(where, "auto or an object with a type", given) from None
    if not isinstance(given, Mapping):
        verify_choice(where, given, ("auto",))
        return
    for name in given:
        if name != "type":
            raise bad_request(f"{where}.{name}", "is not supported; the server finds quiet places")
    verify_choice(f"{where}.type", given.get("type"), ("server_vad",))


class _DiarizedSegments:
    """Writes the segments of a transcript with speakers, who are named A, B, … in the order in which they speak."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._num_segments = 0

    def render(self, speaker: int, start: float, end: float, text: str) -> Json:
        """Return the next segment."""
        number = len(self._names)
        name = self._names.setdefault(speaker, chr(65 + number % 26) * (1 + number // 26))
        self._num_segments += 1
        return {
            "type": "transcript.text.segment",
            "id": f"seg_{self._num_segments - 1}",
            "start": round(start, 2),
            "end": round(end, 2),
            "speaker": name,
            "text": text,
        }


def usage_of(transcript: Transcript) -> Json:
    """Return the usage of a transcription, which is its length."""
    return {"type": "duration", "seconds": math.ceil(transcript.duration)}
