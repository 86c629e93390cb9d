"""Checks of grammars as a frontend performs them, and their compilation in the core."""

from __future__ import annotations

import asyncio
import threading
from functools import cache
from typing import Any

import msgspec
import uvloop
from engine.core.structured_output.manager import StructuredOutputManager
from engine.frontend.client.executor import ThreadExecutor
from engine.frontend.client.grammar_checks import GrammarChecks
from engine.protocol.errors import ParameterError
from engine.protocol.grammars.expressions import PARAM
from engine.protocol.grammars.process import GrammarProcesses
from engine.protocol.sampling_params import StructuredOutput
from support.servers.engine_fixtures import smollm2_tokenizer

SMOLLM2_EOS = 2


@cache
def _checks() -> tuple[asyncio.Runner, GrammarChecks]:
    """Return the pool of this process, which is closed at exit."""
    tokenizer = smollm2_tokenizer()
    processes = GrammarProcesses(str(tokenizer.path), tokenizer.vocab_size, (SMOLLM2_EOS,))
    return asyncio.Runner(loop_factory=uvloop.new_event_loop), GrammarChecks(
        processes, ThreadExecutor()
    )


def verify_structured_output(structured_output: StructuredOutput) -> bool:
    """Return whether a grammar needs a process to itself. Raises ParameterError if it cannot be used."""
    return usable(structured_output).is_isolated


def usable(structured_output: StructuredOutput) -> StructuredOutput:
    """Return the grammar as the core receives it. Raises ParameterError if it cannot be used."""
    runner, checks = _checks()
    verdict = runner.run(checks.check(structured_output))
    if verdict.problem:
        raise ParameterError(PARAM, verdict.problem)
    spec = structured_output.spec if verdict.spec is None else verdict.spec
    return msgspec.structs.replace(structured_output, spec=spec, is_isolated=verdict.is_isolated)


def await_events(manager: StructuredOutputManager) -> dict[Any, str | None]:
    """Return the events of all compilations: the error of each key, or None."""
    events: dict[Any, str | None] = {}
    tick = threading.Event()
    while manager.is_compiling:
        events.update(manager.poll())
        tick.wait(0.001)
    return events
