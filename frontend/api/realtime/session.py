"""The WebSocket `/v1/realtime`: audio that arrives while somebody speaks, and is transcribed utterance by utterance."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

from ....protocol.arrays import Float32Array
from ....protocol.errors import ParameterError
from ...client.engine_client import PositionLogprobs
from ...http.errors import APIError, bad_request, internal_error, wrong
from ...http.request_headers import read_deadline
from ...http.websocket import Message, WebSocket, WebSocketClosed, open_websocket
from ...media.audio.live_samples import ClipDropped, LiveSamples
from ...media.transcription.options import SpeechModel, verify_transcribes
from ..bodies.body import BodyDecoder, make_decoder
from ..bodies.intake import Intake, RouteHandlers
from ..routes.transcriptions import Plan, Transcriptions
from ..schema.audio import TranscriptionRequest
from ..schema.realtime import (
    AudioAppend,
    AudioClear,
    AudioCommit,
    Session,
    SessionUpdate,
    Transcription,
)
from ..serving import Serving
from .audio import PCM, Found, InputBuffer, Utterance
from .client_secrets import session_of
from .events import Events, VLLMEvents, send_created
from .parts import UtteranceParts
from .settings import Settings, make_plan

logger = logging.getLogger(__name__)

MAX_WAITING: Final = 8
"""Maximum number of utterances of a session that wait for their transcription. Then its client is not read."""

_BYTES_PER_SAMPLE: Final = 4
_VLLM_RATE: Final = 16_000

_SCHEMAS: Final[dict[str, type[msgspec.Struct]]] = {
    "session.update": SessionUpdate,
    "input_audio_buffer.append": AudioAppend,
    "input_audio_buffer.commit": AudioCommit,
    "input_audio_buffer.clear": AudioClear,
}
_Decoders: TypeAlias = dict[str, BodyDecoder[Any]]


class _Kind(msgspec.Struct):
    type: Any = None
    event_id: Any = None


@dataclass(frozen=True, slots=True)
class _Item:
    """An utterance that is to be transcribed. `held` is closed when it was transcribed.

    With `parts`, it is one of them, and the last one if `is_last`.
    """

    id: str
    clip: Utterance | LiveSamples
    request: TranscriptionRequest
    plan: Plan
    held: ExitStack
    parts: UtteranceParts | None
    is_last: bool


class Realtime(RouteHandlers):
    """The route of the WebSocket."""

    is_websocket = True

    def __init__(self, serving: Serving, intake: Intake, transcriptions: Transcriptions) -> None:
        super().__init__(serving, intake)
        self._transcriptions = transcriptions
        strict = serving.config.frontend.strict
        self._decoders: _Decoders = {
            kind: make_decoder(schema, strict) for kind, schema in _SCHEMAS.items()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Open the WebSocket, and serve its session until it is closed."""
        serving = self._serving
        serving.verify_serving()
        query = QueryParams(scope["query_string"])
        if query.get("intent", "transcription") != "transcription":
            raise wrong("intent", '"transcription"', query["intent"])
        if "call_id" in query:
            raise bad_request("call_id", "is not supported: this server answers no calls")
        # Azure's clients call the model a deployment.
        model = query.get("model") or query.get("deployment") or serving.served_name
        serving.verify_model(model)
        speech = verify_transcribes(serving.config)
        settings = Settings.default(model)
        if (given := session_of(dict(scope["headers"]))) is not None:
            settings = settings.updated(given)
        max_bytes = serving.config.frontend.max_body_bytes
        with await open_websocket(scope, send, max_bytes, self._intake.lease) as socket:
            session = _Session(serving, self._transcriptions, socket, scope, settings, speech)
            await session.run(self._decoders)


class _Session:
    """An open WebSocket.

    Events are handled in their order. Utterances are transcribed one after another, while further audio arrives. A
    model that reads a clip while it arrives begins with the first samples of an utterance, before that is committed.
    """

    def __init__(
        self,
        serving: Serving,
        transcriptions: Transcriptions,
        socket: WebSocket,
        handshake: Scope,
        settings: Settings,
        speech: SpeechModel,
    ) -> None:
        self._serving = serving
        self._transcriptions = transcriptions
        self._socket = socket
        self._handshake = handshake
        self._settings = settings
        self._events = Events(socket)
        self._id = f"sess_{uuid.uuid4().hex}"
        max_samples = int(serving.config.frontend.max_audio_s * speech.sampling_rate)
        self._buffer = InputBuffer(speech.sampling_rate, max_samples)
        self._speech = speech
        self._parts: UtteranceParts | None = None
        self._num_counted = 0
        self._next_id = _new_item_id()
        self._previous_id: str | None = None
        self._num_items = 0
        self._waiting: asyncio.Queue[_Item | None] = asyncio.Queue(MAX_WAITING)
        self._live: LiveSamples | None = None

    async def run(self, decoders: _Decoders) -> None:
        """Serve events until the WebSocket is closed."""
        self._configure()
        send_created(self._events, self._settings.describe(self._id))
        worker = asyncio.create_task(self._transcribe_in_turn())
        try:
            while True:
                message = await self._socket.receive()
                with message.lease:
                    await self._handle(message, decoders)
        except WebSocketClosed:
            pass
        finally:
            worker.cancel()
            while not self._waiting.empty():
                if (item := self._waiting.get_nowait()) is not None:
                    item.held.close()
            self._drop_live()
            self._count_buffer(0)
            await asyncio.wait({worker})

    async def _handle(self, message: Message, decoders: _Decoders) -> None:
        event_id: str | None = None
        try:
            kind = _read_kind(message.text)
            if isinstance(kind.event_id, str):
                event_id = kind.event_id
            if not isinstance(kind.type, str) or kind.type not in decoders:
                known = ", ".join(decoders)
                raise wrong("type", f"one of {known}: sessions only transcribe", kind.type)
            match decoders[kind.type].decode(message.text):
                case SessionUpdate() as event:
                    await self._update(event)
                case AudioAppend() as event:
                    await self._append(event)
                case AudioCommit() as event:
                    await self._commit(event)
                case _:
                    self._take_all()
                    self._drop_live()
                    self._parts = None
                    self._events.send("input_audio_buffer.cleared")
        except ParameterError as error:
            self._events.send_error(bad_request(error.param, error.problem), event_id)
        except APIError as error:
            self._events.send_error(error, event_id)

    async def _update(self, event: SessionUpdate) -> None:
        settings, session = self._settings, event.session
        if session is None:
            if event.model is None:
                raise bad_request("session", "is required")
            self._events = VLLMEvents(self._socket)
            transcription = Transcription(
                model=event.model, language=event.language, prompt=event.prompt
            )
            settings = Settings(PCM, _VLLM_RATE, transcription, None)
            session = Session(include=event.include)
        settings = settings.updated(session)
        if (request := settings.request()) is not None:
            self._serving.verify_model(request.model)
            make_plan(self._transcriptions, request)
        self._settings = settings
        self._configure()
        self._events.send_session("session.updated", settings.describe(self._id))

    async def _append(self, event: AudioAppend) -> None:
        data, buffer = event.audio, self._buffer
        self._count_buffer(buffer.verify_room(len(data)))
        all_found = await self._serving.executor.run(len(data), lambda: buffer.append(data))
        self._count_buffer(buffer.num_samples)
        for found in all_found:
            await self._report(found)
        if self._transcriptions.is_live:
            if len(new := buffer.read_new()):
                await self._read_live(new)
        elif not self._events.has_items and self._settings.detection is None:
            await self._read_parts(buffer.read_new())

    async def _report(self, found: Found) -> None:
        milliseconds = found.position * 1000 // self._buffer.rate
        if found.utterance is None:
            self._events.send(
                "input_audio_buffer.speech_started",
                audio_start_ms=milliseconds,
                item_id=self._next_id,
            )
            return
        self._events.send(
            "input_audio_buffer.speech_stopped", audio_end_ms=milliseconds, item_id=self._next_id
        )
        await self._add_item(found.utterance, found.num_read)

    async def _commit(self, event: AudioCommit) -> None:
        if not self._events.has_items and not event.final:
            # It begins an utterance.
            return
        num_read = self._buffer.num_read
        samples = self._take_all()
        if not len(samples):
            raise APIError(
                400,
                "the input audio buffer is empty: append audio before you commit it",
                code="input_audio_buffer_commit_empty",
            )
        await self._add_item(samples, num_read)

    def _take_all(self) -> Float32Array:
        samples = self._buffer.commit()
        self._count_buffer(0)
        return samples

    async def _add_item(self, samples: Float32Array, num_read: int) -> None:
        """Make an item of an utterance, and let it be transcribed. `num_read` of its samples are with the model."""
        live, self._live = self._live, None
        if live is not None:
            live.feed(samples[num_read:])
            live.end()
        item_id, self._next_id = self._next_id, _new_item_id()
        self._events.send_committed(item_id, self._previous_id)
        self._previous_id = item_id
        if live is not None:
            return
        parts, self._parts = self._parts, None
        if parts is not None:
            for part in parts.append(samples[num_read:]):
                await self._enqueue(item_id, Utterance(part), part.nbytes, parts)
            samples = parts.finish()
        await self._enqueue(item_id, Utterance(samples), samples.nbytes, parts, is_last=True)

    async def _read_parts(self, samples: Float32Array) -> None:
        """Let the parts be transcribed that are complete after the next samples of the utterance that is arriving."""
        if self._parts is None:
            self._parts = UtteranceParts(self._speech)
        for part in self._parts.append(samples):
            await self._enqueue(self._next_id, Utterance(part), part.nbytes, self._parts)

    async def _read_live(self, samples: Float32Array) -> None:
        """Transcribe the next samples of the utterance that is arriving."""
        if self._live is None:
            live = LiveSamples()
            if not await self._enqueue(self._next_id, live, 0):
                self._buffer.num_read = 0
                return
            self._live = live
        self._live.feed(samples)

    def _drop_live(self) -> None:
        if self._live is not None:
            self._live.drop()
            self._live = None

    async def _enqueue(
        self,
        item_id: str,
        clip: Utterance | LiveSamples,
        num_bytes: int,
        parts: UtteranceParts | None = None,
        *,
        is_last: bool = False,
    ) -> bool:
        """Let an utterance or a part of it be transcribed. Return False if the session has no transcription."""
        request = self._settings.request()
        if request is None:
            return False
        # The session may have begun before a shutdown, but this utterance did not.
        self._serving.verify_open()
        with ExitStack() as held:
            held.enter_context(self._socket.turn())
            held.enter_context(self._counted(num_bytes))
            plan = make_plan(self._transcriptions, request)
            item = _Item(item_id, clip, request, plan, held.pop_all(), parts, is_last)
        try:
            await self._waiting.put(item)
        except BaseException:
            item.held.close()
            raise
        return True

    async def _transcribe_in_turn(self) -> None:
        while (item := await self._waiting.get()) is not None:
            with item.held:
                await self._transcribe(item)

    async def _transcribe(self, item: _Item) -> None:
        try:
            await self._send_text(item)
        except APIError as error:
            self._events.send_failure(item.id, error)
        except ParameterError as error:
            self._events.send_failure(item.id, bad_request(error.param, error.problem))
        except (WebSocketClosed, ClipDropped):
            pass
        except Exception:
            logger.exception("a transcription failed")
            self._events.send_failure(item.id, internal_error("Internal server error"))

    async def _send_text(self, item: _Item) -> None:
        state = self._handshake["state"]
        self._num_items += 1
        request_id = f"{state['request_id']}-{self._num_items}"
        scope = {**self._handshake, "state": {**state, "request_id": request_id}}
        default_s = self._serving.config.frontend.default_deadline_s
        deadline = read_deadline(self._handshake, default_s)

        async def open_clip() -> Utterance | LiveSamples:
            return item.clip

        has_logprobs = item.plan.has_logprobs
        render = self._transcriptions.render_logprobs
        is_first = True

        async def on_text(text: str, logprobs: list[PositionLogprobs]) -> None:
            nonlocal is_first
            text = text.lstrip() if is_first else text
            if text:
                text = item.parts.join(text) if is_first and item.parts else text
                is_first = False
                rendered = render(logprobs) if has_logprobs else None
                self._events.send_delta(item.id, text, rendered)
                await self._socket.wait_until_writable()

        work = self._transcriptions.work(open_clip, item.plan, item.request, scope, deadline)
        transcript = await work(on_text)
        if item.parts is not None:
            transcript = item.parts.add(transcript)
            if not item.is_last:
                return
        rendered = render(transcript.logprobs) if has_logprobs else None
        self._events.send_text(item.id, transcript, rendered)

    def _configure(self) -> None:
        settings = self._settings
        self._buffer.configure(settings.format, settings.rate, settings.detection)

    def _count_buffer(self, num_samples: int) -> None:
        """Count the memory of the buffer. Raise APIError 503 if there is no room for it."""
        memory = self._serving.request_memory
        num_bytes = num_samples * _BYTES_PER_SAMPLE
        if num_bytes > self._num_counted:
            memory.count(num_bytes - self._num_counted)
        else:
            memory.release(self._num_counted - num_bytes)
        self._num_counted = num_bytes

    @contextmanager
    def _counted(self, num_bytes: int) -> Iterator[None]:
        memory = self._serving.request_memory
        memory.count(num_bytes)
        try:
            yield
        finally:
            memory.release(num_bytes)


def _new_item_id() -> str:
    return f"item_{uuid.uuid4().hex}"


def _read_kind(text: bytes) -> _Kind:
    with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
        return msgspec.json.decode(text, type=_Kind)
    raise APIError(400, "the message must be a JSON object", code="invalid_json")
