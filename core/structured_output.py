"""Structured output: compiled grammars and the state of every constrained request.

A grammar that cannot be compiled, or a token that it does not accept, fails its own request. Nothing that a request
asks for raises an error here.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from ..protocol.errors import EngineError
from ..protocol.grammar import grammar_text, shorten_error
from ..protocol.messages import I32
from ..protocol.sampling_params import StructuredOutput
from .request import RequestKey

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_NUM_THREADS: Final = 2
_MAX_CACHED_GRAMMARS: Final = 64


@dataclass(slots=True)
class _GrammarState:
    """A request's place in its grammar. A stopped matcher does not count the end tokens that follow; this does.

    A matcher that has refused a token, or could not go back, is in error: it accepts nothing any more.
    """

    matcher: LLMatcher
    end_token_ids: frozenset[int]
    num_ends_after_stop: int = 0

    def accept(self, token_ids: Sequence[int]) -> bool:
        for token_id in token_ids:
            if not self.matcher.is_stopped():
                if not self.matcher.consume_token(token_id):
                    return False
            elif token_id in self.end_token_ids and not self.matcher.is_error():
                self.num_ends_after_stop += 1
            else:
                return False
        return True

    def num_acceptable(self, token_ids: Sequence[int]) -> int:
        count = self.matcher.validate_tokens(list(token_ids))
        if count:
            is_over = token_ids[count - 1] in self.end_token_ids
        else:
            is_over = self.matcher.is_stopped() and not self.matcher.is_error()
        if is_over:
            count += sum(1 for _ in takewhile(self.end_token_ids.__contains__, token_ids[count:]))
        return count

    def forced_tokens(self, token_ids: Sequence[int]) -> list[int]:
        if not self.accept(token_ids):
            return []
        forced = [] if self.matcher.is_stopped() else self.matcher.compute_ff_tokens()
        return forced if not token_ids or self.rollback(len(token_ids)) else []

    def rollback(self, num_tokens: int) -> bool:
        ends = min(num_tokens, self.num_ends_after_stop)
        self.num_ends_after_stop -= ends
        return self.matcher.rollback(num_tokens - ends)


class StructuredOutputManager:
    """Grammars by key, a key being one request.

    The tokeniser is loaded by the first request that needs it: `tokenizer_path` is a tokenizer.json, a directory that
    holds one, or a function that returns the path.
    """

    def __init__(
        self,
        tokenizer_path: str | Callable[[], str],
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self._tokenizer_path = tokenizer_path
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._num_words = -(-vocab_size // 32)
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._executor: LLExecutor | None = None
        # Compiled and untouched; a request works on a copy.
        self._cache: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()
        self._cache_lock = threading.Lock()
        self._compiling: dict[RequestKey, object] = {}
        self._compiled: deque[tuple[RequestKey, object, LLMatcher | str]] = deque()
        self._states: dict[RequestKey, _GrammarState] = {}

    @property
    def is_compiling(self) -> bool:
        """Whether `poll` has something to report, now or later."""
        return bool(self._compiling)

    def compile(self, key: RequestKey, structured_output: StructuredOutput) -> None:
        """Compile in the background; `poll` tells when it is done. The key must not be in use."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        ticket = self._compiling[key] = object()
        self._pool.submit(self._compile, key, ticket, structured_output)

    def poll(self) -> list[tuple[RequestKey, str | None]]:
        """The keys that became ready since the last call, or their error. A key with an error is released."""
        events: list[tuple[RequestKey, str | None]] = []
        while self._compiled:
            key, ticket, result = self._compiled.popleft()
            if self._compiling.get(key) is not ticket:
                continue  # released while it was compiled
            del self._compiling[key]
            if isinstance(result, str):
                events.append((key, result))
            else:
                self._states[key] = _GrammarState(result, self._eos_token_ids)
                events.append((key, None))
        return events

    def accept_tokens(self, key: RequestKey, token_ids: Sequence[int]) -> bool:
        """Advance by these tokens. False when the grammar does not allow them; the request cannot go on then."""
        return self._states[key].accept(token_ids)

    def num_acceptable(self, key: RequestKey, token_ids: Sequence[int]) -> int:
        """How many of these tokens the grammar would accept in a row, without advancing."""
        return self._states[key].num_acceptable(token_ids)

    def forced_tokens(self, key: RequestKey, token_ids: Sequence[int]) -> list[int]:
        """What must follow these tokens, without advancing. A grammar that refuses them accepts nothing any more."""
        return self._states[key].forced_tokens(token_ids)

    def rollback(self, key: RequestKey, num_tokens: int) -> bool:
        """Take back the last accepted tokens. False when that is not possible; nothing is accepted any more then."""
        return self._states[key].rollback(num_tokens)

    def fill_bitmask(self, keys: Sequence[RequestKey]) -> I32:
        """int32[len(keys), ceil(vocab_size / 32)]: the tokens that each request may produce next.

        A finished grammar allows only the end-of-sequence tokens.
        """
        bitmask = np.zeros((len(keys), self._num_words), np.int32)
        row_bytes = bitmask.strides[0]
        if len(keys) == 1:
            self._states[keys[0]].matcher.unsafe_compute_mask_ptr(bitmask.ctypes.data, row_bytes)
        elif keys:
            rows = [(self._states[key].matcher, row) for row, key in enumerate(keys)]
            self._parallel().unsafe_compute_mask_ptr(
                rows, bitmask.ctypes.data, row_bytes, len(keys)
            )
        return bitmask.tobytes()

    def release(self, key: RequestKey) -> None:
        """The request is over, whatever its grammar is doing. Harmless for an unknown key."""
        self._compiling.pop(key, None)
        self._states.pop(key, None)

    def close(self) -> None:
        """Stop the threads; what is still waiting to be compiled is forgotten."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(
        self, key: RequestKey, ticket: object, structured_output: StructuredOutput
    ) -> None:
        if self._compiling.get(key) is not ticket:
            return  # released while it waited for a thread
        result: LLMatcher | str
        try:
            result = self._matcher(structured_output)
        except EngineError as error:
            result = str(error)
        except BaseException as error:
            # llguidance and tokenizers raise bare exceptions, and a panic of Rust code is no Exception.
            result = shorten_error(f"the grammar cannot be compiled: {error}")
        self._compiled.append((key, ticket, result))

    def _matcher(self, structured_output: StructuredOutput) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        with self._cache_lock:
            cached = self._cache.get(structured_output)
            if cached is not None:
                self._cache.move_to_end(structured_output)
                return cached.deep_copy()
        matcher = LLMatcher(
            self._load_tokenizer(),
            grammar_text(structured_output),
            log_level=0,
            limits=LLParserLimits(verbose_errors=False),
        )
        if not matcher.is_error():
            # Much of the work of a large grammar is done with its first mask: here, not in the core's loop.
            matcher.compute_bitmask()
        if matcher.is_error():
            reason = shorten_error(matcher.get_error())
            raise EngineError(f"the {structured_output.kind.value} cannot be compiled: {reason}")
        with self._cache_lock:
            self._cache[structured_output] = matcher
            if len(self._cache) > _MAX_CACHED_GRAMMARS:
                self._cache.popitem(last=False)
            return matcher.deep_copy()

    def _load_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._tokenizer_lock:
            if self._tokenizer is None:
                path = self._tokenizer_path
                json_path = Path(path() if callable(path) else path)
                if json_path.is_dir():
                    json_path /= "tokenizer.json"
                if json_path.suffix != ".json" or not json_path.is_file():
                    raise EngineError(
                        "structured outputs need a tokenizer.json, and this model has none"
                    )
                self._tokenizer = LLTokenizer(
                    str(json_path),
                    n_vocab=self._vocab_size,
                    eos_token=sorted(self._eos_token_ids) or None,
                )
            return self._tokenizer

    def _parallel(self) -> LLExecutor:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor()
        return self._executor
