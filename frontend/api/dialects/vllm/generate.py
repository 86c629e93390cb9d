"""vLLM's `/inference/v1/generate`, which continues token ids and returns token ids.

Programs for reinforcement learning use it, because tokens may differ after they are decoded and encoded again. The
fields are those of vLLM 0.33 with `--enable-scale-out`.
"""

from __future__ import annotations

import base64
import io
from typing import ClassVar, Final

import msgspec
import numpy as np

from .....protocol.sampling_params import PromptCandidates, SamplingParams
from ....client.engine_client import Delta, PositionLogprobs, Sequence
from ....client.prompt_candidates import candidate_scores, parse_candidates, without_candidates
from ....http.errors import bad_request, renamer, renaming, wrong
from ....http.json_pieces import encode_list
from ...answer import PromptAnswer
from ...bodies.body import make_decoder
from ...bodies.intake import Intake
from ...chats.prompt import MARKED_TOKENS
from ...generation import PreparedPrompt
from ...logprobs import Json, finite
from ...prompts import Prompt
from ...routes.completions import Completions
from ...schema import UNLIMITED, ChatCompletionRequest, CompletionRequest
from ...schema.refused import verify_supported
from ...schema.vllm import VllmGenerateRequest, VllmSampling
from ...serving import Serving
from ...streaming.chunks import Chunks
from ...structured.constraint import Constraint
from ...tools.tool_choice import ToolChoice, parse_tool_choice
from .message import Conversation

COPIED: Final = sorted({*VllmSampling.__struct_fields__} & {*CompletionRequest.__struct_fields__})
"""The sampling parameters that have the same name and meaning in completion requests."""

_OUTPUT_MODES: Final = ("tokens", "text", "derender")

_BUDGET: Final = "thinking_token_budget"

_REFUSED: Final = (
    *("extra_args", "watermarking"),
    *("routed_experts_prompt_start", "trace_decode_token_ids"),
)

_rename = renamer({"prompt": "token_ids"})

_NEUTRAL: Final = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""The defaults of sampling parameters. Those of the model's publisher do not apply, as in vLLM."""


class _Chat(msgspec.Struct):
    """A conversation, by which an answer is parsed."""

    request: ChatCompletionRequest
    tools: ToolChoice


class TokenPrompt(CompletionRequest, kw_only=True):
    """A completion request from `/inference/v1/generate`."""

    output_mode: str = "tokens"
    # The conversation of the output mode "derender".
    chat: _Chat | None = None
    # True if a constraint applies only after the reasoning.
    reasons_first: bool = False
    # Maximum tokens of the reasoning; -1 for no limit.
    max_reasoning_tokens: int = -1
    # Tokens to score in place of those of the prompt.
    candidates: PromptCandidates | None = None

    def sent_name(self, name: str) -> str:
        """Return the name of a field in the request."""
        return f"sampling_params.{name}" if name in COPIED else _rename(name)


class TokenAnswer(PromptAnswer):
    """The tokens that continue a prompt."""

    shows_abort = True

    request: TokenPrompt

    def whole(self, outputs: list[Delta]) -> Json:
        """Return the complete response body."""
        choices = self.render_choices(
            outputs, lambda index, position: self.choice(index, outputs[position])
        )
        sequence = self._group.sequences[0]
        answer = self.envelope | {"choices": choices, "usage": self.usage()}
        positions = sequence.iterate_prompt_logprobs()
        if (candidates := self.request.candidates) is not None:
            file = io.BytesIO()
            np.save(file, candidate_scores(list(positions), candidates))
            answer["prompt_token_id_logprobs"] = base64.b64encode(file.getvalue()).decode()
            positions = without_candidates(sequence.iterate_prompt_logprobs(), candidates)
        if self.request.prompt_logprobs is not None:
            answer["prompt_logprobs"] = self.renderer.prompt(positions)
        return answer | self.prompt_fields(sequence) | self.timing() | self.transfer()

    def chunks(self) -> _Chunks:
        """Return the encoder of a stream."""
        return _Chunks(self)

    def prompt_fields(self, sequence: Sequence) -> Json:
        """Return the token ids of the prompt if the request asks for them; else {}."""
        if not self.request.return_token_ids:
            return {}
        return {"prompt_token_ids": self.prompt_of(sequence).token_ids.tolist()}

    def choice(self, index: int, output: Delta) -> Json:
        """Return the choice with new output."""
        choice: Json = {
            "index": index,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "token_ids": output.token_ids,
            "logprobs": None,
        }
        mode, chat = self.request.output_mode, self.request.chat
        if mode == "text":
            choice["text"] = output.text
        if output.logprobs is not None:
            choice["logprobs"] = (
                {"content": encode_list(map(self._position, output.logprobs), at_once=1)}
                if mode == "tokens"
                else self.renderer.chat(output.logprobs)
            )
        if chat is None:
            return choice
        [prompt] = self._prompts
        prompt = msgspec.structs.replace(prompt, text=_end_of(prompt, self.serving))
        conversation = Conversation(self.serving, chat.request, chat.tools, prompt, self.envelope)
        if chat.request.include_reasoning is False:
            # They would show the reasoning.
            choice |= {"token_ids": None, "logprobs": None}
        shown = {name: choice[name] for name in ("token_ids", "logprobs")}
        return conversation.whole_choice(index, output) | shown

    def _position(self, position: PositionLogprobs) -> Json:
        entry = _entry(position.token_id, position.logprob, position.rank)
        listed = bool(self.request.logprob_token_ids)
        top = [
            _entry(token_id, logprob, None if listed else rank)
            for rank, (token_id, logprob) in enumerate(position.top, 1)
            if token_id != position.token_id
        ]
        return entry | {"top_logprobs": encode_list([entry, *top])}


class _Chunks(Chunks[TokenAnswer]):
    __slots__ = ()
    _empty_choice: ClassVar[Json] = {"token_ids": [], "logprobs": None}

    def _render(self, sequence: Sequence) -> bytes:
        delta, answer = self.read(sequence), self._answer
        first = sequence.num_read_tokens == len(delta.token_ids)
        more = answer.prompt_fields(sequence) if first else {}
        return self.chunk(answer.choice(sequence.position, delta), **more)


class VllmGenerate(Completions):
    """The endpoint that continues token ids."""

    body_schema = VllmGenerateRequest
    id_prefix = "generate-tokens"
    answer_type = TokenAnswer
    object_type = "generate.tokens"

    def __init__(self, serving: Serving, intake: Intake) -> None:
        super().__init__(serving, intake)
        self._chats = make_decoder(ChatCompletionRequest, strict=True)

    async def _translate(self, body: VllmGenerateRequest, size: int) -> CompletionRequest:
        params = body.sampling_params or VllmSampling()
        if params.stop and params.detokenize is False:
            raise bad_request("sampling_params.stop", "needs detokenize=true")
        mode = body.output_mode or "tokens"
        if mode not in _OUTPUT_MODES:
            raise wrong("output_mode", '"tokens", "text" or "derender"', mode)
        if mode != "tokens":
            self._serving.verify_tokenizer("output_mode", 'send "tokens"')
            if params.detokenize is False:
                name = "sampling_params.detokenize"
                raise bad_request(name, f'must be true with output_mode "{mode}"')
        verify_supported(params, _REFUSED, "sampling_params.")
        if not body.token_ids:
            raise bad_request("token_ids", "must be an array of at least one token id")
        fields = {name: getattr(params, name) for name in COPIED}
        for name, value in _NEUTRAL.items():
            if fields[name] is None:
                fields[name] = value
        if params.max_tokens is None:
            fields["max_tokens"] = UNLIMITED
        elif params.max_tokens < 1:
            raise wrong("sampling_params.max_tokens", "at least 1", params.max_tokens)
        prompt = TokenPrompt(
            **fields,
            prompt=[*body.token_ids],
            model=body.model,
            stream=body.stream,
            stream_options=body.stream_options,
            return_token_ids=body.return_token_ids,
            priority=body.priority,
            cache_salt=body.cache_salt,
            kv_transfer_params=body.kv_transfer_params,
            request_id=body.request_id,
            data_parallel_rank=body.data_parallel_rank,
            user=body.user,
            output_mode=mode,
            chat=await self._read_chat(body, size) if mode == "derender" else None,
            reasons_first=body.reasoning_ended is False,
            max_reasoning_tokens=self._serving.formats.verify_reasoning_limit(
                params.thinking_token_budget, f"sampling_params.{_BUDGET}"
            ),
        )
        if params.prompt_logprob_token_ids is not None:
            if body.stream:
                name = "sampling_params.prompt_logprob_token_ids"
                raise bad_request(name, "cannot be streamed; send stream=false")
            with renaming("sampling_params.{}".format):
                prompt.candidates = await self._serving.executor.run(
                    size,
                    parse_candidates,
                    params.prompt_logprob_token_ids,
                    params.prompt_logprob_start or 0,
                    len(body.token_ids),
                    self._serving.config.model.vocab_size,
                    self._serving.config.frontend.max_logprobs,
                )
        return prompt

    async def _read_chat(self, body: VllmGenerateRequest, size: int) -> _Chat:
        """Return the reasoning and tool settings by which an answer is parsed.

        Raises:
            APIError: `parse_context` is missing or invalid, or the answer is a stream (400).
        """
        formats, given = self._serving.formats, body.parse_context
        if body.stream:
            raise bad_request("stream", 'must be false with output_mode "derender"')
        has_calls = formats.calls_tools and not formats.describes_tools
        if given is None and (formats.separates_reasoning or has_calls):
            raise bad_request("parse_context", "is required; send what the render route returned")
        fields = {"tool_choice": "none"} | (given or {})
        fields.pop("history_tool_call_cnt", None)
        with renaming("parse_context.{}".format):
            encoded = msgspec.json.encode(fields)
            request = await self._serving.executor.run(size, self._chats.decode, encoded)
            tools = await self._serving.grammar_checks.run(size, parse_tool_choice, request)
        return _Chat(request, tools)

    def _params(self, request: CompletionRequest, constraint: Constraint | None) -> SamplingParams:
        assert isinstance(request, TokenPrompt)
        params = super()._params(request, constraint)
        if request.candidates is not None:
            params.prompt_logprobs = params.prompt_logprobs or 0
            params.prompt_candidates = request.candidates
        return params

    def _fit(
        self, prompt: Prompt, request: CompletionRequest, params: SamplingParams
    ) -> PreparedPrompt:
        assert isinstance(request, TokenPrompt)
        prepared = super()._fit(prompt, request, params)
        if not request.reasons_first and request.max_reasoning_tokens < 0:
            return prepared
        serving, limit = self._serving, request.max_reasoning_tokens
        text = _end_of(prompt, serving)
        prepared.params.structured_output = serving.formats.constrain_after_reasoning(
            prepared.params.structured_output, text, limit
        )
        return prepared

    def _envelope(self, request: CompletionRequest, answer_id: str, created: int) -> Json:
        assert isinstance(request, TokenPrompt)
        envelope = super()._envelope(request, answer_id, created)
        # The ID by which the request can be aborted.
        request_id = request.request_id or answer_id.removeprefix(f"{self.id_prefix}-")
        return envelope | {"request_id": request_id, "output_mode": request.output_mode}


def _end_of(prompt: Prompt | PreparedPrompt, serving: Serving) -> str:
    """Return the end of a prompt, which shows if the answer begins with reasoning."""
    return serving.tokenizer.decode(prompt.token_ids[-MARKED_TOKENS:].tolist())


def _entry(token_id: int, logprob: float, rank: int | None) -> Json:
    return {"token_id": token_id, "logprob": finite(logprob), "rank": rank}
