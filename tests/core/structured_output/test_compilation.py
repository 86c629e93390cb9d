"""Grammars whose compilation fails or is no longer needed."""

import threading
from typing import Any

import pytest
from engine.core.structured_output.manager import StructuredOutputManager
from engine.frontend.tokenizer.converted import tokenizer_json_path
from engine.frontend.tokenizer.load import load_tokenizer
from engine.protocol.sampling_params import GrammarKind, StructuredOutput
from support.chat.grammars import await_events
from support.processes.program import wait_until
from support.servers.server import default_model

V = 49_152
EOS = 2
AB = StructuredOutput(GrammarKind.REGEX, "ab")


def test_a_grammar_released_before_its_turn_is_not_compiled() -> None:
    may_go_on = threading.Event()
    asked: list[None] = []

    def find_tokenizer() -> str:
        asked.append(None)
        may_go_on.wait()
        return "/nonexistent/tokenizer.json"

    manager = StructuredOutputManager(find_tokenizer, V, (EOS,))
    for key in range(40):
        manager.compile(key, AB)
    # Two threads are busy. Of all requests for the same grammar, only one still exists when its turn comes.
    for key in range(2, 39):
        manager.release(key)
    may_go_on.set()
    assert await_events(manager).keys() == {0, 1, 39}
    assert len(asked) == 3
    manager.close()


def test_a_request_released_while_it_compiles_is_not_reported() -> None:
    manager = StructuredOutputManager(str(tokenizer_json_path(default_model())), V, (EOS,))
    for key in range(8):
        manager.compile(key, AB)
    manager.release(3)
    # The same key may be used again, for another request.
    manager.release(5)
    manager.compile(5, StructuredOutput(GrammarKind.REGEX, "[xy]"))
    assert await_events(manager) == dict.fromkeys({0, 1, 2, 4, 5, 6, 7})
    assert manager.accept_tokens(5, [104])
    for key in (5, 5, "never seen"):
        manager.release(key)
    manager.close()


@pytest.mark.parametrize("path", ["/nonexistent/tokenizer.json", "/nonexistent/model.gguf"])
def test_a_missing_tokenizer_fails_only_the_request(path: str) -> None:
    manager = StructuredOutputManager(lambda: path, V, (EOS,))
    manager.compile(0, AB)
    [(key, error)] = await_events(manager).items()
    assert key == 0
    assert error is not None and "tokenizer.json" in error
    assert "nonexistent" not in error
    manager.close()


class Panic(BaseException):
    """An exception like pyo3's PanicException, which does not derive from Exception."""


def test_a_panic_of_the_compiler_fails_only_its_request() -> None:
    def panic() -> str:
        raise Panic("index out of bounds")

    manager = StructuredOutputManager(panic, V, (EOS,))
    manager.compile(0, AB)
    events: list[tuple[Any, str | None]] = []
    wait_until(lambda: events.extend(manager.poll()) or events, what="the request is told")
    assert events == [(0, "the grammar cannot be compiled: index out of bounds")]
    assert not manager.is_compiling
    manager.close()


def test_a_panic_of_a_grammar_fails_no_later_request() -> None:
    # llguidance 1.9.1 panics where only two different JSON grammars may begin, after a text with a limit.
    numbers = '(%json {"type": "integer"} | %json {"type": "array"})'
    panics = f'start: limited ":" ("x" | "y" {numbers})\nlimited[max_tokens=1]: /[a-c]+/'
    grammar = StructuredOutput(GrammarKind.LARK, panics)
    tokenizer = load_tokenizer(default_model())
    manager = StructuredOutputManager(str(tokenizer_json_path(default_model())), V, (EOS,))

    def writes(key: int, text: str) -> bool:
        manager.compile(key, grammar)
        assert await_events(manager) == {key: None}
        return all(manager.accept_tokens(key, tokenizer.encode(char)) for char in text)

    assert writes(0, "a:y")
    manager.fill_bitmask([0])
    assert manager.find_error(0).startswith("panic: ") and "\n" not in manager.find_error(0)
    assert writes(1, "a:x") and manager.find_error(1) == ""
    manager.close()


@pytest.mark.parametrize("is_isolated", [False, True])
def test_a_grammar_for_a_model_without_end_tokens_is_refused(is_isolated: bool) -> None:
    path = str(tokenizer_json_path(default_model()))
    manager = StructuredOutputManager(path, V, ())
    manager.compile(0, StructuredOutput(GrammarKind.REGEX, "ab", is_isolated=is_isolated))
    [(_, problem)] = await_events(manager).items()
    assert problem is not None and "need an end token" in problem
    manager.close()


@pytest.mark.parametrize(("num_started", "is_isolated"), [(0, False), (1, False), (0, True)])
@pytest.mark.parametrize("waits", [True, False])
def test_a_grammar_waits_for_threads_and_may_be_sent_again(
    monkeypatch: pytest.MonkeyPatch, num_started: int, is_isolated: bool, waits: bool
) -> None:
    grammar = StructuredOutput(GrammarKind.REGEX, "ab", is_isolated=is_isolated)
    manager = StructuredOutputManager("/nonexistent/tokenizer.json", V, (EOS,))
    start, started = threading.Thread.start, [None] * num_started

    def refuse(thread: threading.Thread) -> None:
        if not started:
            raise RuntimeError("can't start new thread")
        started.pop()
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        patch.setattr("engine.core.structured_output.manager.THREAD_WAIT_S", 60.0 if waits else 0.0)
        manager.prepare()
        manager.compile(0, grammar)
        if waits:
            assert manager.poll() == []
        else:
            assert await_events(manager) == {
                0: "the grammar cannot be compiled now: can't start new thread; retry later"
            }
    if not waits:
        manager.compile(1, grammar)
    [(_, error)] = await_events(manager).items()
    assert error is not None and "tokenizer.json" in error
    manager.close()
