"""The Responses API with the default model."""

from __future__ import annotations

import json
import time

import openai

MODEL = "smollm2"
FIELDS = {"model": MODEL, "temperature": 0, "max_output_tokens": 40}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "degrees": {"enum": [-5, 5, 15]}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}


def test_conversation_is_answered_stored_and_continued(client: openai.OpenAI) -> None:
    first = client.responses.create(input="What is 2 + 2?", **FIELDS)
    assert "4" in first.output_text and first.status == "completed"
    with client.responses.stream(
        input="And 3 + 3?", previous_response_id=first.id, **FIELDS
    ) as stream:
        final = stream.get_final_response()
    stored = client.responses.retrieve(final.id)
    assert (stored.output_text, stored.usage) == (final.output_text, final.usage)
    assert final.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens // 2
    background = client.responses.create(input="What is 2 + 2?", background=True, **FIELDS)
    while background.status in ("queued", "in_progress"):
        time.sleep(0.05)
        background = client.responses.retrieve(background.id)
    assert background.output_text == first.output_text


def test_output_follows_a_schema_and_a_forced_tool(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "name": "weather", "schema": SCHEMA, "strict": True}
    response = client.responses.create(
        input="It is 5 degrees in Oslo.", text={"format": form}, **FIELDS
    )
    assert json.loads(response.output_text).keys() == {"city", "degrees"}
    tool = {"type": "function", "name": "report", "parameters": SCHEMA, "strict": True}
    called = client.responses.create(
        input="It is 5 degrees in Oslo.",
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        **FIELDS,
    )
    [call] = called.output
    assert call.name == "report" and json.loads(call.arguments).keys() == {"city", "degrees"}
