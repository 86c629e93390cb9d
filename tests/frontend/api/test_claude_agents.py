"""Parts of Anthropic's API that agents use: tools, summaries and changes of tools, and batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import pytest
from engine.frontend.api.dialects.anthropic_tools import CLIENT_TOOLS
from support.dialects import KEY, TOOLS, claude_client, dialect_frontend, options
from support.frontend_process import MODEL, FrontendProcess
from support.shown_prompts import ANSWER

if TYPE_CHECKING:
    import anthropic

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def frontend() -> Iterator[FrontendProcess]:
    with dialect_frontend() as process:
        yield process


@pytest.fixture(scope="module")
def claude(frontend: FrontendProcess) -> Iterator[anthropic.Anthropic]:
    with claude_client(frontend) as client:
        yield client


def test_claude_tools_that_anthropic_defines_are_functions(
    frontend: FrontendProcess, claude: anthropic.Anthropic
) -> None:
    screen = {"display_width_px": 800, "display_height_px": 600, "enable_zoom": True}
    call = json.dumps({"command": "view", "path": "/memories"})
    for kind, (name, *_) in CLIENT_TOOLS.items():
        tool: dict = {"type": kind, "name": name} | (screen if name == "computer" else {})
        text = json.dumps({"action": "screenshot"}) if name == "computer" else call
        choice = {"type": "tool", "name": name}
        fields = options(frontend, text) | {"tools": [tool], "tool_choice": choice}
        [block] = claude.messages.create(**fields).content
        assert (block.type, block.name, block.input) == ("tool_use", name, json.loads(text))
    fields["tools"] = [tool | {"name": "other"}]
    for wrong_tool, field in (
        (tool | {"name": "other"}, "name"),
        ({"type": "computer_20251124", "name": "computer"}, "display_width_px"),
        ({"type": "web_search_20250305", "name": "web_search"}, "type"),
    ):
        body = fields | {"tools": [wrong_tool], "tool_choice": None}
        answer = frontend.http.post("/v1/messages", json=body, headers={"x-api-key": KEY})
        assert f"tools[0].{field} must be" in answer.json()["error"]["message"]


def test_claude_tool_runner_continues_without_a_thread(
    frontend: FrontendProcess, claude: anthropic.Anthropic
) -> None:
    """Newer clients ask the server to hold the conversation, and send all of it if the server says that it cannot."""
    import anthropic

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Look out.

        Args:
            city: The city.
        """
        return f"Snow in {city}"

    fields = options(frontend, ANSWER) | {"tools": [get_weather], "max_iterations": 1}
    [message] = claude.beta.messages.tool_runner(**fields)
    assert [block.name for block in message.content if block.type == "tool_use"] == [
        "get_weather"
    ] * 2


def test_claude_summaries_and_changes_of_tools_apply(
    frontend: FrontendProcess, claude: anthropic.Anthropic
) -> None:
    other = {"name": "find", "input_schema": {"type": "object"}}
    added = {"type": "tool_definition", "definition": other}
    weather = {"type": "tool_reference", "name": "get_weather"}
    messages = [
        {"role": "user", "content": "Long ago"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Yes"},
                {"type": "compaction", "content": "They met."},
                {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
            ],
        },
        {"role": "system", "content": [{"type": "tool_addition", "tool": added}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "So?"},
                {"type": "tool_removal", "tool": weather},
                {"type": "compaction", "content": None},
            ],
        },
    ]
    body: dict = {"model": MODEL, "messages": messages, "tools": TOOLS, "max_tokens": 60}

    def send() -> httpx.Response:
        return frontend.http.post("/v1/messages", json=body, headers={"x-api-key": KEY})

    summary = "Summary of the conversation before this message:\n\nThey met."
    text = send().json()["content"][0]["text"]
    assert text.startswith(f"[user:{summary}][user:So?]find")
    body["tool_choice"] = {"type": "tool", "name": "get_weather"}
    assert send().status_code == 400
    messages.append({"role": "user", "content": [{"type": "tool_addition", "tool": weather}]})
    assert send().status_code == 200
    messages[3]["content"][1]["tool"] = {"type": "tool_reference", "name": "unknown"}
    assert "messages[3].content[1].tool.name must be" in send().json()["error"]["message"]
