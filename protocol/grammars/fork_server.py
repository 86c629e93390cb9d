"""A program that forks grammar processes: `python -m engine.protocol.grammars.fork_server FD TOKENIZER VOCAB EOS…`.

A grammar can overflow the stack of the library that compiles it, or take unlimited time and memory. Each grammar is
therefore handled in its own process, so that a crash fails only one request. This program loads the tokenizer once
for all of them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NoReturn, TypeVar

from ..errors import EngineError, ParameterError
from ..isolation.fork_server import Serve, run_fork_server
from ..isolation.limits import limit_time
from ..isolation.messages import LENGTH_BYTES, frame
from ..sampling_params import StructuredOutput
from .grammar import shorten_error
from .json_schema import drop_bad_patterns
from .matcher import (
    CompileError,
    GrammarState,
    compile_grammar,
    isolated_limits,
    load_grammar_tokenizer,
    shared_limits,
    start_grammar,
    verify_grammar,
)
from .messages import (
    CHECK_STACK_BYTES,
    ISOLATED_CPU_S,
    ISOLATED_STACK_BYTES,
    MAX_CPU_S,
    MAX_MEMORY_BYTES,
    MAX_WALL_S,
    Advance,
    Check,
    Compile,
    Failed,
    Mask,
    Reply,
    Request,
    Verdict,
    decode_request,
)
from .special_tokens import special_tokens_of

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

T = TypeVar("T")

MAX_SHARED_SPEC: Final = 32 << 10
"""Maximum characters of a grammar that may run in the core.

For this length, the core's stack suffices at any nesting.
"""

MAX_SHARED_COMPILE_S: Final = 0.1
"""Maximum CPU seconds for compiling a grammar that may run in the core."""
MAX_SHARED_TOKEN_S: Final = 0.01
"""Maximum CPU seconds per token of a grammar that may run in the core."""

TRIAL_TOKENS: Final = 12
"""Number of tokens that are generated to measure the cost of a token."""


class _Child:
    """Serves one socket in a forked process.

    The main thread reads the socket, so that the process exits as soon as its client closes it. Another thread does the
    work.
    """

    def __init__(self, client: socket.socket, tokenizer: LLTokenizer | str, eos: list[int]) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._eos = frozenset(eos)
        self._state: GrammarState | None = None
        self._requests: queue.SimpleQueue[Request] = queue.SimpleQueue()

    def run(self) -> NoReturn:
        """Serve requests until the client closes the socket, then exit."""
        received = b""
        is_working = False
        while piece := self._client.recv(1 << 20):
            received += piece
            while len(received) >= LENGTH_BYTES:
                end = LENGTH_BYTES + int.from_bytes(received[:LENGTH_BYTES], "big")
                if len(received) < end:
                    break
                request = decode_request(received[LENGTH_BYTES:end])
                received = received[end:]
                if not is_working:
                    is_working = True
                    is_check = isinstance(request, Check)
                    threading.stack_size(CHECK_STACK_BYTES if is_check else ISOLATED_STACK_BYTES)
                    threading.Thread(target=self._work, daemon=True).start()
                self._requests.put(request)
        os._exit(0)

    def _work(self) -> None:
        while True:
            request = self._requests.get()
            limit_s = MAX_CPU_S if isinstance(request, Check) else ISOLATED_CPU_S
            with limit_time(limit_s, MAX_WALL_S):
                reply = self._answer(request)
            self._client.sendall(frame(reply))

    def _answer(self, request: Request) -> Reply:
        if isinstance(request, Check):
            return self._check(request)
        try:
            match request:
                case Compile(structured_output):
                    matcher = self._compile(structured_output, is_isolated=True)
                    self._state = self._new_state(matcher)
                case Advance(token_ids):
                    assert self._state is not None
                    if not self._state.accept(token_ids):
                        return Failed(self._state.error or "the grammar forbids a generated token")
            assert self._state is not None
            bits = self._state.compute_mask()
            return Failed(self._state.error) if self._state.error else Mask(bits)
        except MemoryError:
            os.kill(os.getpid(), signal.SIGABRT)
            raise
        except EngineError as error:
            return Failed(str(error))
        except BaseException as error:
            # llguidance and tokenizers raise plain exceptions, and a Rust panic is not even an Exception.
            return Failed(shorten_error(f"the grammar cannot be used: {error}"))

    def _check(self, check: Check) -> Verdict:
        for index, part in enumerate(check.parts):
            try:
                _without_bad_patterns(verify_grammar, part)
            except Exception as error:
                return Verdict(_problem(part, error), part=index)
        try:
            used, is_isolated = _without_bad_patterns(self._is_expensive, check.structured_output)
            spec = None if used is check.structured_output else used.spec
            return Verdict(is_isolated=is_isolated, spec=spec)
        except MemoryError:
            os.kill(os.getpid(), signal.SIGABRT)
            raise
        except BaseException as error:
            # llguidance and tokenizers raise plain exceptions, and a Rust panic is not even an Exception.
            return Verdict(_problem(check.structured_output, error))

    def _compile(self, structured_output: StructuredOutput, *, is_isolated: bool) -> LLMatcher:
        if isinstance(self._tokenizer, str):
            raise EngineError(self._tokenizer)
        limits = isolated_limits() if is_isolated else shared_limits()
        return compile_grammar(self._tokenizer, structured_output, limits)

    def _is_expensive(self, structured_output: StructuredOutput) -> bool:
        """Return whether a grammar is too expensive to run in the core.

        Raise EngineError if it cannot be used at all.
        """
        if isinstance(self._tokenizer, str):
            # Without a tokenizer the core will reject the request. Report an error in the grammar first.
            verify_grammar(structured_output)
            return False
        if len(structured_output.spec) <= MAX_SHARED_SPEC:
            began = time.thread_time()
            with contextlib.suppress(EngineError):
                matcher = self._compile(structured_output, is_isolated=False)
                took = time.thread_time() - began
                if took <= MAX_SHARED_COMPILE_S and _is_cheap(self._new_state(matcher)):
                    return False
        self._compile(structured_output, is_isolated=True)
        return True

    def _new_state(self, matcher: LLMatcher) -> GrammarState:
        assert not isinstance(self._tokenizer, str)
        return start_grammar(matcher, self._eos, special_tokens_of(self._tokenizer))


def _without_bad_patterns(
    use: Callable[[StructuredOutput], T], structured_output: StructuredOutput
) -> tuple[StructuredOutput, T]:
    """Apply `use` to a grammar. If that fails to compile, retry without the patterns that may be dropped.

    Return the grammar that was used, and the result.
    """
    try:
        return structured_output, use(structured_output)
    except CompileError:
        rest = drop_bad_patterns(structured_output)
        if rest is None:
            raise
        return rest, use(rest)


def _is_cheap(state: GrammarState) -> bool:
    """Return whether tokens are cheap, measured on a walk through the grammar that chooses allowed tokens."""
    matcher = state.matcher
    seed = 1
    for _ in range(TRIAL_TOKENS):
        began = time.thread_time()
        bits = state.compute_mask()
        if matcher.is_error():
            return False
        if matcher.is_stopped():
            return True
        seed = (seed * 1103515245 + 12345) & 0x7FFFFFFF
        if not matcher.consume_token(_allowed_token(bits, seed)):
            return False
        if time.thread_time() - began > MAX_SHARED_TOKEN_S:
            return False
    return True


def _problem(structured_output: StructuredOutput, error: BaseException) -> str:
    """Return the error message for the request parameter that contains the grammar."""
    match error:
        case ParameterError():
            return str(error).removeprefix(f"{error.param} ")
        case RecursionError():
            return "is nested too deeply"
        case CompileError():
            reason = error.reason
        case _:
            reason = shorten_error(str(error))
    reason = reason.replace("float", "number")
    return f"is not a {structured_output.kind.value} that can be compiled: {reason}"


def _allowed_token(bits: bytes, seed: int) -> int:
    """Return the first allowed token at or after a position derived from `seed`, wrapping around."""
    start = seed % len(bits)
    for index in itertools.chain(range(start, len(bits)), range(start)):
        if byte := bits[index]:
            return index * 8 + (byte & -byte).bit_length() - 1
    return 0


def _load(path: str, vocab_size: int, eos: list[int]) -> Serve:
    tokenizer: LLTokenizer | str
    try:
        tokenizer = load_grammar_tokenizer(path, vocab_size, eos)
    except Exception as error:
        tokenizer = str(error)
    return lambda client: _Child(client, tokenizer, eos).run()


def main() -> None:
    """Serve sockets until the process that started this one exits."""
    fd, path, vocab_size, *eos = sys.argv[1:]
    run_fork_server(
        socket.socket(fileno=int(fd)),
        "grammar",
        lambda: _load(path, int(vocab_size), list(map(int, eos))),
        MAX_MEMORY_BYTES + ISOLATED_STACK_BYTES,
    )


if __name__ == "__main__":
    main()
