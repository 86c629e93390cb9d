"""Tools with a model whose chat template has none, in every dialect.

The core repeats the prompt. The template shows only the beginning of the system message and the last message, so a
test says there what the model writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import ollama
import pytest
from engine.protocol.grammars.grammar import grammar_text
from llguidance import LLMatcher, LLTokenizer
from support.servers.frontend_process import MODEL, FrontendProcess, sound_frontend

pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content[:4] }}{% endif %}"
    "{{ messages[-1].content }}"
)
BEGINNING = "You "
"""The part of the tools' description that the template shows."""
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Looks out.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ANSWER = f"look.\n{CALL}"
WRONG = CALL.replace("get_weather", "get_time")


@pytest.fixture(scope="module")
def frontend() -> Iterator[FrontendProcess]:
    with sound_frontend(step_s=0.0005, max_model_len=2048, chat_template=TEMPLATE) as process:
        assert "tool calls: generic (the chat template shows no tools)" in process.log
        yield process


@pytest.fixture(scope="module")
def url(frontend: FrontendProcess) -> str:
    return f"http://127.0.0.1:{frontend.port}"


def fields(frontend: FrontendProcess, text: str = ANSWER) -> dict:
    num_tokens = len(frontend.tokenizer.encode(BEGINNING + text))
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": num_tokens,
    }


def may_write(frontend: FrontendProcess, text: str) -> bool:
    """Return whether the grammar of the last request allows this text."""
    added = [m for m in frontend.core.received if hasattr(m, "requests")][-1]
    output = added.requests[0].sampling_params.structured_output
    matcher = LLMatcher(
        LLTokenizer(frontend.tokenizer.path.read_text(encoding="utf-8")), grammar_text(output)
    )
    token_ids = frontend.tokenizer.encode(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def test_chat_answers_with_text_or_well_formed_calls(frontend: FrontendProcess) -> None:
    with frontend.client() as client:
        answer = client.chat.completions.create(**fields(frontend), tools=[TOOL])
        message = answer.choices[0].message
        [call] = message.tool_calls or []
        assert (call.function.name, message.content) == ("get_weather", "You look.")
        assert json.loads(call.function.arguments) == {"city": "Oslo"}
        for text in ("No, thanks. {", CALL, f"{ANSWER}\n{CALL}"):
            assert may_write(frontend, text)
        for text in (WRONG, CALL.replace("}}", "}"), "<tool_call> hm"):
            assert not may_write(frontend, text)
        stream = client.chat.completions.create(**fields(frontend), tools=[TOOL], stream=True)
        pieces = [
            call.function for chunk in stream for call in chunk.choices[0].delta.tool_calls or []
        ]
        assert [piece.name for piece in pieces if piece.name] == ["get_weather"]
        assert json.loads("".join(piece.arguments for piece in pieces)) == {"city": "Oslo"}
        text = client.chat.completions.create(**fields(frontend, "No."), tools=[TOOL])
        assert text.choices[0].message.content == "You No."


def test_template_sees_no_tools_with_tool_choice_none(frontend: FrontendProcess) -> None:
    request = fields(frontend) | {"tools": [TOOL], "tool_choice": "none"}
    [choice] = frontend.post("/v1/chat/completions", **request).json()["choices"]
    assert choice["message"]["content"].startswith("look.\n<tool_call>")


def test_every_dialect_reads_calls(frontend: FrontendProcess, url: str) -> None:
    with frontend.client() as client:
        request = fields(frontend)
        response = client.responses.create(
            model=MODEL,
            input=request["messages"],
            max_output_tokens=request["max_tokens"],
            tools=[{"type": "function", "strict": False, **FUNCTION}],
        )
        text, call = response.output
        assert text.content[0].text == "You look."
        assert (call.type, json.loads(call.arguments)) == ("function_call", {"city": "Oslo"})
    import anthropic

    with anthropic.Anthropic(base_url=url, api_key="none") as claude:
        tools = [{"name": "get_weather", "input_schema": SCHEMA}]
        with claude.messages.stream(**fields(frontend), tools=tools) as stream:
            text, used = stream.get_final_message().content
        assert (text.text, used.name, used.input) == ("You look.", "get_weather", {"city": "Oslo"})
    answer = ollama.Client(url).chat(
        MODEL,
        fields(frontend)["messages"],
        tools=[TOOL],
        options={"num_predict": fields(frontend)["max_tokens"]},
    )
    [call] = answer.message.tool_calls or []
    assert (answer.message.content, call.function.arguments) == ("You look.", {"city": "Oslo"})
    assert "tools" in ollama.Client(url).show(MODEL).capabilities
