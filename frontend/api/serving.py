"""What every endpoint of one frontend shares."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence

import msgspec

from ... import __version__
from ...protocol.config import EngineConfig
from ...protocol.errors import ParameterError
from ...protocol.sampling_params import SamplingParams, StructuredOutput
from ...protocol.supervisor_messages import Stage
from ..chat import (
    ChatTemplate,
    JsonToolParser,
    ModelTemplates,
    ReasoningParser,
    ToolParser,
    call_rules,
    openai_call_id,
    reasoning_parser,
    tool_parser,
)
from ..engine_client import EngineClient
from ..structured_output import verify_structured_output
from ..tokenizer import Tokenizer
from .errors import APIError, bad_request, echo, unavailable
from .structured import Constraint


class Serving:
    """The model, its tokenizer, the engine, and how far the server has come.

    `stage` goes STARTING, WARMING, READY, DRAINING; `detail` says what it waits for.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        templates: ModelTemplates,
        engine: EngineClient,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._templates = templates
        self.engine = engine
        self._begin_time = time.monotonic()
        self._start_s = 0.0
        self._drain_deadline = 0.0
        self.stage = Stage.STARTING
        self.detail = "waiting for the model"
        tools_name = config.frontend.tool_call_parser
        self._tool_parser = tool_parser(tools_name) if tools_name else None
        self.new_call_id = self._tool_parser().new_id if self._tool_parser else openai_call_id
        reasoning_name = config.frontend.reasoning_parser
        self._reasoning_parser = reasoning_parser(reasoning_name) if reasoning_name else None
        self.served_name = config.model.served_names[0]
        limit = config.frontend.default_sampling.get("max_tokens")
        self.max_tokens_limit = None if limit is None else int(limit)
        self.fingerprint = _fingerprint(config)
        self.off_loop = engine.off_loop

    def enter(self, stage: Stage, detail: str) -> None:
        now = time.monotonic()
        if stage is Stage.READY:
            self._start_s = now - self._begin_time
        elif stage is Stage.DRAINING:
            self._drain_deadline = now + self.config.frontend.shutdown_timeout_s
        self.stage, self.detail = stage, detail

    @property
    def retry_after_s(self) -> float:
        """When this server, or the one in its place, may be ready: after the rest of the drain and a start.

        A start that is under way is expected to take as long again as it has.
        """
        now = time.monotonic()
        return max(self._drain_deadline - now, 0.0) + (self._start_s or now - self._begin_time)

    @property
    def is_ready(self) -> bool:
        return self.stage is Stage.READY and self.engine.ready

    @property
    def num_replicas(self) -> int:
        return self.config.parallel.data_parallel_size

    @property
    def stalled_process(self) -> str:
        """Why a server that was ready cannot serve now: the process that makes no progress; "" if it can."""
        if self.stage is not Stage.READY or self.engine.watch is None:
            return ""
        return self.engine.watch.find_stalled_process()

    @property
    def degraded_replicas(self) -> str:
        """The processes because of which replicas make no progress, though others may serve."""
        if self.stage is not Stage.READY or self.engine.watch is None:
            return ""
        return self.stalled_process or "; ".join(
            self.engine.watch.find_degraded_replicas().values()
        )

    def verify_model(self, name: str | None) -> None:
        """Raises APIError 404 for a model that is not served here."""
        if name and name not in self.config.model.served_names:
            raise APIError(
                404,
                f"The model {echo(name)} does not exist; served: "
                f"{', '.join(self.config.model.served_names)}",
                param="model",
                code="model_not_found",
            )

    def chat_template(self, with_tools: bool) -> ChatTemplate:
        """Raises APIError 400 if there is none."""
        template = self._templates.choose(with_tools)
        if template is None:
            raise bad_request(
                "messages",
                "this model has no chat template: use /v1/completions, "
                "or start the server with --chat-template",
            )
        return template

    def new_tool_parser(self) -> ToolParser:
        """Raises APIError 400 if the server was started without one."""
        if self._tool_parser is None:
            raise bad_request(
                "tools",
                "tools with tool_choice auto need a parser for this model's calls: start the server "
                "with --enable-auto-tool-choice --tool-call-parser NAME, or use tool_choice "
                "required, none or a named function",
            )
        return self._tool_parser()

    def call_rules(self, names: Sequence[str], *, parallel: bool) -> str | None:
        """How the model calls these functions, as rules of a grammar; None if those cannot tell it."""
        parser = self.new_tool_parser()
        if not isinstance(parser, JsonToolParser):
            return None
        return call_rules(parser.format, names, self.tokenizer, parallel=parallel)

    def new_reasoning_parser(
        self, prompt: str, *, constrained: bool = False
    ) -> ReasoningParser | None:
        """For the answer to `prompt`; None if the server was started without one."""
        if self._reasoning_parser is None:
            return None
        return self._reasoning_parser(prompt, constrained=constrained)

    @property
    def tells_reasoning(self) -> bool:
        """Whether reasoning is told from content."""
        return self._reasoning_parser is not None

    @property
    def has_special_reasoning_marks(self) -> bool:
        """Whether reasoning can only be told from content by special tokens in the text."""
        parser = self.new_reasoning_parser("")
        return parser is not None and parser.has_special_marks(self.tokenizer)

    def leave_reasoning_free(
        self, constraint: StructuredOutput | None, prompt: str
    ) -> StructuredOutput | None:
        """The constraint on the answer to `prompt`, which holds after the reasoning if that can be told."""
        if constraint is None or self._reasoning_parser is None:
            return constraint
        return self._reasoning_parser(prompt).leave_free(constraint, self.tokenizer)

    def verify_serving(self) -> None:
        """Raise APIError 503 while there is no engine to send a request to."""
        if self.stage is Stage.STARTING:
            raise unavailable(f"The server is starting: {self.detail}", self.retry_after_s)
        if self.stage is Stage.DRAINING:
            raise unavailable("The server is shutting down", self.retry_after_s)

    def verify_sampling(self, params: SamplingParams) -> None:
        """Raises ParameterError."""
        params.verify(
            vocab_size=self.config.model.vocab_size,
            max_logprobs=self.config.frontend.max_logprobs,
        )

    async def verify_constraint(self, constraint: Constraint | None) -> None:
        """Raises APIError 400 for one that cannot be compiled."""
        if constraint is None:
            return
        for each in (*constraint.parts, constraint):
            try:
                await self.off_loop.in_thread(verify_structured_output, each.structured_output)
            except ParameterError as error:
                subject = f"{each.param} of {each.owner}" if each.owner else each.param
                message = str(error).replace(error.param, subject, 1)
                raise bad_request(each.param, message) from None

    async def encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        def encode_all() -> list[list[int]]:
            return [self.tokenizer.encode(text, add_special_tokens) for text in texts]

        return await self.off_loop.run(sum(map(len, texts)), encode_all)


def _fingerprint(config: EngineConfig) -> str:
    """`system_fingerprint`: equal fingerprints mean that equal seeds give equal answers."""
    identity = (config.model, config.cache.kv_cache_dtype, config.parallel.tensor_parallel_size)
    digest = hashlib.sha256(msgspec.msgpack.encode(identity)).hexdigest()
    return f"engine-{__version__}-{digest[:8]}"
