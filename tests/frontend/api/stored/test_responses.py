"""The Responses API, used by OpenAI's own client.

The core repeats the last message, so a test says in it what the model writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from support.chat.shown_prompts import ANSWER, TEMPLATE
from support.requests.responses import AGENT_MESSAGE, TOOLS, num_tokens, options
from support.servers.frontend_process import MODEL, FrontendProcess, sound_frontend

pytestmark = pytest.mark.slow

KEYS = ("sesame", "other")


@pytest.fixture(scope="module")
def frontend() -> Iterator[FrontendProcess]:
    with sound_frontend(
        step_s=0.0005,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        max_model_len=1024,
        chat_template=TEMPLATE,
        api_keys=KEYS,
    ) as process:
        yield process


@pytest.fixture(scope="module")
def client(frontend: FrontendProcess) -> Iterator[openai.OpenAI]:
    with frontend.client(KEYS[0]) as openai_client:
        yield openai_client


@pytest.fixture(scope="module")
def stranger(frontend: FrontendProcess) -> Iterator[openai.OpenAI]:
    with frontend.client(KEYS[1]) as openai_client:
        yield openai_client


def post(frontend: FrontendProcess, path: str, **body: Any) -> httpx.Response:
    return frontend.http.post(path, json=body, headers={"Authorization": f"Bearer {KEYS[0]}"})


def shown(items: Any) -> list[dict[str, Any]]:
    """Return items without the fields that differ between two equal responses."""
    return [item.model_dump(exclude={"id", "call_id"}, exclude_none=True) for item in items]


def test_response_has_items_and_usage(frontend: FrontendProcess, client: openai.OpenAI) -> None:
    response = client.responses.create(**options(frontend, ANSWER), tools=TOOLS)
    reasoning, message, first, second = response.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "Let me see.")
    assert message.type == "message" and response.output_text == "I look it up."
    assert [(c.type, c.name, json.loads(c.arguments)) for c in (first, second)] == [
        ("function_call", "get_weather", {"city": "Oslo"}),
        ("function_call", "get_weather", {"city": "Rome"}),
    ]
    assert len({item.id for item in response.output}) == 4 and first.call_id != second.call_id
    assert response.model == MODEL and response.id.startswith("resp_")
    assert response.tools[0].name == "get_weather" and response.tool_choice == "auto"
    total = num_tokens(frontend, ANSWER)
    assert (response.usage.input_tokens, response.usage.output_tokens) == (total, total)
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < total
    assert response.usage.total_tokens == 2 * total


def test_response_that_is_cut_is_incomplete(client: openai.OpenAI) -> None:
    extra: Any = {"extra_body": {"enable_response_messages": True}, "max_output_tokens": 2}
    cache: Any = {"prompt_cache_options": {"mode": "explicit"}, "prompt_cache_retention": "24h"}
    response = client.responses.create(model=MODEL, input="One two three", **extra, **cache)
    assert (response.prompt_cache_options.mode, response.prompt_cache_options.ttl) == (
        "explicit",
        "30m",
    )
    assert response.prompt_cache_retention == "24h"
    assert response.status == "incomplete" and response.output_text == "One two"
    # vLLM's clients read the prompt and the answer as tokens.
    [[given], [written]] = [response.model_extra[f"{n}_messages"] for n in ("input", "output")]
    assert (written["type"], written["message"]) == ("raw_message_tokens", "One two")
    assert "One two three" in given["message"]
    assert len(given["tokens"]) == response.usage.input_tokens
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[-1].status == "incomplete"


def test_stream_accumulates_to_the_response(
    frontend: FrontendProcess, client: openai.OpenAI
) -> None:
    whole = client.responses.create(**options(frontend, ANSWER), tools=TOOLS)
    with client.responses.stream(**options(frontend, ANSWER), tools=TOOLS) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    order = list(dict.fromkeys(kinds[2:-1]))
    assert order == [
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
    ]
    assert kinds.count("response.output_item.added") == 4
    assert kinds.count("response.output_item.done") == 4
    final = events[-1].response
    assert shown(final.output) == shown(whole.output)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert shown(done) == shown(final.output)
    assert [item.id for item in done] == [item.id for item in final.output]
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == final.output_text
    assert final.usage == whole.usage


def test_reasoning_is_a_summary_if_asked_for(
    frontend: FrontendProcess, client: openai.OpenAI
) -> None:
    fields = options(frontend, ANSWER) | {"reasoning": {"summary": "auto", "effort": "high"}}
    with client.responses.stream(**fields) as stream:
        events = list(stream)
    kinds = list(dict.fromkeys(event.type for event in events))
    at = kinds.index("response.reasoning_summary_part.added")
    assert kinds[at + 1 : at + 4] == [
        "response.reasoning_summary_text.delta",
        "response.reasoning_summary_text.done",
        "response.reasoning_summary_part.done",
    ]
    reasoning = events[-1].response.output[0]
    assert reasoning.summary[0].text == "Let me see." and not reasoning.content
    assert events[-1].response.reasoning.effort == "high"


def test_encoded_reasoning_can_be_sent_back(
    frontend: FrontendProcess, client: openai.OpenAI
) -> None:
    first = client.responses.create(
        **options(frontend, ANSWER),
        include=["reasoning.encrypted_content"],
        reasoning={"summary": "auto"},
        store=False,
    )
    reasoning = first.output[0].model_dump(exclude_none=True) | {"summary": []}
    expected = "[assistant:|Let me see.][user:Go on]"
    second = client.responses.create(
        model=MODEL,
        input=[reasoning, {"role": "user", "content": "Go on"}],
        max_output_tokens=num_tokens(frontend, expected),
    )
    assert second.output_text == expected
    missing = client.responses.with_raw_response
    with pytest.raises(openai.NotFoundError):
        missing.retrieve(first.id)


def test_items_of_every_kind_reach_the_template(
    frontend: FrontendProcess, client: openai.OpenAI
) -> None:
    items: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Wait", "annotations": []}],
        },
        {
            "type": "function_call",
            "call_id": "call_1",
            "name": "get_weather",
            "arguments": '{"city": "Oslo"}',
        },
        {"type": "custom_tool_call", "call_id": "call_2", "name": "run", "input": "ls"},
        {"type": "function_call_output", "call_id": "call_1", "output": "Rain"},
        {
            "type": "custom_tool_call_output",
            "call_id": "call_2",
            "output": [{"type": "input_text", "text": "a.txt"}],
        },
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]},
        AGENT_MESSAGE,
        {
            "role": "user",
            "content": [
                {
                    "type": "input_file",
                    "filename": "b.txt",
                    "file_data": "data:text/plain;base64,RG9j",
                }
            ],
        },
    ]
    expected = (
        '[system:Be brief.][user:Hi][assistant:Wait|Hm|call_1 get_weather {"city": "Oslo"}'
        '|call_2 run {"input": "ls"}][tool:Rain|call_1][tool:a.txt|call_2][assistant:No]'
        "[user:[agent message from /root/a to /root]\nDone\n[encrypted text]]"
        "[user:b.txt\n\nDoc]get_weather"
    )
    fields: dict[str, Any] = {"model": MODEL, "instructions": "Be brief.", "input": items}
    counted = client.responses.input_tokens.count(**fields, tools=TOOLS)
    assert counted.input_tokens == num_tokens(frontend, expected)
    response = client.responses.create(
        **fields, tools=TOOLS, max_output_tokens=counted.input_tokens
    )
    assert response.output_text == expected


def test_conversation_is_compacted_to_a_summary(client: openai.OpenAI) -> None:
    user: Any = {"role": "user", "content": "One"}
    items: list[Any] = [{"role": "system", "content": "Be brief."}, user]
    compacted = client.responses.compact(model=MODEL, input=items)
    assert compacted.object == "response.compaction" and compacted.usage.output_tokens > 0
    system, summary = [each.model_dump(warnings=False) for each in compacted.output]
    assert system["content"][0]["text"] == "Be brief." and summary["type"] == "compaction"
    text = client.responses.create(model=MODEL, input=[items[0], summary, user]).output_text
    # The core repeats the prompt for the summary, which begins with the conversation.
    head = "[system:Be brief.][user:Summary of the conversation before this message:\n\n"
    assert text.startswith(f"{head}[system:Be brief.][user:One][user:Summarize ")
    assert "][user:One]" in text[len(head) + 60 :]
    with pytest.raises(openai.BadRequestError, match="not written by this server"):
        client.responses.create(model=MODEL, input=[summary | {"encrypted_content": "x"}])
    # If a conversation does not fit, only its end is used.
    long: list[Any] = [{"role": "user", "content": f"{i} " * 100} for i in range(30)]
    assert len(client.responses.compact(model=MODEL, input=long).output) == 1


def test_uploaded_file_is_read(
    frontend: FrontendProcess, client: openai.OpenAI, stranger: openai.OpenAI
) -> None:
    file = client.files.create(file=("b.txt", b"Doc"), purpose="user_data")
    part: Any = {"type": "input_file", "file_id": file.id}
    fields: dict[str, Any] = {
        "model": MODEL,
        "input": [{"role": "user", "content": [part]}],
        "max_output_tokens": num_tokens(frontend, "b.txt\n\nDoc"),
    }
    first = client.responses.create(**fields)
    assert first.output_text == "b.txt\n\nDoc"
    items = client.responses.input_items.list(first.id)
    assert items.data[0].content[0].file_id == file.id
    with pytest.raises(openai.NotFoundError):
        stranger.responses.create(**fields)


def test_logprobs_are_those_of_the_text(frontend: FrontendProcess, client: openai.OpenAI) -> None:
    fields = options(frontend, "<think>\nHm.\n</think>\n\nOne two") | {
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    whole = client.responses.create(**fields)
    streamed = list(client.responses.create(**fields, stream=True))[-1].response
    for response in (whole, streamed):
        [part] = response.output[-1].content
        assert "".join(entry.token for entry in part.logprobs).strip() == part.text == "One two"
        assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


def test_truncation_drops_the_oldest_items(client: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": f"{i} " + "word " * 200} for i in range(8)]
    fields: dict[str, Any] = {"model": MODEL, "input": items, "instructions": "Be brief."}
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        client.responses.create(**fields)
    assert caught.value.param == "input"
    response = client.responses.create(**fields, truncation="auto", max_output_tokens=20)
    assert response.output_text.startswith("[system:Be brief.][user:")
    assert 500 < response.usage.input_tokens < 1024


def test_response_continues_the_previous_one(
    frontend: FrontendProcess, client: openai.OpenAI, stranger: openai.OpenAI
) -> None:
    first = client.responses.create(**options(frontend, "One"), metadata={"a": "b"})
    expected = "[user:One][assistant:One][user:Two]"
    second = client.responses.create(
        model=MODEL,
        input="Two",
        previous_response_id=first.id,
        max_output_tokens=num_tokens(frontend, expected),
    )
    assert second.output_text == expected and second.previous_response_id == first.id
    stored = client.responses.retrieve(first.id)
    assert shown(stored.output) == shown(first.output) and stored.metadata == {"a": "b"}
    items = client.responses.input_items.list(second.id, order="asc")
    assert [item.content[0].text for item in items.data] == ["One", "One", "Two"]
    page = client.responses.input_items.list(second.id, limit=1)
    assert page.has_more and page.data[0].content[0].text == "Two"
    after = client.responses.input_items.list(second.id, limit=1, after=page.data[0].id)
    assert after.data[0].id == first.output[0].id
    referenced = client.responses.create(
        model=MODEL,
        input=[
            {"type": "item_reference", "id": first.output[0].id},
            {"role": "user", "content": "?"},
        ],
        max_output_tokens=num_tokens(frontend, "[assistant:One][user:?]"),
    )
    assert referenced.output_text == "[assistant:One][user:?]"
    for call in (
        lambda: stranger.responses.retrieve(first.id),
        lambda: stranger.responses.delete(first.id),
        lambda: stranger.responses.cancel(first.id),
        lambda: stranger.responses.input_items.list(first.id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=r"Response with id .* not found"):
        client.responses.retrieve(first.id)
    # As at OpenAI, whose clients then send the whole conversation.
    for each, previous in ((stranger, first), (client, second)):
        with pytest.raises(openai.BadRequestError) as caught:
            each.responses.create(model=MODEL, input="x", previous_response_id=previous.id)
        assert caught.value.code == "previous_response_not_found"


def test_conversation_collects_items(
    frontend: FrontendProcess, client: openai.OpenAI, stranger: openai.OpenAI
) -> None:
    conversation = client.conversations.create(
        items=[{"type": "message", "role": "user", "content": "One"}], metadata={"a": "b"}
    )
    expected = "[user:One][user:Two]"
    response = client.responses.create(
        model=MODEL,
        input="Two",
        conversation=conversation.id,
        max_output_tokens=num_tokens(frontend, expected),
    )
    assert response.output_text == expected and response.conversation.id == conversation.id
    items = client.conversations.items.list(conversation.id, order="asc")
    assert [item.content[0].text for item in items.data] == ["One", "Two", expected]
    added = client.conversations.items.create(
        conversation.id, items=[{"type": "message", "role": "user", "content": "Three"}]
    )
    found = client.conversations.items.retrieve(added.data[0].id, conversation_id=conversation.id)
    assert found.content[0].text == "Three"
    client.conversations.items.delete(items.data[0].id, conversation_id=conversation.id)
    newest = client.conversations.items.list(conversation.id, limit=2)
    assert newest.has_more and newest.data[0].id == added.data[0].id
    assert len(list(client.conversations.items.list(conversation.id, limit=1))) == 3
    assert client.conversations.update(conversation.id, metadata={"c": "d"}).metadata == {"c": "d"}
    with pytest.raises(openai.NotFoundError):
        stranger.conversations.retrieve(conversation.id)
    with pytest.raises(openai.NotFoundError):
        stranger.responses.create(model=MODEL, input="x", conversation=conversation.id)
    assert client.conversations.delete(conversation.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(conversation.id)


def wait_for(client: openai.OpenAI, response: Any) -> Any:
    """Poll as the client's documentation does."""
    while response.status in ("queued", "in_progress"):
        response = client.responses.retrieve(response.id)
    return response


@pytest.mark.timeout(60)
def test_background_response_runs_without_its_client(
    frontend: FrontendProcess, client: openai.OpenAI, stranger: openai.OpenAI
) -> None:
    response = client.responses.create(**options(frontend, ANSWER), tools=TOOLS, background=True)
    assert response.status == "queued" and response.background
    with pytest.raises(openai.NotFoundError):
        stranger.responses.retrieve(response.id)
    ended = wait_for(client, response)
    whole = client.responses.create(**options(frontend, ANSWER), tools=TOOLS)
    assert shown(ended.output) == shown(whole.output) and ended.usage == whole.usage
    assert client.responses.cancel(response.id).status == ended.status
    with pytest.raises(openai.BadRequestError, match="does not run in the background"):
        client.responses.cancel(whole.id)
    with pytest.raises(openai.BadRequestError, match=r"top_p must be"):
        client.responses.create(model=MODEL, input="x", background=True, top_p=9)


@pytest.mark.timeout(60)
def test_background_stream_continues_after_any_event(
    frontend: FrontendProcess, client: openai.OpenAI
) -> None:
    fields = options(frontend, ANSWER) | {"tools": TOOLS}
    events = list(client.responses.create(**fields, background=True, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    identifier = events[0].response.id
    for start in (0, 7, len(events) - 2, len(events) - 1):
        again = list(client.responses.retrieve(identifier, stream=True, starting_after=start))
        assert again == events[start + 1 :]
    stream = client.responses.create(**fields, background=True, stream=True)
    seen = [next(stream), next(stream)]
    stream.close()
    rest = list(
        client.responses.retrieve(
            seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number
        )
    )
    assert [event.type for event in [*seen, *rest]] == kinds
    assert shown(rest[-1].response.output) == shown(events[-1].response.output)


def test_events_of_an_ended_response_can_be_repeated(
    frontend: FrontendProcess, client: openai.OpenAI
) -> None:
    response = client.responses.create(**options(frontend, ANSWER), tools=TOOLS)
    events = list(client.responses.retrieve(response.id, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert shown(events[-1].response.output) == shown(response.output)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in response.output]
    for query, named in (
        ("include[]=nope", "include[] must be one of message.output_text.logprobs"),
        ("starting_after=1", "starting_after needs stream=true"),
    ):
        refused = frontend.http.get(
            f"/v1/responses/{response.id}?{query}", headers={"Authorization": f"Bearer {KEYS[0]}"}
        )
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith(named)
    including = {"include": ["message.output_text.logprobs"]}
    assert client.responses.input_items.list(response.id, **including).data


@pytest.mark.timeout(60)
def test_background_response_is_cancelled(client: openai.OpenAI) -> None:
    stream = client.responses.create(
        model=MODEL, input="word " * 50, background=True, stream=True, max_output_tokens=900
    )
    identifier = next(stream).response.id
    cancelled = client.responses.cancel(identifier)
    assert cancelled.status == "cancelled"
    assert client.responses.retrieve(identifier).status == "cancelled"
    assert "response.completed" not in [event.type for event in stream]
