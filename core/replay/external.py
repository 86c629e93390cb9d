"""Grammars and connectors whose answers are recorded, and repeated in a replay, which has none of them.

Everything on which decisions depend is asked through `Ask`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import wraps
from operator import index as as_integer
from typing import Any, Final, Protocol, TypeVar, cast

import msgspec

from ...protocol.errors import EngineError
from ...protocol.messages import FinishReason
from ...protocol.worker_messages import SchedulerOutput
from ..kv_cache.connector import BlockConnector, ExternalMatch, KVConnector, RequestEnd
from ..scheduler.features.encoder_cache_connector import EncoderCacheConnector
from ..scheduler.features.grammars import GrammarBackend
from ..state.external_dependency import ExternalDependency
from ..state.forwarded import forwarded
from ..state.request import Request, RequestKey
from .events import Answer

Method = TypeVar("Method", bound=Callable[..., Any])

NO_REQUEST: Final = -1
"""The transfer id of calls that do not concern a single request."""

_encode = msgspec.msgpack.Encoder().encode
_decode_params = msgspec.msgpack.Decoder(dict[str, object] | None).decode


class Ask(Protocol):
    """A function that either calls `answer`, and records what it returns or raises, or repeats what was recorded.

    `about` is the key or the transfer id of a request, or something else that identifies the call. What `keep` returns
    for the answer is recorded, unless it equals `usual`. Where nothing was recorded, the answer is `usual`.
    """

    def __call__(
        self,
        call: str,
        about: int | tuple[int, int],
        usual: object,
        answer: Callable[[], Any],
        keep: Callable[[Any], Any] = ...,
    ) -> Any:
        """Return the answer itself, or the recorded one."""


class RecordedError(EngineError):
    """Raised by a replay where an error was recorded."""


def repeat_answers(answers: deque[Answer]) -> Ask:
    """Return an `Ask` that takes recorded answers from the front of `answers`."""

    def ask(
        call: str,
        about: int | tuple[int, int],
        usual: object,
        answer: Callable[[], Any],
        keep: Callable[[Any], Any] = lambda value: value,
    ) -> Any:
        if not answers or (answers[0].call, answers[0].about) != (call, about):
            return usual
        recorded = answers.popleft()
        if recorded.raised:
            raise RecordedError(f"{call} raised an error, whose text was not recorded")
        return recorded.value

    return ask


def asked(
    method: Method, usual: object = None, keep: Callable[[Any], Any] = lambda value: value
) -> Method:
    """Return a method that asks the object in the attribute `asked` by calling its method of the same name."""
    name = method.__name__

    @wraps(method, assigned=("__name__", "__doc__"), updated=())
    def call(self: Any, *args: Any) -> Any:
        about = args[0] if args else NO_REQUEST
        if isinstance(about, Request):
            about = about.transfer_id
        elif not isinstance(about, int | tuple):
            about = NO_REQUEST
        return self.ask(name, about, usual, lambda: getattr(self.asked, name)(*args), keep)

    return cast(Method, call)


class AskedGrammars(ExternalDependency):
    """A grammar backend that asks another one; in a replay None, which accepts all tokens and forces none."""

    def __init__(self, backend: GrammarBackend | None, ask: Ask) -> None:
        self.asked = backend
        self.ask = ask

    accept_tokens = asked(GrammarBackend.accept_tokens, usual=True)

    # No decision depends on the answers of these, so nothing is recorded.
    compile = asked(GrammarBackend.compile)
    fill_bitmask = asked(GrammarBackend.fill_bitmask, usual=b"", keep=lambda mask: b"")
    find_error = asked(GrammarBackend.find_error, usual="", keep=lambda error: "")
    fill_draft_bitmasks = asked(
        GrammarBackend.fill_draft_bitmasks, usual=b"", keep=lambda mask: b""
    )
    release = asked(GrammarBackend.release)

    def num_acceptable(self, key: RequestKey, token_ids: Sequence[int]) -> int:
        """Return how many of the tokens the grammar accepts."""
        backend: Any = self.asked
        count: int = self.ask(
            "num_acceptable", key, len(token_ids), lambda: backend.num_acceptable(key, token_ids)
        )
        return count

    def forced_tokens(self, key: RequestKey, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens that the grammar forces next. Only their number is recorded."""
        backend: Any = self.asked
        forced: list[int] | int = self.ask(
            "forced_tokens", key, 0, lambda: backend.forced_tokens(key, token_ids), keep=len
        )
        return [0] * forced if isinstance(forced, int) else forced


class AskedKVConnector(KVConnector, ExternalDependency):
    """A KV connector that asks another one."""

    def __init__(self, connector: KVConnector, ask: Ask) -> None:
        self.asked = connector
        self.polls_workers = connector.polls_workers
        self.ask = ask

    update_state_after_alloc = asked(KVConnector.update_state_after_alloc)
    build_connector_meta = asked(KVConnector.build_connector_meta, b"", keep=lambda metadata: b"")
    transfer_expired = asked(KVConnector.transfer_expired)
    needs_step = asked(KVConnector.needs_step, usual=False)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> ExternalMatch | None:
        """Return the connector's match, converted to an `ExternalMatch`."""

        def match() -> ExternalMatch | None:
            found = self.asked.get_num_new_matched_tokens(request, num_computed_tokens)
            if found is None:
                return None
            num_tokens, is_async = found
            return ExternalMatch(as_integer(num_tokens), bool(is_async))

        def keep(found: ExternalMatch | None) -> ExternalMatch | None:
            # The scheduler rejects all numbers that are out of range, and some are too large to encode.
            if found is None:
                return None
            num_tokens = max(-1, min(found.num_tokens, request.num_tokens + 1))
            return ExternalMatch(num_tokens, found.is_async)

        found = self.ask("get_num_new_matched_tokens", request.transfer_id, (), match, keep)
        return None if found is None else ExternalMatch(*(found or (0,)))

    def request_finished(
        self, request: Request, block_ids: Sequence[int], reason: FinishReason
    ) -> RequestEnd:
        """Return the connector's decision on a request's blocks. Its parameters are not recorded."""

        def answer() -> RequestEnd:
            delays_free, params = self.asked.request_finished(request, block_ids, reason)
            # If its parameters cannot be encoded, only this request may fail, so encode them here.
            return RequestEnd(bool(delays_free), _decode_params(_encode(params)))

        end = self.ask(
            "request_finished", request.transfer_id, False, answer, lambda end: end.delays_free
        )
        return end if isinstance(end, RequestEnd) else RequestEnd(end)

    # No decision depends on the answers of these, so they are not recorded.
    is_ready = forwarded(KVConnector.is_ready, to="asked")
    is_flushed = forwarded(KVConnector.is_flushed, to="asked")
    receive = forwarded(KVConnector.receive, to="asked")
    request_refused = forwarded(KVConnector.request_refused, to="asked")
    take_events = forwarded(KVConnector.take_events, to="asked")
    take_stats = forwarded(KVConnector.take_stats, to="asked")
    shutdown = forwarded(KVConnector.shutdown, to="asked")


class AskedBlockConnector(AskedKVConnector, BlockConnector):
    """A `BlockConnector` that asks another one."""

    find_blocks = asked(BlockConnector.find_blocks, usual=b"")
    last_block_key = asked(BlockConnector.last_block_key, usual=b"")
    load_blocks = asked(BlockConnector.load_blocks)
    observe_pool = forwarded(BlockConnector.observe_pool, to="asked")
    blocks_cached = forwarded(BlockConnector.blocks_cached, to="asked")
    block_evicted = forwarded(BlockConnector.block_evicted, to="asked")
    copy_dropped = forwarded(BlockConnector.copy_dropped, to="asked")
    blocks_removed = forwarded(BlockConnector.blocks_removed, to="asked")
    cache_cleared = forwarded(BlockConnector.cache_cleared, to="asked")


class NoConnector(BlockConnector):
    """The connector that a replay does not ask."""

    def __init__(self, *, polls_workers: bool) -> None:
        self.polls_workers = polls_workers

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> bytes:
        """Return no metadata."""
        return b""

    def find_blocks(self, request: Request, keys: Sequence[bytes]) -> bytes | None:
        """Return no blocks."""
        return b""

    def load_blocks(
        self, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> None:
        """Do nothing."""


def ask_connector(connector: KVConnector, ask: Ask, *, finds_blocks: bool) -> AskedKVConnector:
    """Return a connector that makes each call to `connector` through `ask`."""
    return (AskedBlockConnector if finds_blocks else AskedKVConnector)(connector, ask)


class AskedEncoderCacheConnector(EncoderCacheConnector, ExternalDependency):
    """An encoder-cache connector that asks another one; in a replay None, which has nothing."""

    def __init__(self, connector: EncoderCacheConnector | None, ask: Ask) -> None:
        self._connector: Any = connector
        self._ask = ask

    def has_cache_item(self, request: Request, index: int) -> bool:
        """Return whether the connector has the encoder output."""
        about = request.transfer_id, index
        connector = self._connector
        found = self._ask(
            "has_cache_item", about, None, lambda: bool(connector.has_cache_item(request, index))
        )
        return bool(found)

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput, loads: Sequence[tuple[Request, int]]
    ) -> bytes:
        """Return the connector's metadata for the step, which is not recorded."""
        connector = self._connector
        metadata: bytes = self._ask(
            "encoder build_connector_meta",
            NO_REQUEST,
            b"",
            lambda: connector.build_connector_meta(scheduler_output, loads),
            lambda metadata: b"",
        )
        return metadata
