"""`POST /v1/responses` and `POST /v1/responses/input_tokens`."""

from __future__ import annotations

import logging
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from ...client.engine_client import RequestGroup
from ...http.errors import APIError, json_response, renaming
from ...http.request_headers import read_deadline
from ...http.routing import Asgi
from ..answer import Answer
from ..bodies.disconnection import while_connected
from ..bodies.intake import Intake, RouteHandlers, reads
from ..bodies.request_memory import MemoryLease
from ..chats.prompt import RenderedChat
from ..durable.event_positions import POSITION, EventPosition
from ..durable.keeper import Keeper
from ..durable.records import RequestRecord
from ..durable.recovery import NothingToContinue, StartGroup
from ..durable.resumption import Resumption
from ..endpoint import NewAnswer, identify
from ..generation import PreparedPrompt, read_outputs, wait_for_end
from ..logprobs import Json
from ..routes.chat_completions import ChatCompletions, ChatPlan, render_request
from ..schema import ChatCompletionRequest
from ..schema.responses import (
    InputTokensRequest,
    ResponseCreateRequest,
    ResponseFields,
    ResponsesRequest,
)
from ..serving import Serving
from ..streaming.text_events import TextEvents
from .answer import RESPONSE_STREAM, ResponseChunks, ResponsesAnswer, describe_response
from .background import BackgroundRun, BackgroundRuns, RunKeeper
from .events import read_run, repeat_events, send_events
from .foreground import ResponseKeeper, read_exchange
from .ids import RESPONSE, new_id
from .mcp.tools import has_mcp
from .mcp.turns import McpTurns, Turn, with_listed_tools
from .request import (
    Exchange,
    ResponseChat,
    sent_name,
    translate_prompt,
    translate_response,
    verify_message,
)
from .states import KEPT, KeptResponses, ResponseStates, size_of
from .truncation import drop_oldest

logger = logging.getLogger(__name__)


class Responses(ChatCompletions):
    """The routes of OpenAI's Responses API."""

    body_schema: type[msgspec.Struct] = ResponsesRequest
    cuts_max_tokens = True
    answer_type = ResponsesAnswer

    def __init__(self, serving: Serving, intake: Intake, states: ResponseStates) -> None:
        super().__init__(serving, intake)
        self._states = states
        self.runs = BackgroundRuns(states, serving)

    async def _answer(self, asgi: Asgi, lease: MemoryLease) -> None:
        position: EventPosition | None = asgi.state.get(POSITION)
        if position is not None:
            keeper = Keeper(self._serving, asgi.scope)
            with await keeper.find_resumption(position) as resumption:
                await self.resume(resumption, asgi, lease)
            return
        exchange, size, deadline = await self._begin(asgi, lease)
        body = exchange.body
        if not body.background:
            if has_mcp(body.tools):
                await self._answer_in_turns(exchange, asgi, deadline)
            else:
                await self._answer_now(exchange, size, asgi, lease, deadline)
            return
        with renaming(partial(sent_name, body, exchange.places)):
            queued = describe_response(self._serving, exchange, "queued")
            run = BackgroundRun(exchange, queued, asgi.state)
            await self.runs.start(run, self._run)
        if body.stream:
            await send_events(read_run(run, 0), asgi)
        else:
            await json_response(run.response | {"status": "queued"})(*asgi)

    async def _begin(self, asgi: Asgi, lease: MemoryLease) -> tuple[Exchange, int, float]:
        """Read a request. Return the new response, the bytes of the body, and the deadline."""
        serving, state = self._serving, asgi.state
        deadline = read_deadline(asgi.scope, serving.config.frontend.default_deadline_s)
        body, size = await self._read(asgi, lease)
        serving.verify_model(body.model)
        serving.verify_serving()
        exchange = await self._states.begin(body, state["owner"], state.get(KEPT))
        return exchange, size, deadline

    async def _read(self, asgi: Asgi, lease: MemoryLease) -> tuple[ResponsesRequest, int]:
        """Return the body of a request and its size in bytes. Dialects translate it."""
        kept: KeptResponses | None = asgi.state.get(KEPT)
        schema = ResponsesRequest if kept is None else ResponseCreateRequest
        body, size = await self._intake.receive(asgi, schema, lease)
        if isinstance(body, ResponseCreateRequest):
            verify_message(body)
        return body, size

    async def _answer_now(
        self, exchange: Exchange, size: int, asgi: Asgi, lease: MemoryLease, deadline: float
    ) -> None:
        """Answer a request in one turn of the model."""
        with renaming(partial(sent_name, exchange.body, exchange.places)):
            request, size = await self._translate_exchange(exchange, size)
            keeper = ResponseKeeper(self._serving, asgi, exchange)
            await self._generate(asgi, lease, request, size, deadline, keeper)

    async def _answer_in_turns(
        self, exchange: Exchange, asgi: Asgi, deadline: float, run: BackgroundRun | None = None
    ) -> None:
        """Answer a request with tools of MCP servers, which are run between the turns of the model."""
        serving = self._serving

        async def generate(turn: Turn, inner: Exchange, number: int) -> None:
            places = inner.places
            with renaming(partial(sent_name, exchange.body, places)), self._intake.lease() as lease:
                request, size = await self._translate_exchange(inner, 0)
                request.run = turn
                await self._generate(turn.asgi(asgi, number), lease, request, size, deadline)

        servers = serving.config.frontend.mcp_servers
        turns = McpTurns(exchange, servers, generate, partial(describe_response, serving))
        on_begin = (lambda: None) if run is None else run.accept
        if exchange.body.stream:
            silence_s = serving.config.frontend.max_silence_s
            form = RESPONSE_STREAM
            async with TextEvents(asgi, silence_s, form) as stream:
                work = turns.run(stream.write_encoded, on_begin)
                response = await while_connected(asgi.receive, work)
                await self._end(exchange, response, run)
                await stream.write_encoded(turns.closing(response))
            return
        response = await while_connected(asgi.receive, turns.run(_drop, on_begin))
        await self._end(exchange, response, run)
        if run is None:
            await json_response(response)(*asgi)

    async def _run(self, run: BackgroundRun) -> None:
        if has_mcp(run.exchange.body.tools):
            await self._answer_in_turns(run.exchange, run.asgi, 0.0, run)
            return
        with self._intake.lease() as lease:
            request, size = await self._translate_exchange(run.exchange, 0)
            request.run = run
            keeper = RunKeeper(self._serving, run)
            await self._generate(run.asgi, lease, request, size, 0.0, keeper)

    async def continue_request(self, record: RequestRecord, owner: str, start: StartGroup) -> None:
        """Generate the rest of a response.

        Raises:
            APIError: The response can no longer be prepared, or the engine does not accept it.
            NothingToContinue: It is a background response that has ended or was deleted.
        """
        if not record.is_run:
            await super().continue_request(record, owner, start)
            return
        run = await self.runs.read_run(record)
        if run is None:
            raise NothingToContinue
        self._verify_same_model(record, run.exchange.body.model)

        async def generate(run: BackgroundRun) -> None:
            with self._intake.lease() as lease:
                request, size = await self._translate_exchange(run.exchange, 0)
                request.run = run
                prompts, new_answer = await self._prepare(request, size, run.receive)
                lease.count_media(sum(prompt.num_image_bytes for prompt in prompts))
                group = await start(request, prompts)
                envelope = self._envelope(request, record.answer_id, record.created)
                try:
                    answer = new_answer(group, envelope)
                    await self._reply(answer, group, run.asgi)
                finally:
                    group.leave()

        await self.runs.resume(run, generate)

    async def _prepare_again(
        self, record: RequestRecord, owner: str, receive: Receive, lease: MemoryLease
    ) -> tuple[ChatCompletionRequest, list[PreparedPrompt], NewAnswer[ChatCompletionRequest]]:
        exchange = await read_exchange(record, self._states, owner)
        self._verify_same_model(record, exchange.body.model)
        request, size = await self._translate_exchange(exchange, 0)
        prompts, new_answer = await self._prepare(request, size, receive)
        lease.count_media(sum(prompt.num_image_bytes for prompt in prompts))
        return request, prompts, new_answer

    async def _send_rest(
        self,
        resumption: Resumption,
        answer: Answer[ChatCompletionRequest],
        group: RequestGroup,
        asgi: Asgi,
    ) -> None:
        if not answer.request.stream:
            resumption.open(group)
            await self._reply(answer, group, asgi)
            return
        assert isinstance(answer, ResponsesAnswer)
        chunks = answer.chunks()
        await resumption.read_silently(group, chunks)
        await self._send_events(answer, chunks, group, asgi, resumption)

    async def record_failure(self, request_id: str, owner: str, error: APIError) -> bool:
        """Store that a run failed, because it cannot be continued. Return False for requests of other endpoints."""
        if not request_id.startswith(f"{RESPONSE}_"):
            return False
        await self.runs.fail(request_id, owner, error)
        return True

    async def _translate_exchange(self, exchange: Exchange, size: int) -> tuple[ResponseChat, int]:
        """Return the chat request and its approximate size in bytes. `size` is the size of the body, 0 if unknown."""
        size = size or sum(map(size_of, exchange.input))
        size += sum(map(size_of, exchange.context))
        exchange.files = await self._states.load_files(
            exchange.context + exchange.input, exchange.owner
        )
        size += sum(len(content) for _, content in exchange.files.values())
        request = await self._serving.executor.run(size, lambda: translate_response(exchange))
        exchange.files = {}
        return request, size

    async def _render(
        self, plan: ChatPlan, request: ChatCompletionRequest, size: int
    ) -> RenderedChat:
        assert isinstance(request, ResponseChat)
        body: ResponsesRequest = request.exchange.body
        if body.truncation != "auto":
            return await super()._render(plan, request, size)

        async def render(kept: ChatCompletionRequest) -> RenderedChat:
            return await super(Responses, self)._render(plan, kept, size)

        max_model_len = self._serving.config.model.max_model_len
        return await drop_oldest(request, render, max_model_len, body.max_output_tokens)

    async def _reply(
        self, answer: Answer[ChatCompletionRequest], group: RequestGroup, asgi: Asgi
    ) -> None:
        assert isinstance(answer, ResponsesAnswer)
        run: BackgroundRun | Turn | None = answer.request.run
        if run is not None:
            run.accept(group)
        only_prepares = answer.exchange.only_prepares
        if answer.request.stream and not only_prepares:
            await self._send_events(answer, answer.chunks(), group, asgi)
            return
        await wait_for_end(group, asgi.receive)
        finish = answer.without_output if only_prepares else answer.whole
        response = await self._serving.executor.run(
            group.weight, lambda: finish(read_outputs(group))
        )
        await self._end(answer.exchange, response, run)
        if answer.request.stream:
            await send_events(repeat_events(response, 0), asgi)
        elif run is None:
            await json_response(response)(*asgi)

    async def _send_events(
        self,
        answer: ResponsesAnswer,
        chunks: ResponseChunks,
        group: RequestGroup,
        asgi: Asgi,
        resumption: Resumption | None = None,
    ) -> None:
        """Send the events of a stream that `chunks` has not written, and store the response."""

        async def before_end() -> None:
            await self._end(answer.exchange, chunks.final, answer.request.run)

        events = chunks.with_progress()
        if answer.exchange.is_recorded:
            events = identify(events, answer.exchange.response_id, group, asgi)
        if resumption is not None:
            events = resumption.without_end(events)
        await self._stream(asgi).run(asgi.receive, group, events, before_end)

    async def _end(
        self, exchange: Exchange, response: Json | None, run: BackgroundRun | Turn | None
    ) -> None:
        """Store a response that has ended, before its client receives the end. A run is stored after its events.

        If the store fails, answer nevertheless.
        """
        if response is None:
            return
        if run is not None:
            run.response = response
        kept: KeptResponses | None = exchange.kept
        if kept is not None and response["status"] != "failed":
            kept.add(exchange, response)
        if run is not None:
            return
        try:
            await self._states.save(exchange, response)
        except APIError as error:
            logger.debug("cannot store %s: %s", exchange.response_id, error.message)
            response["store"] = False


async def _drop(events: bytes) -> None:
    """Drop the events of a response that is not streamed."""


class InputTokens(RouteHandlers):
    """Counts the tokens of the prompt of a response."""

    def __init__(self, serving: Serving, intake: Intake, states: ResponseStates) -> None:
        super().__init__(serving, intake)
        self._states = states

    @reads(InputTokensRequest)
    async def count(self, http: Request, body: InputTokensRequest, size: int) -> Response:
        """Return the number of tokens of the prompt."""
        serving = self._serving
        serving.verify_model(body.model)
        serving.verify_tokenizer("input")
        owner = http.scope["state"]["owner"]
        context, items = await self._states.read_items(body, new_id("resp"), owner)
        size += sum(map(size_of, context))
        files = await self._states.load_files(context + items, owner)
        size += sum(len(content) for _, content in files.values())
        shown: ResponseFields = body
        if has_mcp(body.tools):
            servers = serving.config.frontend.mcp_servers
            shown = await with_listed_tools(body, context + items, servers)
        places: dict[int, str] = {}
        with renaming(partial(sent_name, body, places)):
            request = await serving.executor.run(
                size, lambda: translate_prompt(shown, context, items, files, places)
            )
            chat = await render_request(serving, request, size)
        return json_response(
            {"object": "response.input_tokens", "input_tokens": len(chat.token_ids)}
        )
