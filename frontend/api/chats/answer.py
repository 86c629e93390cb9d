"""The answers of `/v1/chat/completions`: parsing of the output, whole bodies, and chunks of streams."""

from __future__ import annotations

from typing import ClassVar, Final

from ...chat import ChatOutputParser, MessageDelta, ToolParser
from ...chat.messages import text_of_content
from ...client.engine_client import Delta, Sequence
from ...http.json_pieces import encode_whole
from ..answer import Answer, Outputs
from ..generation import PreparedPrompt, matched_stop
from ..inputs.hidden_states import last_states
from ..logprobs import Json
from ..receipts.meta_info import choice_meta_info
from ..schema import ChatCompletionRequest
from ..serving import Serving
from ..streaming.chunks import Chunks
from ..streaming.event_stream import ChunkEncoder
from ..tools.call_writer import CallWriter
from ..tools.forced_calls import ForcedCallParser, NamedCall, RequiredCalls
from ..tools.tool_choice import ToolChoice, ToolMode


class _Substitute:
    """Replaces an empty content by the reasoning, for requests with vLLM's `force_nonempty_content`.

    A model that ends at its token limit may have written only reasoning. Clients that read only the content then get
    this text. In a stream, whose reasoning was already sent, the last chunk repeats it as content.
    """

    def __init__(self, request: ChatCompletionRequest) -> None:
        kwargs = request.chat_template_kwargs or {}
        self._is_wanted = kwargs.get("force_nonempty_content") is True
        self._is_stream = bool(request.stream)
        self._reasoning: list[str] = []

    def apply(self, message: MessageDelta, *, is_end: bool) -> None:
        """Change the last delta, or the whole message, if there was no content and no tool call."""
        if not self._is_wanted:
            return
        self._reasoning.append(message.reasoning)
        if message.content.strip() or message.tool_calls:
            self._is_wanted = False
        elif is_end:
            message.content = "".join(self._reasoning)
            if not self._is_stream:
                message.reasoning = ""


class ChatChoice:
    """One sequence of a chat, and the parsers of its output."""

    def __init__(
        self,
        serving: Serving,
        request: ChatCompletionRequest,
        tools: ToolChoice,
        prompt: PreparedPrompt,
        answer_id: str,
        index: int,
    ) -> None:
        # A reference to the answer would be a cycle, which keeps both until a garbage collection.
        self._serving, self._request, self._tools, self.index = serving, request, tools, index
        is_constrained = prompt.params.structured_output is not None
        self._reasoning = None
        if request.separate_reasoning is not False:
            text = prompt.text or ""
            self._reasoning = serving.formats.new_reasoning_parser(text, constrained=is_constrained)
        self._held_reasoning = ""
        self._substitute = _Substitute(request) if self._reasoning is not None else None
        self._parser = ChatOutputParser(self._reasoning, self._new_tool_parser(answer_id))
        self.is_plain = self._reasoning is None and tools.mode is ToolMode.NONE
        self.calls = CallWriter(tools)
        self.called_tools = False
        self._token_ids: list[int] = []
        self._hides_tokens = self._reasoning is not None and request.include_reasoning is False
        self._num_counted, self._has_answer = 0, self._reasoning is None
        # The tokens before the newest reasoning.
        self._num_earlier = 0

    def _new_tool_parser(self, answer_id: str) -> ToolParser | None:
        # If another frontend continues the stream, the calls must have the same IDs.
        messages = self._request.messages
        call_ids = self._serving.formats.call_ids(f"{answer_id} {self.index}", messages)
        tools = self._tools
        match tools.mode:
            case ToolMode.NAMED:
                call = NamedCall(tools.name, call_ids, is_input=tools.writes_input)
                return ForcedCallParser(call)
            case ToolMode.REQUIRED:
                return ForcedCallParser(RequiredCalls(call_ids))
            case ToolMode.AUTO:
                return self._serving.formats.new_tool_parser(tools.functions, call_ids)
            case ToolMode.NONE:
                return None

    @property
    def num_reasoning_tokens(self) -> int | None:
        """The number of reasoning tokens; None if reasoning is not separated from content."""
        if self._reasoning is None:
            return None
        return self._reasoning.num_reasoning_tokens(self._token_ids, self._serving.tokenizer)

    def count_reasoning(self, message: MessageDelta) -> int:
        """Return the number of new reasoning tokens; `message` is the newest piece of a stream."""
        if self._has_answer:
            return 0
        before = self._num_counted
        self._has_answer = bool(message.content or message.tool_calls)
        # To search all tokens for the end of the reasoning takes long, so this is done once, when the answer begins.
        exact = self.num_reasoning_tokens if self._has_answer else None
        self._num_counted = self._num_earlier if exact is None else exact
        return self._num_counted - before

    def read(self, delta: Delta) -> MessageDelta:
        """Return the message fields that a piece of the text adds: a delta of a stream, or the whole text.

        A call that was cut off has the arguments that the model wrote before. If the request leaves out the reasoning,
        its token ids and log-probabilities are removed from `delta`.
        """
        is_end = delta.finish_reason is not None
        message = self._parser.feed(delta.text, is_end)
        if self._reasoning is not None:
            if message.reasoning:
                self._num_earlier = len(self._token_ids)
            self._token_ids += delta.token_ids
            if self._substitute is not None:
                self._substitute.apply(message, is_end=is_end)
            self._show_reasoning(message, is_end=is_end)
            if self._hides_tokens:
                self._hide_tokens(delta, message)
        if not self._tools.is_parallel:
            message.tool_calls = [call for call in message.tool_calls if call.index == 0]
        message.tool_calls = self.calls.translate(message.tool_calls, is_end=is_end)
        self.called_tools |= bool(message.tool_calls)
        return message

    def _show_reasoning(self, message: MessageDelta, *, is_end: bool) -> None:
        """Remove the reasoning from a message, or hold it back until it is complete, if the request asks for that."""
        request = self._request
        if request.include_reasoning is False:
            message.reasoning = ""
        elif request.stream_reasoning is False:
            self._held_reasoning += message.reasoning
            message.reasoning = ""
            if is_end or message.content or message.tool_calls:
                message.reasoning, self._held_reasoning = self._held_reasoning, ""

    def _hide_tokens(self, delta: Delta, message: MessageDelta) -> None:
        """Remove the tokens before the content or the first call from a delta."""
        num_hidden = len(delta.token_ids)
        if message and self._reasoning is not None:
            # A delta may have the end of the reasoning and the beginning of the content.
            total, tokenizer = len(self._token_ids), self._serving.tokenizer
            count = self._reasoning.num_hidden_tokens(self._token_ids, tokenizer)
            self._hides_tokens = count == total
            num_hidden = max(0, num_hidden - (total - count))
        delta.token_ids = delta.token_ids[num_hidden:]
        if delta.logprobs is not None:
            delta.logprobs = list(delta.logprobs)[num_hidden:]

    def ending(self, delta: Delta) -> Json:
        """Return all fields of a choice except its message or delta. It has no log-probabilities."""
        request = self._request
        reason = delta.finish_reason
        if reason == "stop" and self.called_tools and self._tools.mode is not ToolMode.NAMED:
            reason = "function_call" if self._tools.is_legacy else "tool_calls"
        choice: Json = {"logprobs": None, "finish_reason": reason, "stop_reason": delta.stop_reason}
        if reason is not None:
            choice["matched_stop"] = matched_stop(delta)
        if request.return_token_ids:
            choice["token_ids"] = delta.token_ids
        elif not request.stream:
            choice["token_ids"] = None
        return choice


class ChatAnswer(Answer[ChatCompletionRequest]):
    """The answer to one conversation, in OpenAI's format. Other dialects override `whole` and `chunks`."""

    shows_abort = True

    def __init__(
        self,
        serving: Serving,
        request: ChatCompletionRequest,
        tools: ToolChoice,
        prompt: PreparedPrompt,
        group: Outputs,
        envelope: Json,
    ) -> None:
        super().__init__(serving, request, group, envelope)
        self.tools = tools
        self.role = serving.config.frontend.response_role
        if request.continue_final_message and request.messages:
            self.role = request.messages[-1]["role"]
        self.echoed = _echoed(request, self.role)
        self.prompt = prompt
        self.choices = [
            ChatChoice(serving, request, tools, prompt, envelope["id"], index)
            for index in range(len(group.sequences))
        ]

    def usage(self) -> Json:
        """Return the final usage, including reasoning tokens."""
        predicts = self.request.prediction is not None
        return (
            self._count_usage(reasoning_tokens=self._num_reasoning(), predicts=predicts)
            | self.receipt()
        )

    def usage_so_far(self) -> Json:
        """Return the usage of the tokens read so far. This is slow for many sequences."""
        return self._count_usage(reasoning_tokens=self._num_reasoning())

    def _num_reasoning(self) -> int | None:
        counts = [choice.num_reasoning_tokens for choice in self.choices]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None

    def add_reasoning(self, usage: Json, num_tokens: int) -> None:
        """Add reasoning tokens to a usage that `usage_so_far` returned."""
        if num_tokens:
            usage["reasoning_tokens"] += num_tokens
            usage["completion_tokens_details"]["reasoning_tokens"] += num_tokens

    def whole(self, outputs: list[Delta]) -> Json:
        """Return the complete response body."""
        choices = self.render_choices(
            outputs,
            lambda index, position: self._whole_choice(
                index, self.choices[position], outputs[position]
            ),
        )
        answer = self.envelope | {"choices": choices}
        answer["usage"] = self.usage()
        answer |= {"prompt_logprobs": None, "prompt_token_ids": None}
        if self.request.prompt_logprobs is not None:
            positions = self._group.sequences[0].iterate_prompt_logprobs()
            answer["prompt_logprobs"] = self.renderer.prompt(positions)
        if self.request.return_token_ids:
            answer["prompt_token_ids"] = self.prompt.token_ids.tolist()
        if self.request.return_prompt_text:
            answer["prompt_text"] = self.prompt.text
        return answer | self.timing() | self.transfer() | self.extension()

    def ending_of(self, choice: ChatChoice, delta: Delta) -> Json:
        """Return all fields of a choice except its message or delta."""
        ending = choice.ending(delta)
        if self.request.logprobs and delta.logprobs is not None:
            lists_chosen = bool(self.request.logprob_token_ids)
            ending["logprobs"] = self.renderer.chat(delta.logprobs, lists_chosen=lists_chosen)
        return ending

    def _whole_choice(self, index: int, choice: ChatChoice, output: Delta) -> Json:
        message = self._message(choice, output)
        whole = {"index": index, "message": message} | self.ending_of(choice, output)
        if self.request.return_prompt_token_ids:
            whole["prompt_token_ids"] = self.prompt.token_ids.tolist()
        whole |= last_states(self._group.sequences[choice.index])
        if self.request.return_meta_info:
            sequence = self._group.sequences[choice.index]
            version = self.serving.weight_version(sequence.core_index)
            whole["meta_info"] = choice_meta_info(
                self.envelope["id"], sequence, output, self.renderer, version
            )
        return whole

    def chunks(self) -> ChunkEncoder:
        """Return the encoder that writes the response as stream chunks."""
        return ChatChunks(self).with_progress()

    def _message(self, choice: ChatChoice, output: Delta) -> Json:
        delta = choice.read(output)
        content = self.echoed + delta.content
        message: Json = {"role": self.role, "content": content, "refusal": None}
        if delta.tool_calls:
            message["content"] = content or None
            message |= choice.calls.whole(delta.tool_calls)
        # Clients with reasoning support read these fields even if there is no reasoning.
        return message | (show_reasoning(delta) if self.serving.formats.separates_reasoning else {})


def show_reasoning(delta: MessageDelta) -> Json:
    """Return the reasoning under both field names that clients read."""
    reasoning = delta.reasoning or None
    return {"reasoning": reasoning, "reasoning_content": reasoning}


def _echoed(request: ChatCompletionRequest, role: str) -> str:
    """Return the text that `echo` puts before the answer: the last message, if it has the same role as the answer."""
    if not (request.echo and request.messages) or request.messages[-1].get("role") != role:
        return ""
    return text_of_content(request.messages[-1].get("content"))


_CONTENT: Final = b'"content":"'


class ChatChunks(Chunks[ChatAnswer]):
    """Writes the chunks of a chat."""

    __slots__ = ("_without_role",)
    _empty_choice: ClassVar[Json] = {"delta": {}, "logprobs": None}

    def __init__(self, answer: ChatAnswer) -> None:
        request = answer.request
        has_more = request.logprobs or request.return_token_ids
        text_parts = None if has_more else (b'"delta":{' + _CONTENT, b'"}')
        super().__init__(answer, text_parts, is_plain=answer.choices[0].is_plain)
        self._without_role = set(range(len(answer.choices)))

    def encode(self, sequence: Sequence) -> bytes:
        """Return the events for the new output of a sequence, after the one with its role."""
        if sequence.position not in self._without_role:
            return super().encode(sequence)
        self._without_role.remove(sequence.position)
        return self._opening(sequence.position) + super().encode(sequence)

    def _render(self, sequence: Sequence) -> bytes:
        """Return the chunk with the new output; b"" while the parsers hold it back."""
        delta = self.read(sequence)
        index = sequence.position
        choice = self._answer.choices[index]
        message = choice.read(delta)
        if self._usage is not None:
            self._answer.add_reasoning(self._usage, choice.count_reasoning(message))
        if self._text_parts and delta.finish_reason is None and message.is_text:
            return self._text_chunk(index, message)
        ending = self._answer.ending_of(choice, delta)
        has_output = message or delta.finish_reason or ending["logprobs"] or "token_ids" in ending
        if not has_output:
            return b""
        content: Json = {"content": message.content} if message.content else {}
        if message.reasoning:
            content |= show_reasoning(message)
        if message.tool_calls:
            content |= choice.calls.pieces(message.tool_calls)
        return self.chunk({"index": index, "delta": content} | ending)

    def _text_chunk(self, index: int, message: MessageDelta) -> bytes:
        """Return the chunk with content or reasoning, but not both, and nothing else."""
        text = encode_whole(message.content or message.reasoning)[1:-1]
        if message.content:
            return self._fill(index, text)
        before, after = self._text_parts[index]
        reasoning = b'"reasoning":"%b","reasoning_content":"%b' % (text, text)
        return b"".join((before.removesuffix(_CONTENT), reasoning, after))

    def _opening(self, index: int) -> bytes:
        """Return the chunk with the role, and the chunk with the echoed text if there is one."""
        answer = self._answer
        # A helper that joins deltas gets the message of a whole answer, which has no content beside forced calls.
        delta = {"role": answer.role, "content": None if answer.tools.constraint else ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        more: Json = {}
        if answer.request.return_token_ids:
            more["prompt_token_ids"] = answer.prompt.token_ids.tolist()
        if answer.request.return_prompt_text:
            more["prompt_text"] = answer.prompt.text
        role = self.chunk(choice, **more)
        if not answer.echoed:
            return role
        return role + self.chunk(choice | {"delta": {"content": answer.echoed}})
