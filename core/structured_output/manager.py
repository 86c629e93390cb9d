"""Structured output: compiled grammars and the state of every constrained request.

Cheap grammars run in this process, within limits; expensive ones (`is_isolated`) each have their own process. A grammar
that cannot be compiled, or a token that a grammar does not accept, fails only its own request.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from ...protocol.errors import EngineError
from ...protocol.grammars.grammar import shorten_error
from ...protocol.grammars.matcher import (
    GrammarState,
    compile_grammar,
    load_grammar_tokenizer,
    shared_limits,
    start_grammar,
)
from ...protocol.grammars.messages import SHARED_STACK_BYTES
from ...protocol.grammars.process import GrammarProcesses
from ...protocol.grammars.special_tokens import special_tokens_of
from ...protocol.messages import I32
from ...protocol.sampling_params import StructuredOutput
from ..state.request import RequestKey
from .isolated_grammars import IsolatedGrammar, IsolatedGrammars, start_threads

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_NUM_THREADS: Final = 2
_MAX_CACHED_GRAMMARS: Final = 64

THREAD_WAIT_S: Final = 5.0
"""Seconds for which a grammar waits if the system starts no threads, for example because memory is short."""

_State: TypeAlias = GrammarState | IsolatedGrammar


class StructuredOutputManager:
    """Compiles the grammars of requests, advances them, and computes their token bitmasks.

    Args:
        tokenizer_path: A tokenizer.json, a directory that contains one, or a function that returns such a path. It is
            loaded for the first request that needs it.
        vocab_size: The size of the model's vocabulary.
        eos_token_ids: Tokens that end a sequence.
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
        # Compiled grammars in their initial state. Each request advances a copy.
        self._cache: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()
        self._cache_lock = threading.Lock()
        self._compiling: dict[RequestKey, object] = {}
        self._without_threads: list[tuple[RequestKey, object, StructuredOutput, float]] = []
        """The arguments of `_start` for grammars whose threads could not be started."""
        self._compiled: deque[tuple[RequestKey, object, _State | str]] = deque()
        self._states: dict[RequestKey, _State] = {}
        self._isolated = IsolatedGrammars(
            GrammarProcesses(tokenizer_path, vocab_size, eos_token_ids)
        )
        self._advancing: set[RequestKey] = set()
        """Requests with an isolated grammar whose next mask is being computed."""

    @property
    def is_compiling(self) -> bool:
        """True if `poll` must be called because results are pending."""
        return bool(self._compiling or self._advancing)

    def compile(self, key: RequestKey, structured_output: StructuredOutput) -> None:
        """Start to compile a grammar in the background; `poll` reports the end. The key must not be in use."""
        ticket = self._compiling[key] = object()
        self._start(key, ticket, structured_output, time.monotonic() + THREAD_WAIT_S)

    def _start(
        self,
        key: RequestKey,
        ticket: object,
        structured_output: StructuredOutput,
        deadline: float,
    ) -> None:
        """Start to compile a grammar. If the system starts no thread now, `poll` tries again until the deadline."""
        if self._compiling.get(key) is not ticket:
            return
        try:
            if structured_output.is_isolated:
                self._compiling[key] = self._isolated.start(
                    structured_output,
                    lambda grammar: self._compiled.append((key, grammar, grammar)),
                )
            else:
                self._start_threads().submit(self._compile, key, ticket, structured_output)
        except RuntimeError as error:
            if time.monotonic() < deadline:
                self._without_threads.append((key, ticket, structured_output, deadline))
            else:
                reason = f"the grammar cannot be compiled now: {error}; retry later"
                self._compiled.append((key, ticket, reason))

    def _start_threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            # Their stack is large enough for every grammar within the length limit.
            self._pool = start_threads(_NUM_THREADS, "grammar", SHARED_STACK_BYTES)
        return self._pool

    def prepare(self) -> None:
        """Start to load the tokenizer in the background, unless a grammar has already needed it."""
        # If the system starts no thread now, the request with the grammar tries again.
        with contextlib.suppress(RuntimeError):
            if self._pool is None:
                self._start_threads().submit(self._load_tokenizer)

    def poll(self) -> list[tuple[RequestKey, str | None]]:
        """Return the keys whose grammar was compiled or whose isolated mask has arrived, each with an error or None.

        A key whose grammar cannot be compiled is released.
        """
        without_threads, self._without_threads = self._without_threads, []
        for each in without_threads:
            self._start(*each)
        events: list[tuple[RequestKey, str | None]] = []
        while self._compiled:
            key, ticket, result = self._compiled.popleft()
            error = result if isinstance(result, str) else result.error
            if self._compiling.get(key) is ticket:
                del self._compiling[key]
                if not isinstance(result, str) and not error:
                    self._states[key] = result
                events.append((key, error or None))
            elif self._states.get(key) is ticket:
                self._advancing.discard(key)
                events.append((key, error or None))
            # A result whose key is not found is for a request that has ended in the meantime.
        return events

    def accept_tokens(self, key: RequestKey, token_ids: Sequence[int]) -> bool:
        """Advance the grammar by these tokens. Return False if it forbids one; it then accepts no more tokens.

        For an isolated grammar, `poll` reports the result later.
        """
        state = self._states[key]
        if isinstance(state, IsolatedGrammar):
            self._advancing.add(key)
        return state.accept(token_ids)

    def num_acceptable(self, key: RequestKey, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens the grammar accepts in a row, without advancing; 0 if it is isolated."""
        state = self._states[key]
        return 0 if isinstance(state, IsolatedGrammar) else state.num_acceptable(token_ids)

    def forced_tokens(self, key: RequestKey, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens that must follow these, without advancing; none if the grammar is isolated.

        A grammar that forbids one of the given tokens accepts no more tokens.
        """
        state = self._states[key]
        return [] if isinstance(state, IsolatedGrammar) else state.forced_tokens(token_ids)

    def find_error(self, key: RequestKey) -> str:
        """Return why the request's grammar accepts no more tokens, or "" if the reason is unknown."""
        state = self._states.get(key)
        return "" if state is None else state.error

    def fill_bitmask(self, keys: Sequence[RequestKey]) -> I32:
        """Return a bitmask of allowed next tokens per request, int32[len(keys), ceil(vocab_size / 32)].

        A finished grammar allows only end-of-sequence tokens.
        """
        bitmask = np.zeros((len(keys), self._num_words), np.int32)
        row_bytes = bitmask.strides[0]
        states: dict[int, GrammarState] = {}
        for row, key in enumerate(keys):
            state = self._states[key]
            if isinstance(state, GrammarState):
                states[row] = state
            elif state.mask is not None:
                # If the vocabulary fills the last word, llguidance's masks have one more word.
                bitmask[row] = np.frombuffer(state.mask, np.int32)[: self._num_words]
        if len(states) == 1:
            [(row, only)] = states.items()
            only.matcher.unsafe_compute_mask_ptr(bitmask[row].ctypes.data, row_bytes)
        elif states:
            matchers = [(state.matcher, row) for row, state in states.items()]
            self._parallel().unsafe_compute_mask_ptr(
                matchers, bitmask.ctypes.data, row_bytes, len(keys)
            )
        for row, shared in states.items():
            shared.allow_special_texts(memoryview(bitmask[row]).cast("B"))
        return bitmask.tobytes()

    def fill_draft_bitmasks(self, key: RequestKey, token_ids: Sequence[int]) -> bytes:
        """Return the bitmask before each draft up to the first forbidden one, and after the last, without advancing.

        The result is int32[at most 1 + len(token_ids), ceil(vocab_size / 32)]; it has one row if the grammar is
        isolated.
        """
        state = self._states[key]
        if isinstance(state, IsolatedGrammar):
            return self.fill_bitmask((key,))
        row_bytes = self._num_words * 4
        return b"".join(mask[:row_bytes] for mask in state.compute_masks(token_ids))

    def release(self, key: RequestKey) -> None:
        """Release the grammar of a request, even while it is being compiled. Unknown keys are ignored."""
        compiling, state = self._compiling.pop(key, None), self._states.pop(key, None)
        for grammar in (compiling, state):
            if isinstance(grammar, IsolatedGrammar):
                grammar.close()
        self._advancing.discard(key)

    def close(self) -> None:
        """Stop the threads and processes, and cancel pending compilations."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        for key in {*self._compiling, *self._states}:
            self.release(key)
        self._isolated.close()

    def _compile(
        self, key: RequestKey, ticket: object, structured_output: StructuredOutput
    ) -> None:
        if self._compiling.get(key) is not ticket:
            return  # The request ended while its grammar waited for a thread.
        result: _State | str
        try:
            matcher = self._matcher(structured_output)
            special_tokens = special_tokens_of(self._load_tokenizer())
            result = start_grammar(matcher, self._eos_token_ids, special_tokens)
        except EngineError as error:
            result = str(error)
        except BaseException as error:
            # llguidance and tokenizers raise plain exceptions, and a Rust panic is not even an Exception.
            result = shorten_error(f"the grammar cannot be compiled: {error}")
        self._compiled.append((key, ticket, result))

    def _matcher(self, structured_output: StructuredOutput) -> LLMatcher:
        with self._cache_lock:
            cached = self._cache.get(structured_output)
            if cached is not None:
                self._cache.move_to_end(structured_output)
                matcher = cached.deep_copy()
                # All copies share a lock, after which a panic of llguidance lets none of them work.
                matcher.compute_bitmask()
                if not matcher.is_error():
                    return matcher
        # Compiling also computes the first mask, so that the core's loop does not have to.
        matcher = compile_grammar(self._load_tokenizer(), structured_output, shared_limits())
        with self._cache_lock:
            self._cache[structured_output] = matcher
            if len(self._cache) > _MAX_CACHED_GRAMMARS:
                self._cache.popitem(last=False)
            return matcher.deep_copy()

    def _load_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                path = self._tokenizer_path
                self._tokenizer = load_grammar_tokenizer(
                    path() if callable(path) else path,
                    self._vocab_size,
                    sorted(self._eos_token_ids),
                )
            return self._tokenizer

    def _parallel(self) -> LLExecutor:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor()
        return self._executor
