"""Checks of grammars in separate processes."""

from __future__ import annotations

import asyncio
import sys

import pytest
from engine.frontend.client.executor import ThreadExecutor
from engine.frontend.client.grammar_checks import GrammarChecks
from engine.protocol.errors import UnavailableError
from engine.protocol.grammars.process import GrammarProcesses
from engine.protocol.sampling_params import GrammarKind, StructuredOutput
from support.chat.grammars import SMOLLM2_EOS
from support.servers.engine_fixtures import smollm2_tokenizer


def test_cores_prepare_while_the_first_grammar_is_checked() -> None:
    tokenizer = smollm2_tokenizer()
    processes = GrammarProcesses(str(tokenizer.path), tokenizer.vocab_size, (SMOLLM2_EOS,))
    prepared: list[str] = []

    async def check_both() -> None:
        checks = GrammarChecks(processes, ThreadExecutor(), lambda: prepared.append("core 0"))
        for pattern in ("a+", "b+"):
            assert not (await checks.check(StructuredOutput(GrammarKind.REGEX, pattern))).problem
            assert prepared == ["core 0"]
        checks.close()

    asyncio.run(check_both())


def test_a_grammar_without_a_process_may_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = GrammarProcesses("/nonexistent/tokenizer.json", 10, (2,))
    grammar = StructuredOutput(GrammarKind.REGEX, "a+")

    async def check_twice() -> None:
        checks = GrammarChecks(processes, ThreadExecutor())
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", "/removed/python")
            with pytest.raises(UnavailableError, match=r"to check the grammar: .*; retry later"):
                await checks.check(grammar)
        assert not (await checks.check(grammar)).problem
        checks.close()

    asyncio.run(check_twice())
