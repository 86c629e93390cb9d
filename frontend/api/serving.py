"""The state that all endpoints of one frontend share."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final

import msgspec
from starlette.types import ASGIApp, Receive

from ... import __version__
from ...protocol.config import ANY_MODEL, FIRST_EPOCH, EngineConfig
from ...protocol.file_identity import LoraAdapter
from ...protocol.grammars.process import GrammarProcesses
from ...protocol.pooling_params import PoolingKind
from ...protocol.sampling_params import SamplingParams, StructuredOutput
from ...protocol.supervisor_messages import Stage
from ..chat import ChatFormats, ChatTemplate, ModelTemplates, PairTemplate, SpecialTokenGuard
from ..chat.stable_prefix import StablePrefix
from ..client.engine_client import EngineClient
from ..client.grammar_checks import GrammarChecks
from ..client.sequence_io import is_accepted
from ..client.text_changes import TextChanges
from ..http.errors import APIError, bad_request, echo, renaming, unavailable
from ..media.documents.reader import DocumentReader
from ..media.find_media import find_chat_media
from ..media.transcription.options import speech_model
from ..model_source.lora_registry import LoraRegistry, LoraScale
from ..observability.tracing.tracer import Tracer
from ..store.client import StoreClient
from ..tokenizer.absent import NO_TOKENIZER
from ..tokenizer.stop_patterns import verify_patterns
from ..tokenizer.tokenizer import Tokenizer
from .bodies.disconnection import while_connected
from .bodies.request_memory import RequestMemory
from .chats.formats import AnswerFormats
from .control.weight_names import WeightNames
from .durable.kept_connections import KeptConnections
from .infill import InfillFormat, find_infill_format
from .receipts.recent_prompts import RecentPrompts
from .structured.constraint import Constraint

if TYPE_CHECKING:
    from ..media.transcription.transcriber import Transcriber

MAX_NAMED: Final = 32
"""Maximum number of model names in an error message."""


class Serving:
    """The model, its tokenizer, the clients of the engine and of the store, and the stage of the server.

    `stage` is STARTING, WARMING, READY or DRAINING, in this order; `detail` describes what the server waits for. The
    server `is_retired` if another one has taken its place, while it still answers open connections. `when_ready` holds
    functions that are called once the server is ready. `router` has all routes, and `app` also checks and traces
    requests; None before they are created. `tracer` is None if requests are not traced.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        templates: ModelTemplates,
        formats: ChatFormats,
        engine: EngineClient,
        store: StoreClient,
        client_index: int = 0,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.templates = templates
        self.engine = engine
        self.store = store
        self.connections = KeptConnections(config, client_index)
        self.router: ASGIApp | None = None
        self.app: ASGIApp | None = None
        self.tracer: Tracer | None = None
        self.when_ready: list[Callable[[], Awaitable[None]]] = []
        self._begin_time = time.monotonic()
        self._start_s = 0.0
        self._drain_deadline = 0.0
        self._has_started = asyncio.Event()
        self.stage = Stage.STARTING
        self.is_retired = False
        self.detail = "waiting for the model"
        self.formats = AnswerFormats(formats, tokenizer)
        self.stable_prefix = StablePrefix(config.frontend.stable_prefix)
        policy = config.frontend.special_tokens_in_text
        self.special_tokens = SpecialTokenGuard(tokenizer, policy, self.formats.find_marks())
        self.served_name = config.model.served_names[0]
        limit = config.frontend.default_sampling.get("max_tokens")
        self.max_tokens_limit = None if limit is None else int(limit)
        self.default_max_tokens = config.frontend.default_max_tokens or None
        self._fingerprint = _fingerprint(config)
        self.weight_version = WeightNames(config.run_dir, engine).find
        self.executor = engine.executor
        self.recent_prompts = RecentPrompts()
        self.loras = LoraRegistry(config)
        self.media = find_chat_media(config, tokenizer, engine.executor)
        self.text_changes = TextChanges.find(config.model.pooler, tokenizer)
        self.documents = DocumentReader(engine.executor)
        self.transcriber: Transcriber | None = None
        if speech_model(config) is not None:
            # A late import, because few models transcribe.
            from ..media.transcription.transcriber import make_transcriber

            template = templates.choose(False)
            self.transcriber = make_transcriber(
                config, tokenizer, engine.executor, template, self.special_tokens
            )
        limits = config.frontend
        self.request_memory = RequestMemory(
            max(limits.max_request_memory, 2 * limits.max_body_bytes)
        )
        model = config.model
        self.grammar_checks = GrammarChecks(
            GrammarProcesses(model.verified_tokenizer_path, model.vocab_size, model.eos_token_ids),
            engine.executor.create_separate(),
            engine.calls.prepare_grammars,
        )

    def start_decoders(self) -> None:
        """Start the processes that decode media, so that the first file does not have to wait for them."""
        for part in (self.media, self.transcriber):
            if part is not None:
                with contextlib.suppress(OSError):
                    part.start()

    def close(self) -> None:
        """Stop the processes and threads for grammars and media."""
        self.connections.close()
        self.grammar_checks.close()
        self.documents.close()
        for part in (self.media, self.transcriber):
            if part is not None:
                part.close()

    def enter_stage(self, stage: Stage, detail: str) -> None:
        """Enter the next stage."""
        now = time.monotonic()
        if stage is Stage.READY:
            self._start_s = now - self._begin_time
        elif stage is Stage.DRAINING:
            self._drain_deadline = now + self.config.frontend.shutdown_timeout_s
        self.stage, self.detail = stage, detail
        if stage is not Stage.STARTING:
            self._has_started.set()

    @property
    def retry_after_s(self) -> float:
        """Estimated seconds until this server or its successor is ready: the rest of the drain, plus one start.

        A start in progress is expected to take as long again as it has taken so far.
        """
        now = time.monotonic()
        return max(self._drain_deadline - now, 0.0) + (self._start_s or now - self._begin_time)

    @property
    def is_ready(self) -> bool:
        """True if the server is ready and its engine can generate, or sleeps."""
        engine = self.engine
        return self.stage is Stage.READY and (engine.ready or engine.sleep.is_asleep)

    @property
    def num_replicas(self) -> int:
        """The number of data-parallel replicas."""
        return self.config.parallel.data_parallel_size

    @property
    def stalled_process(self) -> str:
        """The process whose lack of progress keeps a ready server from serving; "" if the server can serve."""
        if self.stage is not Stage.READY or self.engine.watch is None:
            return ""
        return self.engine.watch.find_stalled_process()

    @property
    def degraded_replicas(self) -> str:
        """The processes whose lack of progress keeps some replicas from serving; "" if there are none."""
        if self.stage is not Stage.READY or self.engine.watch is None:
            return ""
        return self.stalled_process or "; ".join(
            self.engine.watch.find_degraded_replicas().values()
        )

    def verify_model(self, name: str | None) -> None:
        """Verify that a model is served here. Raise APIError 404 if the model is not served."""
        self.find_lora(name)

    @property
    def served_models(self) -> tuple[str, ...]:
        """The names that clients may use: first the model's, then those of its LoRA adapters."""
        return (*self.config.model.served_names, *(adapter.name for adapter in self.loras))

    def find_lora(
        self, name: str | None, scales: Sequence[LoraScale] | None = None
    ) -> LoraAdapter | None:
        """Return the LoRA adapter called `name`.

        If `name` is a name of the model, return the adapter that `scales` or, without them, the operator chose for the
        base model, or None.

        Raises:
            APIError: There is no such model (404), or `scales` are invalid (400).
        """
        if not name or self._names_model(name):
            if scales is None:
                return self.loras.default
            with renaming(str):
                return self.loras.find_scaled(scales, "lora")
        if scales:
            raise bad_request("lora", f"cannot be used with the adapter {echo(name)} as model")
        adapter = self.loras.find(name)
        if adapter is None and not self.config.frontend.skip_model_name_validation:
            raise self._unknown_model(name)
        return adapter

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the model without adapters."""
        weights_id = self.engine.cores[0].weights[0]
        return f"{self._fingerprint}-{weights_id}" if weights_id else self._fingerprint

    def find_fingerprint(self, name: str | None, scales: Sequence[LoraScale] | None = None) -> str:
        """Return the `system_fingerprint` of a model. An adapter's fingerprint includes its name and content.

        Raises:
            APIError: There is no such model (404).
        """
        adapter = self.find_lora(name, scales)
        if adapter is None:
            return self.fingerprint
        identity = msgspec.msgpack.encode((adapter.name, adapter.version))
        return f"{self.fingerprint}-{hashlib.sha256(identity).hexdigest()[:16]}"

    def answering_model(self, name: str | None) -> str:
        """Return the name of the model in the answer to a request for `name`."""
        if not name or self._names_model(name):
            return self.served_name
        is_unknown = self.config.frontend.skip_model_name_validation and not self.loras.find(name)
        return self.served_name if is_unknown else name

    def _names_model(self, name: str) -> bool:
        """Return whether `name` is the model's, or SGLang's for any model, and no adapter has it."""
        if name in self.config.model.served_names:
            return True
        return name == ANY_MODEL and self.loras.find(name) is None

    def _unknown_model(self, name: str) -> APIError:
        return APIError(
            404,
            f"The model {echo(name)} does not exist; available models: "
            f"{', '.join(self.served_models[:MAX_NAMED])}",
            param="model",
            code="model_not_found",
        )

    def verify_tokenizer(
        self, param: str, instead: str = "send token ids to /v1/completions"
    ) -> None:
        """Verify that the server has a tokenizer, which a field needs.

        Raises:
            APIError: The server has no tokenizer (400).
        """
        if not self.config.model.has_tokenizer:
            raise bad_request(param, f"needs a tokenizer, and {NO_TOKENIZER}; {instead}")

    def chat_template(self, with_tools: bool) -> ChatTemplate:
        """Return the chat template. Raise APIError 400 if the model has none."""
        template = self.templates.choose(with_tools)
        if template is None and self.config.model.audio is not None:
            raise APIError(
                400,
                "this is a speech model, which cannot chat; use /v1/audio/transcriptions",
                param="messages",
            )
        if template is None and not self.config.model.generates:
            model = self.config.model
            uses = "classify" if model.classifier is not None else "v1/embeddings"
            uses = "pooling" if model.pooler.kind is PoolingKind.ALL else uses
            raise APIError(
                400,
                f"this model has no chat template and generates no text; use /{uses} with texts",
                param="messages",
            )
        if template is None:
            raise APIError(
                400,
                "this model has no chat template; use /v1/completions, "
                "or start the server with --chat-template",
                param="messages",
            )
        return template

    @cached_property
    def pair_template(self) -> PairTemplate | None:
        """The template for pairs of texts, that of --chat-template or of a classifier itself; None without one."""
        is_given = self.config.frontend.chat_template is not None
        given = self.templates.choose(False) if is_given else None
        return PairTemplate.find(self.config.model.classifier, given, self.special_tokens)

    @cached_property
    def infill_format(self) -> InfillFormat | None:
        """The format in which the model fills in the middle of a text; None if it cannot."""
        return find_infill_format(self.tokenizer) if self.config.model.has_tokenizer else None

    @property
    def is_open(self) -> bool:
        """True if the server accepts new requests: it is neither starting nor shutting down."""
        return self.stage in (Stage.WARMING, Stage.READY)

    async def wait_for_start(self) -> None:
        """Wait while a frontend that replaces another one starts. A request to the other one would wait, too."""
        if self.config.epoch != FIRST_EPOCH:
            await self._has_started.wait()

    def verify_serving(self) -> None:
        """Raise APIError 503 while the server is starting or shutting down, unless it has accepted this request."""
        if not is_accepted.get():
            self.verify_open()

    def verify_open(self) -> None:
        """Raise APIError 503 while the server is starting or shutting down."""
        if self.stage is Stage.STARTING:
            raise unavailable(f"The server is starting: {self.detail}", self.retry_after_s)
        if self.stage is Stage.DRAINING:
            raise unavailable("The server is shutting down", self.retry_after_s)

    def verify_sampling(self, params: SamplingParams) -> None:
        """Raise ParameterError for an invalid parameter."""
        params.verify(
            vocab_size=self.config.model.vocab_size,
            max_logprobs=self.config.frontend.max_logprobs,
        )
        verify_patterns(params.stop_regex)

    async def verify_constraint(
        self, constraint: Constraint | None, receive: Receive
    ) -> StructuredOutput | None:
        """Compile a constraint and return its form for the core.

        Raises:
            APIError: It cannot be compiled (400).
            UnavailableError: It cannot be checked now.
            ClientDisconnected: The client closed the connection meanwhile.
        """
        if constraint is None:
            return None
        output, parts = constraint.structured_output, constraint.parts
        check = self.grammar_checks.check(output, [part.structured_output for part in parts])
        verdict = await while_connected(receive, check)
        if verdict.problem:
            wrong = constraint if verdict.part is None else parts[verdict.part]
            subject = f"{wrong.param} of {wrong.owner}" if wrong.owner else wrong.param
            raise APIError(400, f"{subject} {verdict.problem}", param=wrong.param)
        return verdict.apply_to(output)

    async def encode(self, texts: list[str], add_special_tokens: bool) -> list[Sequence[int]]:
        """Return the token ids of each text."""

        def encode_all() -> list[Sequence[int]]:
            return [self.tokenizer.encode(text, add_special_tokens) for text in texts]

        return await self.executor.run(sum(map(len, texts)), encode_all)


def _fingerprint(config: EngineConfig) -> str:
    """Return the `system_fingerprint`. Servers with equal fingerprints give equal answers for equal seeds."""
    files = config.model.weight_files + config.model.tokenizer_files
    model = msgspec.structs.replace(config.model, weight_files=(), tokenizer_files=(), loras=())
    identity = (
        model,
        [(file.size, file.content) for file in files],
        config.cache.kv_cache_dtype,
        config.parallel.tensor_parallel_size,
    )
    digest = hashlib.sha256(msgspec.msgpack.encode(identity)).hexdigest()
    return f"engine-{__version__}-{digest[:8]}"
