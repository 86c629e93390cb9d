"""Chat completions that are stored, used by OpenAI's own client. The core repeats the last message."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from support.servers.frontend_process import MODEL, FrontendProcess, sound_frontend

pytestmark = pytest.mark.slow

KEYS = ("sesame", "other")
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "f"}}
UNKNOWN = "chatcmpl-0"


@pytest.fixture(scope="module")
def frontend() -> Iterator[FrontendProcess]:
    with sound_frontend(step_s=0.0005, api_keys=KEYS, tool_call_parser="hermes") as process:
        yield process


@pytest.fixture(scope="module")
def client(frontend: FrontendProcess) -> Iterator[openai.OpenAI]:
    with frontend.client(KEYS[0]) as openai_client:
        yield openai_client


def ask(client: openai.OpenAI, text: str = "One two", **fields):
    messages = [{"role": "system", "content": "Hi"}, {"role": "user", "content": text}]
    return client.chat.completions.create(model=MODEL, messages=messages, **fields)


def stored_ids(client: openai.OpenAI, **query) -> list[str]:
    return [each.id for each in client.chat.completions.list(**query)]


def test_stored_answer_can_be_read_changed_and_deleted(
    frontend: FrontendProcess, client: openai.OpenAI
) -> None:
    answer = ask(client, store=True, metadata={"topic": "a"})
    ask(client)
    completions = client.chat.completions
    assert stored_ids(client) == [answer.id]
    found = completions.retrieve(answer.id)
    assert found.choices == answer.choices and found.usage == answer.usage
    assert found.metadata == {"topic": "a"}  # type: ignore[attr-defined]
    changed = completions.update(answer.id, metadata={"topic": "b"})
    assert changed.metadata == {"topic": "b"}  # type: ignore[attr-defined]
    assert completions.retrieve(answer.id) == changed
    with frontend.client(KEYS[1]) as stranger:
        assert stored_ids(stranger) == []
        for call in (stranger.chat.completions.retrieve, stranger.chat.completions.delete):
            with pytest.raises(openai.NotFoundError):
                call(answer.id)
    assert completions.delete(answer.id).deleted
    for call in (completions.retrieve, completions.delete, completions.messages.list):
        with pytest.raises(openai.NotFoundError):
            call(answer.id)
    assert stored_ids(client) == []


def test_messages_of_a_stored_answer_are_listed(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "One"}]
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "Hi"}, {"role": "user", "content": parts}],
        store=True,
    )
    first, second = client.chat.completions.messages.list(answer.id)
    assert (first.id, first.content, first.content_parts) == (f"{answer.id}-0", "Hi", None)
    [part] = second.content_parts or []
    assert (second.content, part.type, part.text) == (None, "text", "One")
    page = client.chat.completions.messages.list(answer.id, order="desc", limit=1)
    assert [each.id for each in page.data] == [second.id] and page.has_more
    client.chat.completions.delete(answer.id)


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL], "n": 2}], ids=["text", "calls"])
def test_stream_is_stored_as_a_whole_answer(
    frontend: FrontendProcess, client: openai.OpenAI, fields: dict
) -> None:
    text = f"I look.\n{CALL}"
    fields = fields | {"max_tokens": len(frontend.tokenizer.encode(text))}
    whole = ask(client, text, **fields)
    [chunk, *_] = list(ask(client, text, **fields, stream=True, store=True))
    stored = client.chat.completions.retrieve(chunk.id)
    assert stored.object == "chat.completion" and stored.usage == whole.usage
    for choice, other in zip(stored.choices, whole.choices, strict=True):
        assert choice.finish_reason == other.finish_reason
        assert choice.message.content == other.message.content
        functions, others = (
            [call.function for call in message.tool_calls or []]
            for message in (choice.message, other.message)
        )
        assert functions == others
    client.chat.completions.delete(chunk.id)


def test_lists_have_pages_and_filters(client: openai.OpenAI) -> None:
    ids = [
        ask(client, store=True, max_tokens=1, metadata={"parity": str(i % 2), "i": str(i)}).id
        for i in range(5)
    ]
    assert stored_ids(client, limit=2) == ids
    assert stored_ids(client, order="desc", limit=1) == ids[::-1]
    assert stored_ids(client, metadata={"parity": "1"}) == ids[1::2]
    assert stored_ids(client, metadata={"parity": "1", "i": "3"}) == ids[3:4]
    assert stored_ids(client, model="other") == [] and stored_ids(client, model=MODEL) == ids
    page = client.chat.completions.list(metadata={"parity": "0"}, limit=2)
    assert [each.id for each in page.data] == ids[0:3:2] and page.has_more
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.list(after=UNKNOWN)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({"a": 1}, "values of metadata must be strings, got 1 for"),
        ({str(i): "" for i in range(17)}, "at most 16 pairs, got 17"),
        ({"a": "b" * 513}, "at most 512 characters, got 513"),
    ],
)
def test_metadata_that_cannot_be_stored_are_refused(
    client: openai.OpenAI, metadata: dict, says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        ask(client, store=True, metadata=metadata)
    assert caught.value.param == "metadata"
    ask(client, metadata=metadata)  # They have no effect without the store.
