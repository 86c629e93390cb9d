"""Tools in the Responses API: forced calls, custom tools, and tools of MCP servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.frontend_process import FrontendProcess, sound_frontend
from support.responses import NAMESPACE, TOOLS, options
from support.shown_prompts import TEMPLATE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def frontend() -> Iterator[FrontendProcess]:
    with sound_frontend(
        step_s=0.0005, tool_call_parser="hermes", max_model_len=1024, chat_template=TEMPLATE
    ) as process:
        yield process


@pytest.fixture(scope="module")
def client(frontend: FrontendProcess) -> Iterator[openai.OpenAI]:
    with frontend.client() as openai_client:
        yield openai_client


def test_forced_calls_and_custom_tools(frontend: FrontendProcess, client: openai.OpenAI) -> None:
    named = client.responses.create(
        **options(frontend, '{"city": "Oslo"}'),
        tools=TOOLS,
        tool_choice={"type": "function", "name": "get_weather"},
        # The format applies to text, and the answer has no text.
        text={"format": {"type": "json_object"}},
    )
    assert json.loads(named.output[0].arguments) == {"city": "Oslo"}
    custom: list[Any] = [{"type": "custom", "name": "run", "description": "Runs a command."}]
    text = f"<tool_call>\n{json.dumps({'name': 'run', 'arguments': {'input': 'ls'}})}\n</tool_call>"
    with client.responses.stream(**options(frontend, text), tools=custom) as stream:
        events = list(stream)
    call = events[-1].response.output[0]
    assert (call.type, call.name, call.input) == ("custom_tool_call", "run", "ls")
    kinds = [event.type for event in events]
    assert "response.custom_tool_call_input.delta" in kinds
    assert "response.custom_tool_call_input.done" in kinds


def test_namespaced_tools_are_called_by_their_own_names(
    frontend: FrontendProcess, client: openai.OpenAI
) -> None:
    """Coding agents send the tools of MCP servers like this, together with tools that OpenAI's servers run."""
    tools: list[Any] = [{"type": "web_search"}, NAMESPACE, *TOOLS]
    text = f"<tool_call>\n{json.dumps({'name': 'files__read', 'arguments': {}})}\n</tool_call>"
    with client.responses.stream(**options(frontend, text), tools=tools) as stream:
        events = list(stream)
    added = next(event.item for event in events if event.type == "response.output_item.added")
    [call] = events[-1].response.output
    for item in (added, call):
        assert (item.type, item.name, item.namespace) == ("function_call", "read", "files")
    assert [tool.type for tool in events[-1].response.tools] == ["namespace", "function"]
    repeated = list(client.responses.retrieve(events[-1].response.id, stream=True))
    assert repeated[-1].response.output == [call]
    answer = {"type": "function_call_output", "call_id": call.call_id, "output": "Text"}
    second = client.responses.create(
        **options(frontend, "") | {"input": [call.to_dict(), answer], "max_output_tokens": 90},
        tools=tools,
    )
    assert "files__read {}" in second.output_text
    forced = client.responses.create(
        **options(frontend, "{}"),
        tools=tools,
        tool_choice={"type": "function", "name": "read", "namespace": "files"},
    )
    assert (forced.output[0].name, forced.output[0].namespace) == ("read", "files")
