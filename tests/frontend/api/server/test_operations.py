"""Routes for operators and probes: health, keys, origins, metrics, start-up, drain."""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import threading

import httpx
import openai
import psutil
import pytest
import zmq
from engine.protocol.config import SchedulerConfig
from engine.protocol.heartbeat import HeartbeatReader
from engine.protocol.messages import AddRequests
from engine.protocol.supervisor_messages import Stage
from support.processes.program import wait_until
from support.servers.frontend_process import ECHO_TEMPLATE, MODEL, FrontendProcess, sse_events

pytestmark = pytest.mark.slow

PROMPT = "One two three four five"
PROBES = ("/", "/health", "/livez", "/readyz", "/ping", "/metrics", "/version")


def test_ready_after_the_first_token(frontend: FrontendProcess) -> None:
    assert [stage for stage, _ in frontend.stages] == [Stage.STARTING, Stage.WARMING, Stage.READY]
    for path in PROBES:
        assert frontend.http.get(path).status_code == 200
    ready = frontend.http.get("/readyz").json()
    assert (ready["state"], ready["stage"]) == ("ready", "ready")
    assert frontend.http.post("/ping").status_code == 200
    assert frontend.http.head("/health").status_code == 200


def test_any_model_name_is_answered_and_times_are_reported() -> None:
    settings = {"skip_model_name_validation": True, "enable_per_request_metrics": True}
    with FrontendProcess(**settings) as process:
        answer = process.post("/v1/completions", model="gpt-4.1", prompt=PROMPT, max_tokens=2)
        assert (answer.status_code, answer.json()["model"]) == (200, MODEL)
        metrics = answer.json()["metrics"]
        assert 0 <= metrics["mean_itl_ms"] == metrics["generation_time_ms"]
        assert metrics["tokens_per_second"] > 0


def test_openapi_describes_every_route_and_field(frontend: FrontendProcess) -> None:
    document = frontend.http.get("/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    paths = document["paths"]
    assert {"/v1/models", "/readyz", "/openapi.json"} <= paths.keys()
    assert set(paths["/ping"]) == {"get", "post"}
    assert paths["/replicas/{index}/{action}"]["post"]["parameters"][0]["name"] == "action"
    body = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    schema = document["components"]["schemas"][body["schema"]["$ref"].rpartition("/")[2]]
    assert {"messages", "max_tokens", "seed"} <= schema["properties"].keys()
    assert "requestBody" in paths["/detokenize"]["post"]
    body = paths["/invocations"]["post"]["requestBody"]["content"]["application/json"]
    names = {choice["$ref"].rpartition("/")[2] for choice in body["schema"]["anyOf"]}
    assert names == {"ChatCompletionRequest", "CompletionRequest"}


def test_docs_page_shows_every_route_and_loads_nothing(frontend: FrontendProcess) -> None:
    answer = frontend.http.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for path in frontend.http.get("/openapi.json").json()["paths"]:
        assert f"<code>{path}</code>" in answer.text
    for reference in ("<script", "src=", "href=", "url(", "@import"):
        assert reference not in answer.text


def test_not_ready_without_a_core() -> None:
    with FrontendProcess(with_core=False) as frontend:
        for path in ("/readyz", "/health", "/ping"):
            response = frontend.http.get(path)
            assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
            assert response.json()["stage"] == "starting" and response.json()["detail"]
        assert frontend.http.get("/livez").status_code == 200
        assert frontend.http.get("/v1/models").status_code == 200
        response = frontend.post("/v1/completions", prompt=PROMPT)
        assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
        assert "starting" in response.json()["error"]["message"]
        assert frontend.stop() == 0


def test_a_ready_frontend_starts_no_more_threads() -> None:
    with FrontendProcess(max_model_len=20000) as frontend:
        process = psutil.Process(frontend.process.pid)
        num_threads = process.num_threads()
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            prompts = [f"{number} " + "one two three " * 1000 for number in range(16)]
            answers = pool.map(lambda prompt: frontend.post("/tokenize", prompt=prompt), prompts)
            assert all(answer.status_code == 200 for answer in answers)
        frontend.complete(PROMPT, structured_outputs={"regex": "[a-z]{3}"})
        # One more waits for the processes that check grammars, and may start with the first constraint.
        assert process.num_threads() <= num_threads + 1


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "echo-alias"]
    card = client.models.retrieve("echo-alias")
    assert (card.id, card.object, card.max_model_len) == ("echo-alias", "model", 512)


def test_trailing_slashes_and_prefixes_of_clients_are_ignored() -> None:
    with FrontendProcess(api_keys=("key",)) as frontend:
        get, post = frontend.http.get, frontend.http.post
        with_key = {"authorization": "Bearer key"}
        assert get("/metrics/").status_code == get("/health/").status_code == 200
        assert get("/v1/models/").status_code == 401
        models = get("/v1/models/", headers=with_key).json()
        assert models == get("/v1/models", headers=with_key).json()
        one = get(f"/v1/models/{MODEL}/", headers=with_key).json()
        assert one["id"] == MODEL
        assert get("/openai/v1/models").status_code == 401
        assert models == get("/openai/v1/models", headers=with_key).json()
        body = {"messages": [{"role": "user", "content": "a b"}], "max_tokens": 1}
        answer = post("/v1/chat/completions/", json=body, headers=with_key)
        assert answer.status_code == 200, answer.text
        assert get("/").status_code == 200


def test_model_names_may_contain_slashes() -> None:
    with FrontendProcess(served_names=("org/model",)) as frontend:
        assert frontend.http.get("/v1/models/org/model").json()["id"] == "org/model"


def test_detokenize_inverts_tokenize(frontend: FrontendProcess) -> None:
    answer = frontend.post("/tokenize", prompt=PROMPT, return_token_strs=True).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == 5
    assert answer["tokens"] == frontend.tokenizer.encode(PROMPT)
    assert answer["max_model_len"] == 512
    detokenized = frontend.post("/detokenize", tokens=answer["tokens"]).json()
    assert detokenized == dict.fromkeys(("prompt", "content", "text"), PROMPT)
    assert frontend.post("/detokenize", tokens=[]).json()["prompt"] == ""


def test_metrics_count_served_tokens_and_requests(frontend: FrontendProcess) -> None:
    def generated() -> float:
        text = frontend.http.get("/metrics").text
        [line] = [x for x in text.splitlines() if x.startswith("engine:generation_tokens_total{")]
        return float(line.split()[-1])

    before = generated()
    frontend.complete(PROMPT, max_tokens=7)
    assert generated() == before + 7


def test_prefix_cache_can_be_reset(frontend: FrontendProcess) -> None:
    assert frontend.http.post("/reset_prefix_cache").json() == {"success": True}


def test_request_id_is_echoed_or_generated(frontend: FrontendProcess) -> None:
    named = frontend.http.post(
        "/v1/completions",
        json={"prompt": "a", "request_id": "other"},
        headers={"x-request-id": "abc-1"},
    )
    assert named.headers["x-request-id"] == "abc-1" and named.json()["id"] == "cmpl-abc-1"
    made = [frontend.http.get("/version").headers["x-request-id"] for _ in range(2)]
    assert made[0] != made[1]
    bad = frontend.http.get("/version", headers={"x-request-id": "x" * 1000})
    assert len(bad.headers["x-request-id"]) < 100


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_a_protocol_upgrade_is_ignored(frontend: FrontendProcess, protocol: str) -> None:
    """Java's HTTP client offers an upgrade with every request by default."""
    content = b'{"prompt": "One two three", "max_tokens": 2}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: {protocol}\r\n"
    whole = (
        f"{head}HTTP2-Settings: AAEAAEAA\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        + content
    )
    chunks = f"{head}Transfer-Encoding: chunked\r\n\r\n{len(content):x}\r\n".encode() + content
    last = b"GET /version HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
    requests = whole + chunks + b"\r\n0\r\n\r\n" + whole + last
    for size in (len(requests), 40):
        with socket.create_connection(("127.0.0.1", frontend.port), timeout=20) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for at in range(0, len(requests), size):
                connection.sendall(requests[at : at + size])
            answers = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answers.count(b"HTTP/1.1 200 OK") == 4, answers
        assert answers.count(b'"text":"One two"') == 3 and answers.endswith(b'"}')


def test_allowed_origins_get_cors_headers(frontend: FrontendProcess) -> None:
    page = "http://localhost:3000"
    preflight = {"origin": page, "access-control-request-method": "POST"}
    response = frontend.http.options("/v1/completions", headers=preflight)
    assert response.status_code == 200 and response.headers["access-control-allow-origin"] == page
    failed = frontend.http.post("/v1/completions", content=b"{", headers=preflight)
    assert failed.status_code == 400 and failed.headers["access-control-allow-origin"] == page


def test_api_keys_origins_and_root_path_work_together() -> None:
    with FrontendProcess(
        api_keys=("first", "second"), allowed_origins=("http://a.example",), root_path="/llm"
    ) as frontend:
        for path in PROBES:
            assert frontend.http.get(path).status_code == 200
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "Bearer"},
            {"authorization": "Basic first"},
            {"authorization": "Bearer firstsecond"},
        ):
            for path in ("/v1/models", "/nowhere", "/load", "/llm/v1/models"):
                response = frontend.http.get(path, headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
            # The web page at the same path is open.
            assert frontend.http.post("/", json={}, headers=headers).status_code == 401
        with frontend.client("wrong") as wrong, pytest.raises(openai.AuthenticationError):
            wrong.models.list()
        for key in ("first", "second"):
            with frontend.client(key) as client:
                assert client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1)
        key = {"authorization": "Bearer first"}
        assert frontend.http.get("/llm/v1/models", headers=key).status_code == 200
        assert frontend.http.get("/llm/health").status_code == 200
        allowed = frontend.http.get("/health", headers={"origin": "http://a.example"})
        assert allowed.headers["access-control-allow-origin"] == "http://a.example"
        refused = frontend.http.get("/health", headers={"origin": "http://b.example"})
        assert "access-control-allow-origin" not in refused.headers


class _Stream:
    """A streamed completion, read in a thread."""

    def __init__(self, frontend: FrontendProcess, max_tokens: int) -> None:
        self._url = f"http://127.0.0.1:{frontend.port}/v1/completions"
        self._body = {"prompt": PROMPT, "max_tokens": max_tokens, "stream": True}
        self.started = threading.Event()
        self.text = ""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self.started.wait(10)

    def _read(self) -> None:
        with (
            contextlib.suppress(httpx.RemoteProtocolError),
            httpx.stream("POST", self._url, json=self._body, timeout=20) as response,
        ):
            for piece in response.iter_text():
                self.text += piece
                self.started.set()

    def wait(self) -> None:
        self._thread.join(20)

    def events(self) -> list[dict]:
        self.wait()
        return sse_events(self.text)


def test_a_full_queue_is_503_with_retry_after() -> None:
    with FrontendProcess(
        scheduler=SchedulerConfig(max_num_seqs=2, max_num_queued_reqs=4)
    ) as frontend:
        refused = frontend.post("/v1/completions", prompt=PROMPT, n=8)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["type"] == "service_unavailable_error"
        assert frontend.complete(PROMPT, n=2, max_tokens=1)["choices"]


def test_drain_finishes_streams_and_refuses_new_requests() -> None:
    with FrontendProcess(step_s=0.05) as frontend:
        stream = _Stream(frontend, max_tokens=60)
        frontend.begin_stop()
        frontend.wait_for_stage(Stage.DRAINING)
        for path in ("/readyz", "/health"):
            response = frontend.http.get(path)
            assert response.status_code == 503 and response.json()["stage"] == "draining"
        assert frontend.http.get("/livez").status_code == 200
        refused = frontend.post("/v1/completions", prompt=PROMPT)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert "shutting down" in refused.json()["error"]["message"]
        events = stream.events()
        assert "".join(event["choices"][0]["text"] for event in events) == PROMPT * 12
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert frontend.process.wait(20) == 0
        assert "Traceback" not in frontend.log


def test_drain_ends_streams_after_the_timeout() -> None:
    with FrontendProcess(step_s=0.05, shutdown_timeout_s=0.3) as frontend:
        stream = _Stream(frontend, max_tokens=400)
        assert frontend.stop() == 0
        assert "error" in stream.events()[-1]
        assert "Traceback" not in frontend.log


def test_drain_ends_despite_a_client_that_never_reads() -> None:
    with FrontendProcess(
        max_model_len=8192, step_s=0.001, send_buffer=8192, shutdown_timeout_s=0.3
    ) as frontend:
        connection = socket.create_connection(("127.0.0.1", frontend.port))
        body = b'{"prompt": "a b", "max_tokens": 8000, "stream": true}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\ncontent-length: %d\r\n\r\n"
        connection.sendall(head % len(body) + body)
        while frontend.http.get("/load").json()["server_load"] == 0:
            assert not frontend.core.received or frontend.process.poll() is None
        assert frontend.stop() == 0
        connection.close()


def test_drain_with_an_incomplete_request_logs_nothing() -> None:
    with FrontendProcess() as frontend:
        with socket.create_connection(("127.0.0.1", frontend.port), timeout=20) as client:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            client.sendall(head + b"Content-Length: 100\r\nExpect: 100-continue\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 100 ")
            assert frontend.stop() == 0
            assert client.recv(100) == b""
        assert "Traceback" not in frontend.log and "without completing" not in frontend.log


UNFINISHED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"


@pytest.mark.parametrize("begun", [b"", UNFINISHED[:30]], ids=["silent", "slow head"])
def test_idle_connections_make_room_for_others(begun: bytes) -> None:
    with (
        FrontendProcess(slow_client_s=60.0, max_open_files=256) as frontend,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(400):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", frontend.port))
            with contextlib.suppress(OSError):
                client.send(begun)
        url = f"http://127.0.0.1:{frontend.port}/v1/models"
        wait_until(lambda: httpx.get(url, timeout=20).status_code == 200, what="room")
        assert {httpx.get(url, timeout=20).status_code for _ in range(40)} == {200}
        assert frontend.stop() == 0 and "Traceback" not in frontend.log, frontend.log


def test_probes_are_answered_when_clients_use_every_file_descriptor() -> None:
    with (
        FrontendProcess(slow_client_s=60.0, max_open_files=256) as frontend,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(400):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", frontend.port))
            with contextlib.suppress(OSError):
                client.send(UNFINISHED)
        for path, status in (("/livez", 200), ("/health", 200), ("/v1/models", 503)) * 3:
            response = httpx.get(f"http://127.0.0.1:{frontend.port}{path}", timeout=20)
            assert response.status_code == status and response.headers["connection"] == "close"
        stack.close()
        wait_until(lambda: frontend.http.get("/v1/models").status_code == 200, what="room")
        assert frontend.stop() == 0 and "Traceback" not in frontend.log, frontend.log


def test_second_signal_exits_at_once() -> None:
    with FrontendProcess(step_s=0.05) as frontend:
        stream = _Stream(frontend, max_tokens=400)
        frontend.begin_stop()
        frontend.wait_for_stage(Stage.DRAINING)
        frontend.begin_stop()
        assert frontend.process.wait(10) != 0
        stream.wait()


def test_a_failed_start_prints_the_reason() -> None:
    with FrontendProcess(with_core=False, chat_template="{{ messages") as frontend:
        frontend.wait_for_stage(Stage.FAILED)
        assert "the chat template is not valid" in frontend.stages[-1][1]
        assert frontend.process.wait(20) == 1
        assert "Traceback" not in frontend.log


def test_each_api_key_is_a_tenant_whatever_the_user_field_is() -> None:
    with FrontendProcess(api_keys=("first", "second")) as frontend:
        frontend.core.received.clear()
        for key, user in (("second", "x"), ("second", "y"), ("first", "x")):
            frontend.http.headers["authorization"] = f"Bearer {key}"
            frontend.complete(PROMPT, max_tokens=1, user=user)
        added = [m for m in frontend.core.received if isinstance(m, AddRequests)]
        tenants = [request.tenant for message in added for request in message.requests]
        assert tenants == ["key 2", "key 2", "key 1"]


def test_invalid_frames_from_the_supervisors_address_are_dropped_and_counted() -> None:
    with FrontendProcess() as frontend, zmq.Context() as context:
        with context.socket(zmq.PUB) as publisher:
            publisher.bind(frontend.config.status_address())
            heartbeats = HeartbeatReader(frontend.config, ["frontend 0"])

            def has_counted() -> bool:
                publisher.send(b"\xc1garbage")
                return any(beat.num_dropped_frames > 0 for beat, _ in heartbeats.read())

            wait_until(has_counted, what="it tells the supervisor")
            heartbeats.close()
        assert frontend.http.get("/readyz").status_code == 200


def test_routes_without_v1_and_invocations_answer_like_the_others(
    frontend: FrontendProcess,
) -> None:
    chat = {"messages": [{"role": "user", "content": "One two"}], "max_tokens": 2}
    for path in ("/chat/completions", "/invocations"):
        answer = frontend.post(path, **chat).json()
        assert answer["choices"][0]["message"]["content"] == "One two"
        assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
        events = sse_events(frontend.post(path, stream=True, **chat).text)
        assert events[0]["object"] == "chat.completion.chunk"
    for path in ("/completions", "/invocations"):
        answer = frontend.post(path, prompt="One two", max_tokens=2).json()
        assert answer["choices"][0]["text"] == "One two" and answer["id"].startswith("cmpl-")
    assert frontend.http.get("/models").json() == frontend.http.get("/v1/models").json()
    assert frontend.http.get(f"/models/{MODEL}").json()["id"] == MODEL
    for body, param in ((b"", None), (b'{"messages": 5}', "messages"), (b"{}", "prompt")):
        response = frontend.http.post("/invocations", content=body)
        assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_defaults_of_usage_and_token_names_and_the_tokenizers_configuration(
    frontend: FrontendProcess,
) -> None:
    refused = frontend.http.get("/tokenizer_info")
    assert refused.status_code == 404
    assert "--enable-tokenizer-info-endpoint" in refused.json()["error"]["message"]
    refused = frontend.http.post("/v1/load_lora_adapter", json={"lora_name": "a"})
    assert refused.status_code == 404
    assert "--allow-runtime-lora-updating" in refused.json()["error"]["message"]
    flags = {"force_include_usage": True, "return_tokens_as_token_ids": True}
    with FrontendProcess(enable_tokenizer_info=True, **flags) as other:
        for options in (None, {"include_usage": False}):
            events = sse_events(
                other.post(
                    "/v1/completions",
                    prompt="One",
                    max_tokens=2,
                    stream=True,
                    stream_options=options,
                ).text
            )
            assert events[-1]["choices"] == []
            # As in vLLM, every chunk has the usage so far.
            counts = [event["usage"]["completion_tokens"] for event in events]
            assert counts == sorted(counts) and counts[-1] == 2
        for asked_for, is_id in ((None, True), (False, False), (True, True)):
            answer = other.complete(
                "One", max_tokens=1, logprobs=0, return_tokens_as_token_ids=asked_for
            )
            [token] = answer["choices"][0]["logprobs"]["tokens"]
            assert token.startswith("token_id:") is is_id
        info = other.http.get("/tokenizer_info").json()
        assert info["tokenizer_class"] and info["chat_template"] == ECHO_TEMPLATE
        assert info["eos_token"] == other.tokenizer.eos_token
