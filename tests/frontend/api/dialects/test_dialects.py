"""Anthropic's and Ollama's APIs, used by their own clients.

The core repeats the last message, so a test says in it what the model writes.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import ollama
import openai
import pytest
from engine.frontend.media.documents.pdf import read_pdf
from engine.protocol.errors import ParameterError
from support.chat.shown_prompts import ANSWER, PIXEL, SCHEMA, TEMPLATE
from support.media.pdf import write_pdf
from support.requests.chats import last_params
from support.requests.dialects import (
    KEY,
    TOOLS,
    claude_client,
    dialect_frontend,
    num_tokens,
    options,
    user,
)
from support.servers.frontend_process import MODEL, FrontendProcess

if TYPE_CHECKING:
    import anthropic

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def frontend() -> Iterator[FrontendProcess]:
    with dialect_frontend() as process:
        yield process


@pytest.fixture
def claude(frontend: FrontendProcess) -> Iterator[anthropic.Anthropic]:
    with claude_client(frontend) as client:
        yield client


@pytest.fixture
def llama(frontend: FrontendProcess) -> ollama.Client:
    return ollama.Client(
        f"http://127.0.0.1:{frontend.port}", headers={"Authorization": f"Bearer {KEY}"}
    )


def test_claude_message_has_blocks_and_usage(
    frontend: FrontendProcess, claude: anthropic.Anthropic
) -> None:
    message = claude.messages.create(**options(frontend, ANSWER), tools=TOOLS)
    thinking, text, first, second = message.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Let me see.")
    assert text.to_dict() == {"type": "text", "text": "I look it up."}
    assert [(b.type, b.name, b.input) for b in (first, second)] == [
        ("tool_use", "get_weather", {"city": "Oslo"}),
        ("tool_use", "get_weather", {"city": "Rome"}),
    ]
    assert first.id and first.id != second.id
    assert message.model == MODEL and message.id.startswith("msg_")
    assert message.stop_reason in ("tool_use", "max_tokens")
    total = num_tokens(frontend, ANSWER)
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == total
    assert message.usage.output_tokens == total
    assert 0 < message.usage.output_tokens_details.thinking_tokens < total


def test_claude_omits_thinking_that_is_not_displayed(
    frontend: FrontendProcess, claude: anthropic.Anthropic
) -> None:
    fields = options(frontend, ANSWER) | {"thinking": {"type": "adaptive", "display": "omitted"}}
    whole = claude.messages.create(**fields)
    with claude.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert message.content[0].type == "text"
        assert message.usage.output_tokens == num_tokens(frontend, ANSWER)


def test_claude_stream_accumulates_to_the_message(
    frontend: FrontendProcess, claude: anthropic.Anthropic
) -> None:
    whole = claude.messages.create(**options(frontend, ANSWER), tools=TOOLS)
    with claude.messages.stream(**options(frontend, ANSWER), tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4

    def content(message: anthropic.types.Message) -> list:
        return [block.model_dump(exclude={"id"}) for block in message.content]

    assert content(streamed) == content(whole)
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_claude_ends_for_the_reason_that_the_api_names(
    frontend: FrontendProcess, claude: anthropic.Anthropic
) -> None:
    text = "One two three four"
    stopped = claude.messages.create(**options(frontend, text), stop_sequences=[" three"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " three")
    assert stopped.content[0].text == "One two"
    cut = claude.messages.create(model=MODEL, max_tokens=2, messages=user(text))
    assert cut.stop_reason == "max_tokens" and cut.content[0].text == "One two"
    full = claude.messages.create(model=MODEL, max_tokens=5000, messages=user(text))
    assert full.stop_reason == "model_context_window_exceeded"


def test_claude_conversation_reaches_the_template(
    frontend: FrontendProcess, claude: anthropic.Anthropic
) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": ""},
                {"type": "text", "text": "Wait"},
                # What tools of Anthropic's servers left, in a conversation that began there.
                {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {}},
                {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": [{"type": "web_search_result"}]},
                {"type": "mcp_tool_result", "tool_use_id": "m", "content": [{"type": "text", "text": "Found"}]},
                {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [
                    {"type": "text", "text": "Rain"}, {"type": "tool_reference", "tool_name": "see"}]},
                {"type": "text", "text": "So?"},
                {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "Doc"}},
            ],
        },
    ]  # fmt: skip
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    expected = (
        '[system:Be brief.][user:Hi][assistant:Wait\nFound|Hm|toolu_1 get_weather {"city": "Oslo"}]'
        "[tool:Rain\nsee|toolu_1][user:So?\nDoc]get_weather"
    )
    counted = claude.messages.count_tokens(
        model=MODEL, system=system, messages=messages, tools=TOOLS
    )
    assert counted.input_tokens == num_tokens(frontend, expected)
    answer = claude.messages.create(
        model=MODEL, max_tokens=counted.input_tokens, system=system, messages=messages, tools=TOOLS
    )
    assert answer.content[0].text == expected
    forced = claude.messages.create(
        model=MODEL,
        max_tokens=num_tokens(frontend, '{"city": "Oslo"}'),
        messages=user('{"city": "Oslo"}'),
        tools=TOOLS,
        tool_choice={"type": "tool", "name": "get_weather"},
    )
    assert forced.content[0].input == {"city": "Oslo"}


def document(content: bytes, **fields: str) -> dict:
    data = base64.b64encode(content).decode()
    source = {"type": "base64", "media_type": "application/pdf", "data": data} | fields
    return {"type": "document", "title": "Report", "source": source}


def test_claude_reads_pdf_documents(frontend: FrontendProcess, claude: anthropic.Anthropic) -> None:
    pytest.importorskip("pypdf")
    result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [document(write_pdf(["Wet"]))],
    }
    parts = [result, document(write_pdf(["It rains.", "It stops."]))]
    messages = [{"role": "user", "content": parts}]
    counted = claude.messages.count_tokens(model=MODEL, messages=messages)
    shown = "[tool:Report\n\nWet|t][user:Report\n\nIt rains.\n\nIt stops.]"
    assert counted.input_tokens == num_tokens(frontend, shown)
    answer = claude.messages.create(model=MODEL, max_tokens=3, messages=messages)
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == len(
        frontend.tokenizer.encode(shown)
    )


def test_openai_clients_send_pdf_documents_as_files(frontend: FrontendProcess) -> None:
    pytest.importorskip("pypdf")
    data = base64.b64encode(write_pdf(["Revenue grew."])).decode()
    headers = {"Authorization": f"Bearer {KEY}"}
    for prefix in ("", "data:application/pdf;base64,"):
        file = {"filename": "report.pdf", "file_data": prefix + data}
        content = [{"type": "file", "file": file}, {"type": "text", "text": "Sum up."}]
        body = {
            "model": MODEL,
            "max_tokens": 20,
            "messages": [{"role": "user", "content": content}],
        }
        answer = frontend.http.post("/v1/chat/completions", json=body, headers=headers).json()
        text = answer["choices"][0]["message"]["content"]
        assert text.startswith("report.pdf\n\nRevenue grew.\nSum up.")
        parts = [{"type": "input_file"} | file, {"type": "input_text", "text": "Sum up."}]
        body = {
            "model": MODEL,
            "max_output_tokens": 20,
            "input": [{"role": "user", "content": parts}],
        }
        response = frontend.http.post("/v1/responses", json=body, headers=headers).json()
        assert response["output"][0]["content"][0]["text"] == text
    for file, named in (
        ({}, "file.file_data must be"),
        ({"file_url": "http://a/b"}, "file.file_url must be left out"),
        ({"file_data": "JVBERi0="}, "file.file_data cannot be decoded"),
    ):
        content = [{"type": "file", "file": file}]
        body = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
        refused = frontend.http.post("/v1/chat/completions", json=body, headers=headers)
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith(f"messages[0].content[0].{named}")


def test_stored_files_are_sent_by_their_identifiers(
    frontend: FrontendProcess, claude: anthropic.Anthropic
) -> None:
    pytest.importorskip("pypdf")
    with frontend.client(KEY) as client:
        note = client.files.create(file=("note.txt", b"Rain."), purpose="user_data").id
        report = client.files.create(file=("a.pdf", write_pdf(["Sun."])), purpose="user_data").id
        parts: list[Any] = [{"type": "file", "file": {"file_id": name}} for name in (note, report)]
        messages: list[Any] = [{"role": "user", "content": parts}]
        answer = client.chat.completions.create(model=MODEL, max_tokens=40, messages=messages)
        text = answer.choices[0].message.content or ""
        assert text.startswith("note.txt\n\nRain.\na.pdf\n\nSun.")
        parts[1]["file"]["file_id"] = "file-1"
        with pytest.raises(openai.NotFoundError, match='The file "file-1" was not found'):
            client.chat.completions.create(model=MODEL, messages=messages)
    sources = [{"type": "file", "file_id": name} for name in (note, report)]
    blocks: list[Any] = [
        {"type": "document", "source": sources[0], "title": "Note"},
        {"type": "tool_result", "tool_use_id": "t", "content": [document(b"", **sources[1])]},
    ]
    counted = claude.messages.count_tokens(
        model=MODEL, messages=[{"role": "user", "content": blocks}]
    )
    shown = "[tool:Report\n\nSun.|t][user:Note\n\nRain.]"
    assert counted.input_tokens == num_tokens(frontend, shown)
    headers = {"Authorization": f"Bearer {KEY}"}
    for name, status in ((note, 400), ("file-1", 404)):
        image = {"type": "image_url", "image_url": {"url": f"vllm-file://{name}"}}
        body = {"model": MODEL, "messages": [{"role": "user", "content": [image]}]}
        refused = frontend.http.post("/v1/chat/completions", json=body, headers=headers)
        assert refused.status_code == status  # This model reads no images.


@pytest.mark.parametrize(
    ("block", "field", "problem"),
    [
        (document(b"no document"), "data", "cannot be decoded: "),
        (document(b"", data="?"), "data", "is not valid base64"),
        (document(write_pdf([""])), "data", "contains no text"),
        (document(write_pdf(["a"], num_copies=601)), "data", "has 601 pages, but at most 600"),
        (document(b"", media_type="text/html"), "media_type", 'must be "application/pdf"'),
    ],
)
def test_unreadable_pdf_is_refused_by_name(
    frontend: FrontendProcess, block: dict, field: str, problem: str
) -> None:
    pytest.importorskip("pypdf")
    messages = [{"role": "user", "content": [block]}]
    body = {"model": MODEL, "max_tokens": 4, "messages": messages}
    response = frontend.http.post("/v1/messages", json=body, headers={"x-api-key": KEY})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert message.startswith(f"messages[0].content[0].source.{field} {problem}"), message


def test_pdf_without_pypdf_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(ParameterError, match=r"engine-serve\[media\]"):
        read_pdf(write_pdf(["a"]), "data", 100)


def test_text_of_pdf_is_bounded() -> None:
    pytest.importorskip("pypdf")
    assert read_pdf(write_pdf(["abc", "de"]), "data", 5) == "abc\n\nde"
    with pytest.raises(ParameterError, match="has too much text"):
        read_pdf(write_pdf(["abc", "de"]), "data", 4)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens is required"),
        ({"max_tokens": -1}, "max_tokens must be at least 0"),
        ({"messages": None}, "messages is required"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role must be"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "input": {}, "name": ""}],
                    }
                ]
            },
            "messages[0].content[0].name must be a non-empty string",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content must be"),
        (
            {"messages": [{"role": "user", "content": [{"type": "pdf"}]}]},
            'messages[0].content[0].type must be "text", "image", "document", "search_result", ',
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "search_result", "title": 1, "content": []}],
                    }
                ]
            },
            "messages[0].content[0].title must be a string or null, got 1",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type must be"),
        ({"mcp_servers": [{"type": "url"}]}, "--mcp-servers"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs is not supported"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools is not allowed"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"tool_choice": {"type": "many"}}, "tool_choice.type must be"),
        ({"thinking": {"type": "some"}}, 'be "adaptive", "disabled" or "enabled", got "some"'),
        ({"top_p": 9}, "top_p must be"),
        ({"stop_sequences": ["x" * 10_000]}, "stop_sequences"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type must be"),
    ],
)
def test_claude_errors_name_the_field(frontend: FrontendProcess, fields: dict, named: str) -> None:
    body = {"model": MODEL, "max_tokens": 4, "messages": user("Hi")} | fields
    response = frontend.http.post("/v1/messages", json=body, headers={"x-api-key": KEY})
    assert response.status_code == 400, response.text
    error = response.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert named in error["error"]["message"]
    assert error["request_id"] == response.headers["x-request-id"]


def test_claude_client_sees_its_own_kinds_of_errors(
    frontend: FrontendProcess, claude: anthropic.Anthropic
) -> None:
    import anthropic

    with pytest.raises(
        anthropic.BadRequestError, match=r"prompt is too long: \d{4} tokens > 1023 "
    ):
        claude.messages.create(model=MODEL, max_tokens=2, messages=user("word " * 1100))
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        claude.messages.create(model="other", max_tokens=4, messages=user("Hi"))
    stranger = anthropic.Anthropic(base_url=claude.base_url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
        stranger.messages.create(model=MODEL, max_tokens=4, messages=user("Hi"))
    assert {model.id: model.max_input_tokens for model in claude.models.list()}[MODEL] == 1024


def test_ollama_chat_has_message_calls_and_counts(
    frontend: FrontendProcess, llama: ollama.Client
) -> None:
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
    total = num_tokens(frontend, ANSWER)
    fields = {
        "model": f"{MODEL}:latest",
        "messages": user(ANSWER),
        "tools": tools,
        "options": {"num_predict": total, "temperature": 0, "num_ctx": 4096},
    }
    whole = llama.chat(**fields)
    assert whole.message.thinking == "Let me see." and whole.message.content == "I look it up."
    calls = [call.function for call in whole.message.tool_calls]
    assert [call.arguments for call in calls] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert whole.done and whole.done_reason == "length"
    assert whole.prompt_eval_count == whole.eval_count == total
    assert whole.total_duration >= whole.eval_duration > 0

    chunks = list(llama.chat(**fields, stream=True))
    assert "".join(c.message.content for c in chunks) == whole.message.content
    assert "".join(c.message.thinking or "" for c in chunks) == whole.message.thinking
    streamed = [call.function for c in chunks for call in c.message.tool_calls or ()]
    assert [call.arguments for call in streamed] == [call.arguments for call in calls]
    assert [c.done for c in chunks] == [False] * (len(chunks) - 1) + [True]


def test_ollama_conversation_reaches_the_template(
    frontend: FrontendProcess, llama: ollama.Client
) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}],
        },
        {"role": "tool", "tool_name": "get_weather", "content": "Rain"},
    ]
    expected = '[user:Hi][assistant:|call00000 get_weather {"city": "Oslo"}][tool:Rain|call00000]'
    options = {"num_predict": num_tokens(frontend, expected)}
    assert llama.chat(MODEL, messages, options=options).message.content == expected


def test_ollama_generates_with_and_without_the_template(
    frontend: FrontendProcess, llama: ollama.Client
) -> None:
    text = "One two three"
    for limit in (3, 0, -1):
        answer = llama.generate(MODEL, text, options={"num_predict": limit, "stop": [" three"]})
        assert answer.response == "One two" and answer.done_reason == "stop"
    system = llama.generate(MODEL, "Hi", system="Be brief.", options={"num_predict": 40})
    assert system.response.startswith("[system:Be brief.][user:Hi]")
    raw = llama.generate(MODEL, text, system="Be brief.", raw=True, options={"num_predict": 3})
    assert raw.response == text
    options = {"num_predict": 3, "repeat_penalty": 1.5, "repeat_last_n": 0}
    pieces = llama.generate(MODEL, text, stream=True, options=options)
    assert "".join(piece.response for piece in pieces) == text
    assert last_params(frontend).repetition_penalty == 1.0
    for keep_alive, reason in ((None, "load"), ("10m", "load"), (0, "unload"), ("0s", "unload")):
        answers = (
            llama.generate(MODEL, keep_alive=keep_alive),
            llama.chat(MODEL, [], keep_alive=keep_alive),
        )
        assert [(each.done, each.done_reason) for each in answers] == [(True, reason)] * 2


def test_ollama_lists_and_describes_models(llama: ollama.Client, frontend: FrontendProcess) -> None:
    assert MODEL in [model.model for model in llama.list().models]
    assert MODEL in [model.model for model in llama.ps().models]
    shown = llama.show(MODEL)
    assert shown.template == TEMPLATE
    assert shown.capabilities == ["completion", "tools", "thinking"]
    headers = {"authorization": f"Bearer {KEY}"}
    cards = frontend.http.get("/api/tags", headers=headers).json()["models"]
    [listed] = {tuple(card["capabilities"]) for card in cards}
    assert listed == ("completion", "tools", "thinking")
    assert shown.modelinfo["llama.context_length"] == 1024
    assert llama.pull(MODEL).status == "success"
    assert [each.status for each in llama.pull(MODEL, stream=True)][-1] == "success"
    for change, problem in (
        (lambda: llama.delete(MODEL), "only its adapters can"),
        (lambda: llama.copy(MODEL, "x"), "only its adapters can"),
        (lambda: llama.delete("other"), "does not exist"),
        (lambda: llama.copy("other", "x"), "does not exist"),
        (lambda: llama.create("x", from_=MODEL), "creates no models"),
        (lambda: llama.push(MODEL), "uploads no models"),
    ):
        with pytest.raises(ollama.ResponseError, match=problem):
            change()
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        llama.show("other")


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("chat", {"messages": [{"role": 5}]}, "messages[0].role must be"),
        ("chat", {"messages": [{"role": "user", "images": 5}]}, "messages[0].images must be"),
        ("chat", {"messages": user("Hi"), "format": "xml"}, "format must be"),
        ("chat", {"messages": user("Hi"), "options": {"top_k": "x"}}, "options.top_k must be"),
        ("chat", {"messages": user("Hi"), "options": {"top_p": 10**400}}, "options.top_p must be"),
        ("chat", {"messages": user("Hi"), "options": {"mirostat": 2}}, "options.mirostat"),
        ("chat", {"messages": user("Hi"), "_debug_render_only": True}, "_debug_render_only"),
        (
            "generate",
            {"prompt": "Hi", "suffix": "x"},
            "suffix needs a model that can fill in the middle",
        ),
        ("generate", {"prompt": "Hi", "images": [PIXEL]}, 'images[0] must be "text", because'),
        (
            "generate",
            {"prompt": "Hi", "system": "x", "images": [PIXEL]},
            'images[0] must be "text", because this model reads only text',
        ),
        (
            "chat",
            {"messages": [*user("Hi"), {"role": "user", "content": "x", "images": [PIXEL]}]},
            "messages[1].images[0] must be",
        ),
        ("embed", {}, "input is required"),
        ("show", {}, "model is required"),
        ("show", {"model": MODEL, "system": "x"}, "system is not supported"),
    ],
)
def test_ollama_errors_name_the_field(
    frontend: FrontendProcess, path: str, fields: dict, named: str
) -> None:
    headers = {"authorization": f"Bearer {KEY}"}
    response = frontend.http.post(f"/api/{path}", json=fields, headers=headers)
    assert response.status_code == 400, response.text
    assert named in response.json()["error"]
