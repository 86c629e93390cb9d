"""Responses with tools of MCP servers: the server lists and calls them, and the model reads the results."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai
import pytest
import uvicorn
from engine.protocol.supervisor_messages import Stage
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from support.processes.program import wait_until
from support.requests.responses import check_events
from support.servers.frontend_process import ECHO_TEMPLATE, MODEL, FrontendProcess, sound_frontend

pytestmark = pytest.mark.slow

LABEL = "weather"
TOOL: dict[str, Any] = {"type": "mcp", "server_label": LABEL, "require_approval": "never"}
OUTPUT = "Sunny in Oslo."


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ASK = f"Let me look. {call('weather__forecast', {'city': 'Oslo'})}"


class WeatherServer:
    """An MCP server in a thread. `calls` has the cities that were asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.tokens: list[str | None] = []
        mcp = MCPServer("weather")

        @mcp.tool(annotations=ToolAnnotations(read_only_hint=True))
        def forecast(city: str) -> str:
            """Return the weather of tomorrow."""
            self.calls.append(city)
            return f"Sunny in {city}."

        @mcp.tool()
        async def wait(seconds: float) -> str:
            """Wait."""
            await asyncio.sleep(seconds)
            return "Done."

        @mcp.tool()
        def fail() -> str:
            """Fail."""
            raise ToolError("no data")

        app = mcp.streamable_http_app(stateless_http=True, json_response=True)

        async def watch(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                headers = dict(scope["headers"])
                self.tokens.append(headers.get(b"authorization", b"").decode())
            await app(scope, receive, send)

        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/mcp"
        self._server = uvicorn.Server(uvicorn.Config(watch, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))

    def __enter__(self) -> WeatherServer:
        self._thread.start()
        wait_until(lambda: self._server.started)
        return self

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = True
        self._thread.join()


class _Flood(BaseHTTPRequestHandler):
    """Answers requests for /compressed with 64 MiB in few bytes, and others with 64 MiB."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        answer = bytes(64 << 20)
        self.send_response(200)
        self.send_header("content-type", "application/json")
        if self.path == "/compressed":
            answer = gzip.compress(answer)
            self.send_header("content-encoding", "gzip")
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def flood() -> Iterator[str]:
    """The address of a server whose answers are too large."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Flood) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def weather() -> Iterator[WeatherServer]:
    with WeatherServer() as server:
        yield server


def options(weather: WeatherServer, **servers: str) -> dict[str, Any]:
    return {
        "tool_call_parser": "hermes",
        "max_model_len": 1024,
        "chat_template": ECHO_TEMPLATE + "<|im_end|>",
        "mcp_servers": {LABEL: weather.url, "absent": "http://127.0.0.1:9/mcp", **servers},
    }


@pytest.fixture(scope="module")
def frontend(weather: WeatherServer, flood: str) -> Iterator[FrontendProcess]:
    servers = {"flood": flood, "compressed": f"{flood}/compressed"}
    with sound_frontend(**options(weather, **servers)) as process:
        yield process


@pytest.fixture(scope="module")
def client(frontend: FrontendProcess) -> Iterator[openai.OpenAI]:
    with frontend.client() as openai_client:
        yield openai_client


def test_tools_are_called_until_the_model_answers(
    frontend: FrontendProcess, client: openai.OpenAI, weather: WeatherServer
) -> None:
    body = {"model": MODEL, "input": ASK, "tools": [TOOL | {"authorization": "secret"}]}
    output = check_events(frontend, body)
    assert [item["type"] for item in output] == ["mcp_list_tools", "message", "mcp_call", "message"]
    listed, _, called, answer = output
    assert [tool["name"] for tool in listed["tools"]] == ["forecast", "wait", "fail"]
    assert (called["name"], called["server_label"]) == ("forecast", LABEL)
    assert (called["output"], called["error"], called["status"]) == (OUTPUT, None, "completed")
    assert answer["content"][0]["text"] == OUTPUT
    assert weather.calls == ["Oslo", "Oslo"]
    assert set(weather.tokens) == {"Bearer secret"}

    whole = client.responses.create(**body)
    assert whole.usage is not None and whole.usage.output_tokens > len(OUTPUT.split())
    assert not any("secret" in str(tool) for tool in whole.tools)
    # A stored response is repeated, and the next one has its items.
    repeated = list(client.responses.retrieve(whole.id, stream=True))
    assert repeated[-1].response.output == whole.output
    following = {"previous_response_id": whole.id, "input": "And now?"}
    second = client.responses.create(**body | following)
    assert [item.type for item in second.output] == ["message"]
    assert client.responses.input_tokens.count(**body).input_tokens > 10


def test_calls_wait_for_the_approval_of_the_client(
    frontend: FrontendProcess, client: openai.OpenAI, weather: WeatherServer
) -> None:
    body: dict[str, Any] = {"model": MODEL, "input": ASK}
    body["tools"] = [TOOL | {"require_approval": {"never": {"tool_names": ["wait"]}}}]
    weather.calls.clear()
    assert check_events(frontend, body)[-1]["type"] == "mcp_approval_request"
    first = client.responses.create(**body)
    request = first.output[-1]
    assert (request.type, request.name) == ("mcp_approval_request", "forecast")
    assert not weather.calls
    answer = {"type": "mcp_approval_response", "approval_request_id": request.id}
    follow = {"previous_response_id": first.id}
    approved = client.responses.create(
        **body | follow | {"input": [answer | {"approve": True}], "stream": False}
    )
    done = approved.output[0]
    assert (done.type, done.output, done.approval_request_id) == ("mcp_call", OUTPUT, request.id)
    assert approved.output_text == OUTPUT and weather.calls == ["Oslo"]
    refused = client.responses.create(**body | follow | {"input": [answer | {"approve": False}]})
    assert "did not approve" in refused.output_text and weather.calls == ["Oslo"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (call("weather__fail", {}), "no data"),
        (call("weather__forecast", {"town": 1}), "city"),
    ],
    ids=["tool", "arguments"],
)
def test_the_model_reads_the_error_of_a_call(client: openai.OpenAI, text: str, error: str) -> None:
    answer = client.responses.create(model=MODEL, input=text, tools=[TOOL])
    called = next(item for item in answer.output if item.type == "mcp_call")
    assert called.status == "failed" and called.error is not None and error in called.error
    assert error in answer.output_text


def test_background_responses_call_tools(client: openai.OpenAI) -> None:
    answer = client.responses.create(model=MODEL, input=ASK, tools=[TOOL], background=True)
    wait_until(lambda: client.responses.retrieve(answer.id).status == "completed")
    assert client.responses.retrieve(answer.id).output_text.endswith(OUTPUT)
    slow = client.responses.create(
        model=MODEL,
        input=call("weather__wait", {"seconds": 60}),
        tools=[TOOL],
        background=True,
    )
    assert client.responses.cancel(slow.id).status == "cancelled"


def test_a_shutdown_waits_for_all_turns(weather: WeatherServer) -> None:
    text = call("weather__wait", {"seconds": 1})
    with FrontendProcess(**options(weather)) as frontend, frontend.client() as client:
        kinds = []
        with client.responses.stream(model=MODEL, input=text, tools=[TOOL]) as stream:
            for event in stream:
                kinds.append(event.type)
                if event.type == "response.mcp_call.in_progress":
                    frontend.begin_stop()
                    frontend.wait_for_stage(Stage.DRAINING)
        assert kinds[-1] == "response.completed" and "response.output_text.done" in kinds
        assert frontend.process.wait(20) == 0
        assert "Traceback" not in frontend.log


def test_limits_end_the_calls(client: openai.OpenAI, weather: WeatherServer) -> None:
    weather.calls.clear()
    fields: Any = {"model": MODEL, "input": ASK, "tools": [TOOL], "max_output_tokens": 200}
    cut = client.responses.create(**fields | {"max_output_tokens": 12})
    assert cut.status == "incomplete" and not weather.calls
    calls = ASK + call("weather__forecast", {"city": "Bergen"})
    limited = client.responses.create(**fields | {"input": calls}, max_tool_calls=1)
    assert [item.error for item in limited.output if item.type == "mcp_call"] == [
        None,
        "the response has its limit of calls, 1",
    ]
    weather.calls.clear()
    none = client.responses.create(**fields | {"input": calls}, max_tool_calls=0)
    assert not weather.calls and not any(item.type == "mcp_call" for item in none.output)
    forced = client.responses.create(
        **fields | {"input": '{"city": "Bergen"}'},
        tool_choice={"type": "mcp", "server_label": LABEL, "name": "forecast"},
    )
    assert forced.output_text == "Sunny in Bergen." and weather.calls == ["Bergen"]


@pytest.mark.parametrize(
    ("tool", "status", "param"),
    [
        ({"server_label": "other"}, 400, "tools[0].server_label"),
        ({"server_url": "http://169.254.169.254/mcp"}, 400, "tools[0].server_url"),
        ({"require_approval": "maybe"}, 400, "tools[0].require_approval"),
        ({"allowed_tools": 5}, 400, "tools[0].allowed_tools"),
        ({"headers": {"a": 1}}, 400, "tools[0].headers.a"),
        ({"server_label": "absent"}, 424, "tools"),
    ],
)
def test_wrong_tools_are_refused(
    client: openai.OpenAI, tool: dict[str, Any], status: int, param: str
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.responses.create(model=MODEL, input="a", tools=[TOOL | tool])
    assert (caught.value.status_code, caught.value.param) == (status, param)


def test_turns_transfer_no_blocks(client: openai.OpenAI) -> None:
    body = {"kv_transfer_params": {"do_remote_decode": True}}
    with pytest.raises(openai.BadRequestError, match="cannot be combined with tools of type mcp"):
        client.responses.create(model=MODEL, input="a", tools=[TOOL], extra_body=body)


@pytest.mark.parametrize(
    ("label", "problem"),
    [("flood", "the answer has more than 8388608 bytes"), ("compressed", "is compressed (gzip)")],
)
def test_answers_of_servers_have_a_limit(client: openai.OpenAI, label: str, problem: str) -> None:
    with pytest.raises(openai.APIStatusError, match=re.escape(problem)) as caught:
        client.responses.create(model=MODEL, input="a", tools=[TOOL | {"server_label": label}])
    assert caught.value.status_code == 424


def test_only_chosen_tools_are_shown(client: openai.OpenAI) -> None:
    for allowed in (["forecast"], {"read_only": True}):
        chosen: Any = TOOL | {"allowed_tools": allowed}
        answer = client.responses.create(
            model=MODEL, input=call("weather__wait", {"seconds": 0}), tools=[chosen]
        )
        assert "mcp_call" not in [item.type for item in answer.output]
    every: Any = TOOL | {"allowed_tools": ["*"]}
    answer = client.responses.create(
        model=MODEL, input=call("weather__wait", {"seconds": 0}), tools=[every]
    )
    assert "mcp_call" in [item.type for item in answer.output]


SERVER: dict[str, Any] = {"type": "url", "name": LABEL, "authorization_token": "secret"}


def send(frontend: FrontendProcess, text: Any, **fields: Any) -> Any:
    body = {"model": MODEL, "max_tokens": 400, "mcp_servers": [SERVER], **fields}
    messages = text if isinstance(text, list) else [{"role": "user", "content": text}]
    return frontend.post("/v1/messages", messages=messages, **body)


def test_tools_are_called_in_messages(frontend: FrontendProcess, weather: WeatherServer) -> None:
    weather.calls.clear()
    weather.tokens.clear()
    message = send(frontend, ASK).json()
    first, use, result, answer = message["content"]
    assert (first["type"], first["text"]) == ("text", "Let me look.")
    assert (use["type"], use["name"], use["server_name"]) == ("mcp_tool_use", "forecast", LABEL)
    assert use["input"] == {"city": "Oslo"}
    text = [{"type": "text", "text": OUTPUT}]
    shown = {
        "type": "mcp_tool_result",
        "tool_use_id": use["id"],
        "is_error": False,
        "content": text,
    }
    assert result == shown
    assert (answer["text"], message["stop_reason"]) == (OUTPUT, "end_turn")
    assert message["usage"]["output_tokens"] > len(OUTPUT.split())
    assert weather.calls == ["Oslo"] and set(weather.tokens) == {"Bearer secret"}

    stream = send(frontend, ASK, stream=True).text
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: ")]
    kinds = [event["type"] for event in events]
    ends = ["message_start", "message_delta", "message_stop"]
    assert [kind for kind in kinds if kind.startswith("message")] == ends
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [event["index"] for event in starts] == [0, 1, 2, 3]
    kinds = [event["content_block"]["type"] for event in starts]
    assert kinds == ["text", "mcp_tool_use", "mcp_tool_result", "text"]
    pieces = [
        each["delta"]["partial_json"]
        for each in events
        if each.get("index") == 1 and "delta" in each
    ]
    assert json.loads("".join(pieces)) == use["input"]

    # The model reads the calls and their results in the next message.
    history = [
        {"role": "user", "content": ASK},
        {"role": "assistant", "content": message["content"]},
    ]
    again = send(frontend, [*history, {"role": "user", "content": "And now?"}])
    assert [block["text"] for block in again.json()["content"]] == ["And now?"]


def test_a_message_names_the_tool_of_a_server(frontend: FrontendProcess) -> None:
    for name in ("forecast", "weather__forecast"):
        choice = {"type": "tool", "name": name}
        use, *_ = send(frontend, '{"city": "Oslo"}', tool_choice=choice).json()["content"]
        assert (use["type"], use["name"]) == ("mcp_tool_use", "forecast")
    refused = send(frontend, "Hi", tool_choice={"type": "tool", "name": "none"})
    assert refused.status_code == 400 and "tool_choice" in refused.json()["error"]["message"]


def test_messages_choose_tools_of_servers(
    frontend: FrontendProcess, weather: WeatherServer
) -> None:
    weather.calls.clear()
    toolset = {"type": "mcp_toolset", "mcp_server_name": LABEL}
    for fields in (
        {"tools": [toolset | {"default_config": {"enabled": False}}]},
        {"tools": [toolset | {"configs": {"forecast": {"enabled": False}}}]},
        {"mcp_servers": [SERVER | {"tool_configuration": {"allowed_tools": ["wait"]}}]},
    ):
        [*_, last] = send(frontend, ASK, **fields).json()["content"]
        assert last["type"] != "text" or OUTPUT not in last["text"]
    assert not weather.calls
    failed = send(frontend, call("weather__fail", {})).json()["content"]
    assert failed[1]["is_error"] and "no data" in failed[1]["content"][0]["text"]
    # A tool of the client waits for the client.
    tool = {"name": "own", "input_schema": {"type": "object"}}
    both = send(frontend, f"{call('own', {})}{call('weather__wait', {'seconds': 0})}", tools=[tool])
    kinds = [block["type"] for block in both.json()["content"]]
    assert kinds == ["tool_use", "mcp_tool_use", "mcp_tool_result"]
    assert both.json()["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("fields", "status", "shown"),
    [
        ({"mcp_servers": [{"name": "other"}]}, 400, "mcp_servers[0].name"),
        ({"mcp_servers": [{"name": LABEL, "url": "http://a"}]}, 400, "mcp_servers[0].url"),
        ({"mcp_servers": [SERVER | {"type": "stdio"}]}, 400, "mcp_servers[0].type"),
        ({"mcp_servers": [{"name": "absent"}]}, 424, "absent"),
        (
            {"tools": [{"type": "mcp_toolset", "mcp_server_name": "b"}]},
            400,
            "tools[0].mcp_server_name",
        ),
        ({"kv_transfer_params": {"do_remote_decode": True}}, 400, "kv_transfer_params"),
        ({"max_tokens": 0}, 400, "max_tokens must be at least 1 with mcp_servers, got 0"),
    ],
)
def test_servers_of_messages_must_be_known(
    frontend: FrontendProcess, fields: dict, status: int, shown: str
) -> None:
    refused = send(frontend, "x", **fields)
    assert refused.status_code == status and shown in refused.json()["error"]["message"]


def test_batches_of_messages_call_tools(frontend: FrontendProcess, weather: WeatherServer) -> None:
    weather.calls.clear()
    message = {"model": MODEL, "max_tokens": 400, "mcp_servers": [SERVER]}
    message["messages"] = [{"role": "user", "content": ASK}]
    url = "/v1/messages/batches"
    batch = frontend.post(url, requests=[{"custom_id": "a", "params": message}]).json()

    def has_ended() -> bool:
        shown = frontend.http.get(f"{url}/{batch['id']}").json()
        return bool(shown["processing_status"] == "ended")

    wait_until(has_ended, what="the batch ends")
    [line] = frontend.http.get(f"{url}/{batch['id']}/results").text.splitlines()
    content = json.loads(line)["result"]["message"]["content"]
    assert [part["type"] for part in content] == ["text", "mcp_tool_use", "mcp_tool_result", "text"]
    assert content[-1]["text"] == OUTPUT and weather.calls == ["Oslo"]


def test_tools_of_servers_are_counted(weather: WeatherServer) -> None:
    def count(**fields: Any) -> int:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}
        answer = frontend.post("/v1/messages/count_tokens", **body)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["input_tokens"])

    template = ECHO_TEMPLATE + "{{ tools | tojson if tools else '' }}<|im_end|>"
    with sound_frontend(**options(weather) | {"chat_template": template}) as frontend:
        config = {"default_config": {"enabled": False}, "configs": {"forecast": {"enabled": True}}}
        toolset = {"type": "mcp_toolset", "mcp_server_name": LABEL, **config}
        one = count(mcp_servers=[SERVER], tools=[toolset])
        assert count(mcp_servers=[SERVER]) > one > count()
