"""Isolated grammars go on when their processes are lost."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Sequence

import numpy as np
import psutil
import pytest
from engine.core.structured_output.isolated_grammars import IsolatedGrammar, IsolatedGrammars
from engine.frontend.tokenizer.converted import tokenizer_json_path
from engine.protocol.grammars.process import GrammarProcesses
from engine.protocol.sampling_params import GrammarKind, StructuredOutput
from support.servers.server import default_model, title_of

pytestmark = pytest.mark.slow

GRAMMAR = StructuredOutput(GrammarKind.REGEX, "([a-c]|[x-z][0-9])*", is_isolated=True)
VOCAB_SIZE = 49_152
EOS = 2


class Run:
    """A grammar whose masks are awaited."""

    def __init__(self, grammars: IsolatedGrammars) -> None:
        self._has_answer = threading.Event()
        self._grammar = grammars.start(GRAMMAR, self._report)

    def _report(self, grammar: IsolatedGrammar) -> None:
        self._has_answer.set()

    def accept(self, token_ids: Sequence[int]) -> None:
        self._has_answer.clear()
        assert self._grammar.accept(token_ids)

    def choices(self) -> list[int]:
        assert self._has_answer.wait(60)
        assert not self._grammar.error and self._grammar.mask is not None
        bits = np.unpackbits(np.frombuffer(self._grammar.mask, np.uint8), bitorder="little")
        return np.flatnonzero(bits[:VOCAB_SIZE]).tolist()

    def close(self) -> None:
        self._grammar.close()


def grammar_processes() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if title_of(child) == "grammar"]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
def test_an_isolated_grammar_outlives_its_process(signum: signal.Signals) -> None:
    path = str(tokenizer_json_path(default_model()))
    grammars = IsolatedGrammars(GrammarProcesses(path, VOCAB_SIZE, (EOS,)))
    undisturbed, disturbed = Run(grammars), Run(grammars)
    rng = random.Random(0)
    for number in range(12):
        choices = undisturbed.choices()
        assert disturbed.choices() == choices
        if number % 3 == 0:
            processes = grammar_processes()
            # The next token shows that it is lost.
            rng.choice(processes).send_signal(signum)
        token = rng.choice([choice for choice in choices if choice != EOS])
        for run in (undisturbed, disturbed):
            run.accept([token])
    for run in (undisturbed, disturbed):
        run.close()
    grammars.close()
