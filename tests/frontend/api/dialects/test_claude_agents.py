"""Parts of Anthropic's API that agents use: tools, summaries and changes of tools, and batches."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import pytest
from engine.frontend.api.dialects.anthropic.tools import CLIENT_TOOLS
from support.chat.shown_prompts import ANSWER, SCHEMA
from support.requests.dialects import KEY, TOOLS, claude_client, dialect_frontend, options
from support.servers.frontend_process import MODEL, FrontendProcess

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


def test_claude_tools_that_a_search_finds_are_defined_in_its_result(
    frontend: FrontendProcess, claude: anthropic.Anthropic
) -> None:
    """A definition at the start of the prompt would change everything that the prefix cache has."""
    find = {"name": "find", "description": "Finds tools.", "input_schema": {"type": "object"}}
    deferred = [tool | {"defer_loading": True} for tool in (*TOOLS, find | {"name": "other"})]
    # Claude Code sorts the tools that it found into the others.
    body: dict = {"model": MODEL, "tools": [deferred[0], find, deferred[1]], "max_tokens": 300}
    search = {"type": "tool_use", "id": "toolu_1", "name": "find", "input": {}}
    parts = [{"type": "tool_reference", "tool_name": name} for name in ("get_weather", "gone")]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": parts}
    start = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": [search]}]

    def send(messages: list[dict], **fields: object) -> httpx.Response:
        given = body | {"messages": messages} | fields
        return frontend.http.post("/v1/messages", json=given, headers={"x-api-key": KEY})

    text = send([*start, *start[:1]]).json()["content"][0]["text"]
    assert text.startswith("[user:Hi][assistant:|toolu_1 find {}][user:Hi]find[")
    messages = [*start, {"role": "user", "content": [result]}]
    text = send(messages).json()["content"][0]["text"]
    before, after = text.split("[tool:")[:2]
    assert before == "[user:Hi][assistant:|toolu_1 find {}]"
    definition, others = after.split("\n", 1)
    function = json.loads(definition)["function"]
    assert function["name"] == "get_weather" and function["parameters"] == SCHEMA
    assert others.startswith("gone|toolu_1]find[")

    def forced(name: str, messages: list[dict]) -> httpx.Response:
        return send(messages, tool_choice={"type": "tool", "name": name})

    assert forced("get_weather", start[:1]).status_code == 400
    assert forced("get_weather", messages).status_code == 200
    assert forced("other", messages).status_code == 400
    addition = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "other"}}
    added = [*messages, {"role": "user", "content": [addition]}]
    assert forced("other", added).status_code == 200


def test_claude_batches_answer_each_request(
    frontend: FrontendProcess, claude: anthropic.Anthropic
) -> None:
    requests: list = [
        {"custom_id": name, "params": options(frontend, text)}
        for name, text in (("first", "One two"), ("second", "Three"))
    ]
    bad = {"custom_id": "bad", "params": options(frontend, "x") | {"top_p": 5}}
    made = claude.messages.batches.create(requests=[*requests, bad])
    assert made.processing_status == "in_progress" and made.results_url is None
    assert made.request_counts.processing == 3
    batch = wait_for_end(claude, made.id)
    counts = {"processing": 0, "succeeded": 2, "errored": 1, "canceled": 0, "expired": 0}
    assert batch.request_counts.to_dict() == counts and batch.ended_at >= batch.created_at
    first, second, third = claude.messages.batches.results(batch.id)
    assert [each.custom_id for each in (first, second, third)] == ["first", "second", "bad"]
    assert first.result.message.content[0].text == "One two"
    assert second.result.message.stop_reason == "max_tokens"
    assert third.result.error.error.type == "invalid_request_error"
    assert "top_p" in third.result.error.error.message

    other = claude.messages.batches.create(requests=requests)
    listed = [each.id for each in claude.messages.batches.list(limit=1)]
    assert listed[:2] == [other.id, made.id]
    before = claude.messages.batches.list(before_id=made.id)
    assert [each.id for each in before.data] == [other.id]
    wait_for_end(claude, other.id)
    assert claude.messages.batches.delete(other.id).type == "message_batch_deleted"
    assert next(each.id for each in claude.messages.batches.list()) == made.id
    with frontend.client(KEY) as client:
        assert not client.batches.list().data


def wait_for_end(claude: anthropic.Anthropic, identifier: str) -> anthropic.types.MessageBatch:
    deadline = time.monotonic() + 30
    while (batch := claude.messages.batches.retrieve(identifier)).processing_status != "ended":
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
    return batch


def test_claude_batches_that_are_cancelled_or_invalid(
    frontend: FrontendProcess, claude: anthropic.Anthropic
) -> None:
    long = options(frontend, "One") | {"max_tokens": 900}
    made = claude.messages.batches.create(
        requests=[{"custom_id": str(i), "params": long} for i in range(500)]
    )
    cancelled = claude.messages.batches.cancel(made.id)
    assert cancelled.processing_status in ("canceling", "ended")
    batch = wait_for_end(claude, made.id)
    assert batch.request_counts.canceled and batch.cancel_initiated_at
    kinds = [each.result.type for each in claude.messages.batches.results(batch.id)]
    assert kinds.count("canceled") == batch.request_counts.canceled and len(kinds) == 500
    params = options(frontend, "x")
    for requests, problem in (
        ([], "requests is required"),
        ([{"custom_id": "a"}], r"requests\[0\].params must be an object"),
        ([{"custom_id": "a", "params": params}] * 2, r"requests\[1\].custom_id: .*already used"),
        ([{"custom_id": "a", "params": params | {"stream": True}}], r"\[0\].params.stream: "),
    ):
        body = {"requests": requests}
        answer = frontend.http.post("/v1/messages/batches", json=body, headers={"x-api-key": KEY})
        assert answer.status_code == 400 and answer.json()["type"] == "error"
        assert re.search(problem, answer.json()["error"]["message"]), answer.text


def test_claude_stores_lists_and_deletes_files(claude: anthropic.Anthropic) -> None:
    import anthropic

    files = claude.beta.files
    stored = [
        files.upload(file=(f"{name}.txt", name.encode(), "text/plain"), expires_in_seconds=3600)
        for name in ("one", "three", "fourth")
    ]
    first = stored[0]
    assert (first.type, first.filename, first.mime_type) == ("file", "one.txt", "text/plain")
    assert first.size_bytes == 3 and first.expires_at is not None
    assert (first.expires_at - first.created_at).total_seconds() == 3600
    assert files.retrieve_metadata(first.id) == first
    assert files.download(first.id).read() == b"one"
    # Other tests store files of batches.
    assert [file for file in files.list(limit=2) if file.filename.endswith(".txt")] == stored[::-1]
    assert files.list(ids=[first.id, "file-0"]).data == [first]
    assert files.delete(first.id).type == "file_deleted"
    with pytest.raises(anthropic.NotFoundError):
        files.retrieve_metadata(first.id)
    with pytest.raises(anthropic.BadRequestError, match="expires_in_seconds must be between"):
        files.upload(file=("a", b"a"), expires_in_seconds=1)


def test_claude_computes_a_prompt_without_an_answer(
    frontend: FrontendProcess, claude: anthropic.Anthropic
) -> None:
    fields = options(frontend, ANSWER)
    full = claude.messages.create(**fields)
    empty = claude.messages.create(**fields | {"max_tokens": 0})
    assert (empty.content, empty.stop_reason, empty.stop_sequence) == ([], "max_tokens", None)
    usage = empty.usage
    assert (usage.input_tokens, usage.output_tokens) == (full.usage.input_tokens, 0)
    for extra, problem in (
        ({"stream": True}, "stream must be false if max_tokens is 0"),
        ({"max_tokens": -1}, "max_tokens must be at least 0, got -1"),
    ):
        body = fields | {"max_tokens": 0} | extra
        answer = frontend.http.post("/v1/messages", json=body, headers={"x-api-key": KEY})
        assert (answer.status_code, answer.json()["error"]["message"][: len(problem)]) == (
            400,
            problem,
        )
