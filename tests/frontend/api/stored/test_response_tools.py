"""Tools in the Responses API: forced calls, custom tools, tools of MCP servers; invalid fields, and those of vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from support.chat.shown_prompts import TEMPLATE
from support.requests.responses import FUNCTION, NAMESPACE, TOOLS, check_events, options
from support.servers.frontend_process import MODEL, FrontendProcess, sound_frontend

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


def test_a_tool_search_of_the_client_loads_tools(
    frontend: FrontendProcess, client: openai.OpenAI
) -> None:
    """Coding agents with many tools offer a search, and send what it found with its output."""
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}}
    search: Any = {"type": "tool_search", "execution": "client", "parameters": parameters}
    arguments = {"query": "read a file"}
    text = (
        f"<tool_call>\n{json.dumps({'name': 'tool_search', 'arguments': arguments})}\n</tool_call>"
    )
    with client.responses.stream(**options(frontend, text), tools=[search]) as stream:
        events = list(stream)
    assert {event.type for event in events if "arguments" in event.type} == set()
    [call] = events[-1].response.output
    assert (call.type, call.execution, call.arguments) == ("tool_search_call", "client", arguments)
    repeated = list(client.responses.retrieve(events[-1].response.id, stream=True))
    assert repeated[-1].response.output == [call]
    whole = client.responses.create(**options(frontend, text), tools=[search])
    assert whole.output[0].arguments == arguments
    found = {"type": "tool_search_output", "call_id": call.call_id, "execution": "client"}
    history: list[Any] = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        call.to_dict(),
        found | {"tools": [NAMESPACE]},
        found | {"tools": [NAMESPACE]},
        {"type": "additional_tools", "role": "developer", "tools": TOOLS},
    ]
    request = options(frontend, "") | {"input": history, "max_output_tokens": 400}
    shown = client.responses.create(**request, tools=[search]).output_text
    assert 'tool_search {"query": "read a file"}' in shown
    # The output of the search defines what it found. The list at the start of the prompt has only the other tools.
    assert '{"tools":[{"type":"function","function":{"name":"files__read"' in shown
    only_found = request | {"input": history[:3]}
    assert "]tool_search" in client.responses.create(**only_found, tools=[search]).output_text
    for name in ({"name": "read", "namespace": "files"}, {"name": "get_weather"}):
        choice: Any = {"type": "function"} | name
        client.responses.create(**request, tools=[search], tool_choice=choice)


def test_each_event_is_valid_for_the_client(frontend: FrontendProcess) -> None:
    call = f"<tool_call>\n{json.dumps({'name': 'get_weather', 'arguments': {}})}\n</tool_call>"
    custom: Any = {"type": "custom", "name": "run"}
    wants = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    for fields in (
        {"input": "One two three"} | wants,
        {"input": f"Yes. {call}\n{call}", "tools": TOOLS},
        {"input": '{"city": "Oslo"}', "tools": TOOLS, "tool_choice": TOOLS[0]},
        {"input": '{"input": "ls"}', "tools": [custom], "tool_choice": custom},
    ):
        text = str(fields["input"])
        for num_tokens in (4, len(frontend.tokenizer.encode(text))):
            assert check_events(
                frontend, options(frontend, text) | fields | {"max_output_tokens": num_tokens}
            )


PATCH: dict[str, Any] = {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b"}
EXEC = {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": 9, "user": None}
CLIENT_CALLS: list[tuple[str, dict[str, Any], str, dict[str, Any], dict[str, Any]]] = [
    (
        "shell",
        {"commands": ["ls", "cat a"]},
        "action",
        {"commands": ["ls", "cat a"], "timeout_ms": None, "max_output_length": None},
        {"output": [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]},
    ),
    (
        "local_shell",
        {"command": ["ls"], "timeout_ms": 9},
        "action",
        EXEC | {"working_directory": None},
        {"output": "a file"},
    ),
    ("apply_patch", PATCH, "operation", PATCH, {"status": "failed", "output": "No such file"}),
]
"""Type of a tool -> arguments of the model, field and action of the call, and fields of its output."""


@pytest.mark.parametrize(
    ("kind", "arguments", "field", "action", "output"),
    CLIENT_CALLS,
    ids=[kind for kind, *_ in CLIENT_CALLS],
)
def test_tools_that_openai_defines_have_items_of_their_own(
    frontend: FrontendProcess,
    client: openai.OpenAI,
    kind: str,
    arguments: dict[str, Any],
    field: str,
    action: dict[str, Any],
    output: dict[str, Any],
) -> None:
    tools: list[Any] = [{"type": kind}]
    written = json.dumps({"name": kind, "arguments": arguments})
    body = options(frontend, f"<tool_call>\n{written}\n</tool_call>") | {"tools": tools}
    [call] = check_events(frontend, body)
    assert (call["type"], call[field]) == (f"{kind}_call", action)
    stored = client.responses.create(**body)
    repeated = list(client.responses.retrieve(stored.id, stream=True))
    assert repeated[-1].response.output == stored.output
    answer = {"type": f"{kind}_call_output", "call_id": call["call_id"], **output}
    request = options(frontend, "") | {"input": [call, answer], "max_output_tokens": 90}
    shown = client.responses.create(**request, tools=tools).output_text
    assert f"{kind} {json.dumps(arguments)}" in shown
    result = output["output"]
    assert (result if isinstance(result, str) else '"exit_code":0') in shown
    forced = options(frontend, json.dumps(arguments)) | {"tools": tools}
    # OpenAI's API has no choice of this type for the older shell.
    named = {"type": "function", "name": kind} if kind == "local_shell" else {"type": kind}
    [call] = check_events(frontend, forced | {"tool_choice": named})
    assert call[field] == action
    # Arguments that are no action of the tool are shown as the model wrote them.
    cut = forced | {"tool_choice": named, "max_output_tokens": 3}
    [call] = check_events(frontend, cut)
    assert (call["type"], call["name"], call["status"]) == ("function_call", kind, "incomplete")


def test_fields_of_vllm_apply_or_are_refused(
    frontend: FrontendProcess, client: openai.OpenAI
) -> None:
    stopped = client.responses.create(
        **options(frontend, "One two three"), extra_body={"stop": [" three"]}
    )
    assert (stopped.status, stopped.output_text) == ("completed", "One two")
    for fields, problem in (
        ({"structured_outputs": {"regex": "("}}, "structured_outputs is not a regex"),
        ({"previous_response": {}}, "previous_response is not supported"),
        ({"vllm_xargs": {"a": 1}}, "vllm_xargs is not supported"),
        ({"include_reasoning": False}, "include_reasoning is not supported"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ):
        with pytest.raises(openai.BadRequestError, match=problem):
            client.responses.create(**options(frontend, "x"), extra_body=fields)


def test_shells_in_containers_are_refused(frontend: FrontendProcess) -> None:
    tool = {"type": "shell", "environment": {"type": "container_auto"}}
    twice = [{"type": "shell"}, {"type": "function", "name": "shell"}]
    for tools, problem in (([tool], "tools[0].environment.type"), (twice, "tools[1] has the full")):
        body = options(frontend, "x") | {"tools": tools}
        answer = frontend.http.post("/v1/responses", json=body)
        assert answer.status_code == 400 and problem in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"input": None}, "input", "input is required"),
        ({"input": [{"role": "tool", "content": ""}]}, "input[0].role", "input[0].role must be"),
        ({"input": [{"type": {}}]}, "input[0].type", "input[0].type must be a string, got {}"),
        (
            {"input": [{"type": "mcp_list_tools", "server_label": "s", "tools": [{"name": {}}]}]},
            "input[0].tools[0].name",
            "must be a string, got {}",
        ),
        (
            {"input": [{"type": "mcp_call", "approval_request_id": {}}]},
            "input[0].approval_request_id",
            "must be a string, got {}",
        ),
        ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "must be"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type", "computer_call"),
        ({"input": [{"type": "additional_tools", "tools": [5]}]}, "input[0].tools[0]", "an object"),
        ({"tools": [{"type": "function", "name": []}]}, "tools[0].name", "got []"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_song"}]}]},
            "input[0].content[0].type",
            "input_text, input_image",
        ),
        ({"tools": [{"type": "file_search"}]}, "tools[0].type", '"file_search"'),
        (
            {"tools": [{"type": "custom", "name": "a", "format": "text"}]},
            "tools[0].format",
            'must be an object, got "text"',
        ),
        (
            {"tools": [{"type": "web_search"}, NAMESPACE | {"tools": [{"type": "mcp"}]}]},
            "tools[1].tools[0].type",
            '"function" or "custom" within a namespace, got "mcp"',
        ),
        (
            {"tools": [NAMESPACE, NAMESPACE | {"tools": [FUNCTION | {"name": "?"}]}]},
            "tools[1].tools[0].name",
            "tools[1].tools[0].name must be",
        ),
        ({"tools": [NAMESPACE, NAMESPACE]}, "tools[1].tools[0]", "files__read"),
        ({"tools": [{"type": "function", "name": "?"}]}, "tools[0].name", "tools[0].name must be"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type", '"mcp"'),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "json_schema"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "x"}}}},
            "text.format",
            "text.format",
        ),
        ({"top_p": 9}, "top_p", "top_p must be"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"include": ["everything"]}, "include[0]", "everything"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "no prompt templates"),
        ({"truncation": "some"}, "truncation", "auto"),
        ({"prompt_cache_retention": "1w"}, "prompt_cache_retention", "24h"),
        ({"prompt_cache_options": {"ttl": "1h"}}, "prompt_cache_options.ttl", "30m"),
        ({"prompt_cache_options": {"prewarm": 1}}, "prompt_cache_options.prewarm", "a boolean"),
        ({"max_tool_calls": -1}, "max_tool_calls", "at least 0"),
        ({"moderation": {"model": "m"}}, "moderation", "does not moderate"),
        (
            {"image": {"context_compression": "enabled"}},
            "image.context_compression",
            "does not compress",
        ),
        (
            {
                "structured_outputs": {"choice": ["a"]},
                "text": {"format": {"type": "json_object"}},
            },
            "structured_outputs",
            "combined with text.format",
        ),
        ({"metadata": {"a": "x" * 513}}, "metadata", "512"),
        ({"conversation": "a", "previous_response_id": "b"}, "previous_response_id", "combined"),
        ({"background": True, "store": False}, "background", "store"),
    ],
)
def test_errors_name_the_field(
    frontend: FrontendProcess, fields: dict[str, Any], param: str, named: str
) -> None:
    body = {"model": MODEL, "input": "Hi", "max_output_tokens": 4} | fields
    response = frontend.http.post("/v1/responses", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and named in error["message"], error
    assert error["type"] == "invalid_request_error"


def test_errors_of_parts_name_their_places(frontend: FrontendProcess) -> None:
    image = {"type": "input_image", "image_url": "data:,"}
    file = {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,!"}
    call = {"type": "function_call", "call_id": "a", "name": "read", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "a", "output": [file]}
    for items, param in (
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "a"}, image]}],
            "0].content[1].type",
        ),
        ([{"role": "user", "content": "a"}, call, output], "2].output[0].file_data"),
    ):
        body = options(frontend, "x") | {"input": items, "instructions": "Be brief."}
        answer = frontend.http.post("/v1/responses", json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == f"input[{param}", answer.text
