"""End the reasoning of running answers, as llama.cpp's clients do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from starlette.types import Receive

from ....protocol.sampling_params import StructuredOutput
from ...client.engine_client import Sequence
from ..answer import Outputs
from ..chats.formats import ANY_OUTPUT
from ..generation import PreparedPrompt
from ..serving import Serving
from ..tools.tool_choice import ToolChoice, ToolMode


async def constraint_after_reasoning(
    serving: Serving, constraint: StructuredOutput | None, tools: ToolChoice, receive: Receive
) -> StructuredOutput:
    """Return the constraint on the text after a reasoning that is ended: the request's own, or that of its tools.

    Raises:
        APIError: The server cannot write a grammar of the calls (400).
        ClientDisconnected: The client disconnected while the grammar was checked.
    """
    if constraint is None and tools.mode is ToolMode.AUTO:
        rules = serving.formats.limit_calls(tools)
        constraint = await serving.verify_constraint(rules, receive)
    return constraint or ANY_OUTPUT


@contextlib.contextmanager
def controllable(
    serving: Serving, key: tuple[str, str], prompt: PreparedPrompt | None, group: Outputs
) -> Iterator[None]:
    """Let clients end the reasoning of a running answer, if its request allows that.

    `key` is the owner of the answer and its ID.
    """
    if prompt is None or prompt.after_reasoning is None:
        yield
        return

    def end() -> bool:
        ended = [_end(serving, prompt, sequence) for sequence in group.sequences]
        return any(ended)

    serving.engine.reasoning_ends.add_answer(*key, end)
    try:
        yield
    finally:
        serving.engine.reasoning_ends.remove_answer(*key)


def _end(serving: Serving, prompt: PreparedPrompt, sequence: Sequence) -> bool:
    """End the reasoning of a sequence. Return False if the sequence is not in its reasoning.

    The sequence continues with a grammar in which the end of the reasoning follows its tokens. Its core gets it again
    as after a crash, with the tokens so far, so that the client receives every token once.
    """
    parser = serving.formats.new_reasoning_parser(prompt.text or "")
    if parser is None or prompt.after_reasoning is None or sequence.finished:
        return False
    constraint = parser.end_after(sequence.token_ids, prompt.after_reasoning, serving.tokenizer)
    if constraint is None:
        return False
    serving.engine.constrain(sequence, constraint)
    return True
