"""`POST /v1/responses/compact`: replaces the items of a long conversation by a summary that the model writes."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from ...client.engine_client import Delta
from ...http.errors import renaming
from ...http.request_headers import read_deadline
from ...http.routing import Asgi
from ..bodies.intake import Intake
from ..bodies.request_memory import MemoryLease
from ..chats.prompt import RenderedChat
from ..logprobs import Json
from ..routes.chat_completions import ChatCompletions, ChatPlan
from ..schema import ChatCompletionRequest
from ..schema.responses import CompactRequest
from ..serving import Serving
from .answer import ResponsesAnswer
from .ids import item_id, new_id
from .items import encode_text
from .request import ResponseChat, sent_name, translate_prompt
from .states import ResponseStates, size_of
from .truncation import drop_oldest

MAX_SUMMARY_TOKENS: Final = 2048
"""Maximum tokens of a summary. With a short context, it is at most a quarter of the context."""

_INSTRUCTIONS: Final = (
    "Summarize this conversation so that it can be continued from the summary alone. Keep the task and its state, "
    "decisions and their reasons, names, paths, numbers, results of tools, and what is still to do. Write only the summary."
)

_KEPT_ROLES: Final = ("system", "developer")


class CompactionChat(ResponseChat, kw_only=True):
    """The chat completion request that asks for a summary. The items in `kept` stay unchanged."""

    kept: Any = None


class CompactionAnswer(ResponsesAnswer):
    """The answer to one request, in the format of compactions."""

    request: CompactionChat

    def whole(self, outputs: list[Delta]) -> Json:
        """Return the complete response body."""
        [output] = outputs
        summary = self.choices[0].read(output).content.strip()
        identifier = f"resp_{self.envelope['id'].removeprefix('chatcmpl-')}"
        item = {
            "id": item_id("compaction", new_id("resp"), 0),
            "type": "compaction",
            "encrypted_content": encode_text(summary),
        }
        return {
            "id": identifier,
            "object": "response.compaction",
            "created_at": self.envelope["created"],
            "model": self.envelope["model"],
            "output": [*self.request.kept, item],
            "usage": self.token_counts(),
        }


class Compaction(ChatCompletions):
    """The compaction endpoint. Its answer has the system messages, followed by the summary as an item."""

    body_schema = CompactRequest
    cuts_max_tokens = True
    answer_type = CompactionAnswer

    def __init__(self, serving: Serving, intake: Intake, states: ResponseStates) -> None:
        super().__init__(serving, intake)
        self._states = states

    @property
    def _max_tokens(self) -> int:
        return min(MAX_SUMMARY_TOKENS, max(1, self._serving.config.model.max_model_len // 4))

    async def _answer(self, asgi: Asgi, lease: MemoryLease) -> None:
        serving, owner = self._serving, asgi.state["owner"]
        deadline = read_deadline(asgi.scope, serving.config.frontend.default_deadline_s)
        body, size = await self._intake.receive(asgi, CompactRequest, lease)
        context, items = await self._states.read_items(body, new_id("resp"), owner)
        size += sum(map(size_of, context))
        files = await self._states.load_files(context + items, owner)
        size += sum(len(content) for _, content in files.values())

        def translate() -> CompactionChat:
            prompt = translate_prompt(body, context, items, files, {})
            return CompactionChat(
                model=prompt.model,
                messages=[*(prompt.messages or ()), {"role": "user", "content": _INSTRUCTIONS}],
                max_tokens=self._max_tokens,
                reasoning_effort=prompt.reasoning_effort,
                chat_template_kwargs=prompt.chat_template_kwargs,
                kept=[item for item in context + items if item.get("role") in _KEPT_ROLES],
            )

        # The oldest messages may be dropped, so that numbers of messages are those of other items.
        with renaming(partial(sent_name, body, {})):
            request = await serving.executor.run(size, translate)
            await self._generate(asgi, lease, request, size, deadline)

    async def _render(
        self, plan: ChatPlan, request: ChatCompletionRequest, size: int
    ) -> RenderedChat:
        """Return the prompt. If the conversation does not fit into the context, the prompt has only its end."""

        async def render(kept: ChatCompletionRequest) -> RenderedChat:
            return await super(Compaction, self)._render(plan, kept, size)

        max_model_len = self._serving.config.model.max_model_len
        return await drop_oldest(request, render, max_model_len, self._max_tokens)
