"""`engine router`: several models at one address, which are loaded when they are needed."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import psutil
import pytest
import yaml
from engine.frontend.supervisor.run_dir import RunDirectory
from support.processes.program import has_ended, wait_until
from support.servers.server import Server, default_model
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

pytestmark = pytest.mark.rotated

PROMPT = "One two three"


class RouterServer(Server):
    """A router with the models of `small` and `other`, which are equal, and of `absent`, which does not exist."""

    def __init__(self, directory: Path, *flags: str, **defaults: float) -> None:
        options = {"model": default_model(), "max-model-len": 512}
        content = {
            "defaults": {"api-key": ["key"], "disable-log-stats": True, **defaults},
            "models": {"small": options, "other": options, "absent": {"model": "/absent"}},
        }
        (directory / "models.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        self._file = str(directory / "models.yaml")
        super().__init__(*flags, wait=False)
        self.wait_for("routing to")

    def command(self, args: tuple[str, ...]) -> list[str]:
        return ["router", self._file, *args, "--port", "0"]

    @property
    def url(self) -> str:
        return re.search(r"routing to .* at (http\S+)", self.log)[1].rstrip("/")

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="key", max_retries=0, timeout=120)

    def states(self) -> dict[str, str]:
        models = self.client().models.list()
        return {model.id: model.status["value"] for model in models}  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterServer]:
    with RouterServer(tmp_path_factory.mktemp("router")) as server:
        yield server


def complete(client: openai.OpenAI, model: str) -> str:
    fields = {"ignore_eos": True}
    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=8, temperature=0, extra_body=fields
    )
    assert answer.model == model
    return answer.choices[0].text


def test_models_take_turns(router: RouterServer) -> None:
    client = router.client()
    with ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(lambda name: complete(client, name), ["small", "other"] * 3))
    assert len(set(texts)) == 1
    states = router.states()
    assert sorted(states.values()) == ["loaded", "unloaded", "unloaded"], states
    # Requests that wait for the same model are answered together.
    assert router.log.count("router: loading") == 2
    with pytest.raises(openai.NotFoundError, match="available models: small, other, absent"):
        complete(client, "missing")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{router.url}/v1", api_key="wrong").models.list()
    with pytest.raises(openai.InternalServerError, match="the model absent does not load"):
        complete(client, "absent")
    assert router.states()["absent"] == "failed"
    assert complete(client, "small") == texts[0]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1},
        ),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 1}),
        ("/v1/responses", {"input": PROMPT, "max_output_tokens": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1}),
        ("/v1/embeddings", {"input": PROMPT}),
        ("/v1/score", {"text_1": PROMPT, "text_2": PROMPT}),
        ("/tokenize", {"prompt": PROMPT}),
        ("/generate", {"text": PROMPT, "sampling_params": {"max_new_tokens": 1}}),
        ("/api/generate", {"prompt": PROMPT, "options": {"num_predict": 1}, "stream": False}),
    ],
)
def test_requests_for_any_model_reach_the_first_one(
    router: RouterServer, path: str, fields: dict[str, object]
) -> None:
    http = httpx.Client(base_url=router.url, headers={"x-api-key": "key"}, timeout=120)
    other = {"model": "other", "prompt": PROMPT, "max_tokens": 1}
    assert http.post("/v1/completions", json=other).status_code == 200
    # "default" is SGLang's name for the model of the server.
    names = ["default", "default:latest"] if path.startswith("/api/") else ["default"]
    for named in ({}, *({"model": name} for name in names)):
        routed = http.post(path, json=fields | named)
        assert routed.status_code == 200, routed.text
        running = http.get("/api/ps").json()["models"]
        assert [each["name"] for each in running] == ["small"]
    description = http.get("/v1/models/default").json()
    assert description["status"]["value"] == "loaded"


def test_objects_are_found_without_the_name_of_their_model(router: RouterServer) -> None:
    client = router.client()
    response = client.responses.create(model="other", input=PROMPT, max_output_tokens=2)
    assert client.responses.retrieve(response.id).model == "other"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_" + "0" * 32)


def test_conversations_with_any_loaded_model_are_found_and_stopped(tmp_path: Path) -> None:
    with RouterServer(tmp_path, "--models-max", "2", resume_grace=60) as router:
        http = httpx.Client(base_url=router.url, headers={"x-api-key": "key"}, timeout=120)
        body = {"prompt": PROMPT, "max_tokens": 2}
        for name in ("small", "other"):
            headers = {"x-conversation-id": f"of-{name}::{name}"}
            answer = http.post("/v1/completions", json=body | {"model": name}, headers=headers)
            assert answer.status_code == 200, answer.text
        lookup = {"conversation_ids": ["of-small", "of-other", "of-none"]}

        def find() -> list[str]:
            found = http.post("/v1/streams/lookup", json=lookup).json()
            return sorted(each["conversation_id"] for each in found)

        assert find() == ["of-other", "of-small"]
        assert http.delete("/v1/stream?conv_id=of-other").status_code == 204
        assert http.get("/v1/stream?conv_id=of-other").status_code == 404
        assert find() == ["of-small"]
        assert http.post("/v1/streams/lookup", json={"conversation_ids": 1}).status_code == 400


def test_stream_of_a_conversation_with_two_models_needs_the_name_of_one(tmp_path: Path) -> None:
    with RouterServer(tmp_path, "--models-max", "2", resume_grace=60) as router:
        http = httpx.Client(base_url=router.url, headers={"x-api-key": "key"}, timeout=120)
        headers = {"x-conversation-id": "same"}
        body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}
        for name in ("small", "other"):
            answer = http.post("/v1/completions", json=body | {"model": name}, headers=headers)
            assert answer.status_code == 200, answer.text
        refused = http.get("/v1/stream?conv_id=same")
        assert refused.status_code == 409, refused.text
        error = refused.json()["error"]
        assert error["param"] == "model"
        assert "Several models have a stream of this conversation: small, other" in error["message"]
        for name in ("small", "other"):
            for query in ({"conv_id": f"same::{name}"}, {"conv_id": "same", "model": name}):
                assert f'"model":"{name}"' in http.get("/v1/stream", params=query).text
        assert http.delete("/v1/stream?conv_id=same::small").status_code == 204
        assert '"model":"other"' in http.get("/v1/stream?conv_id=same").text


def test_models_are_loaded_and_unloaded_on_request(router: RouterServer) -> None:
    http = httpx.Client(base_url=router.url, headers={"x-api-key": "key"}, timeout=120)
    assert http.post("/models/load", json={"model": "small"}).json() == {"success": True}
    assert [each["name"] for each in http.get("/api/ps").json()["models"]] == ["small"]
    assert "engine:num_requests_running" in http.get("/metrics?model=small").text
    assert 'engine:router_model_loaded{model_name="small"} 1' in http.get("/metrics").text
    assert http.post("/models/unload", json={"model": "small"}).json() == {"success": True}
    assert http.get("/api/ps").json()["models"] == []
    assert http.post("/models/load", json={}).status_code == 400
    # Ollama's words for the same.
    load = http.post("/api/generate", json={"model": "small"}).json()
    assert (load["done_reason"], load["response"]) == ("load", "")
    assert http.get("/api/ps").json()["models"][0]["expires_at"].startswith("9999")
    for path, empty in (("/api/generate", {"prompt": ""}), ("/api/chat", {"messages": []})):
        unload = http.post(path, json={"model": "small:latest", "keep_alive": 0} | empty).json()
        assert (unload["model"], unload["done_reason"]) == ("small:latest", "unload")
        assert http.get("/api/ps").json()["models"] == []
    assert http.get("/v1/models/small").json()["status"]["value"] == "unloaded"
    assert http.get("/readyz").status_code == 200


def test_requests_may_ask_not_to_load_their_model(router: RouterServer) -> None:
    http = httpx.Client(base_url=router.url, headers={"x-api-key": "key"}, timeout=120)
    props = http.get("/props").json()
    assert (props["role"], props["max_instances"], props["models_autoload"]) == ("router", 1, True)
    assert http.post("/models/unload", json={"model": "other"}).json() == {"success": True}
    body = {"model": "other", "prompt": PROMPT, "max_tokens": 1}
    refused = http.post("/v1/completions?autoload=false", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith('model "other" is not loaded')
    assert http.post("/v1/completions?autoload=true", json=body).status_code == 200
    assert http.post("/v1/completions?autoload=0", json=body).status_code == 200
    assert http.get("/props?model=other").json()["total_slots"] > 0


def test_reload_reads_the_file_again_and_reports_events(tmp_path: Path) -> None:
    with RouterServer(tmp_path) as router:
        http = httpx.Client(base_url=router.url, headers={"x-api-key": "key"}, timeout=120)
        file = tmp_path / "models.yaml"
        content = yaml.safe_load(file.read_text())
        with http.stream("GET", "/models/sse") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            lines = stream.iter_lines()
            assert next(lines) == ": subscribed"
            assert http.post("/models/load", json={"model": "small"}).json() == {"success": True}
            del content["models"]["small"]
            content["models"]["new"] = content["models"]["other"]
            file.write_text(yaml.safe_dump(content, sort_keys=False))
            cards = http.get("/models?reload=1").json()["data"]
            assert [card["id"] for card in cards] == ["other", "absent", "new"]
            router.stop()
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
        states = [each["data"]["status"] for each in events if each["event"] == "model_status"]
        assert states == ["loading", "loaded", "unloaded"]
        assert [(each["model"], each["event"]) for each in events[3:]] == [
            ("small", "model_remove"),
            ("*", "models_reload"),
        ]


def test_requests_without_a_model_are_answered_while_all_models_are_replaced(
    tmp_path: Path,
) -> None:
    with RouterServer(tmp_path) as router, ThreadPoolExecutor(1) as pool:
        http = httpx.Client(base_url=router.url, headers={"x-api-key": "key"}, timeout=120)
        body = {"model": "small", "prompt": PROMPT, "max_tokens": 400, "stream": True}
        file = tmp_path / "models.yaml"
        content = yaml.safe_load(file.read_text())
        content["models"] = {"new": content["models"]["small"]}
        with http.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            file.write_text(yaml.safe_dump(content))
            reloading = pool.submit(http.get, "/models?reload=1")
            wait_until(lambda: "small" not in router.states(), 60, "the new list of models")
            answer = http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 1})
            assert answer.status_code == 200 and answer.json()["model"] == "new", answer.text
            assert list(lines)[-2] == "data: [DONE]"
        assert [card["id"] for card in reloading.result().json()["data"]] == ["new"]


def test_an_invalid_file_changes_no_models(tmp_path: Path) -> None:
    with RouterServer(tmp_path) as router:
        before = router.states()
        (tmp_path / "models.yaml").write_text("models: {}")
        answer = httpx.get(f"{router.url}/models?reload=1", headers={"x-api-key": "key"})
        assert answer.status_code == 500
        assert "must name at least one model" in answer.json()["error"]["message"]
        unread = httpx.get(f"{router.url}/models?reload=0", headers={"x-api-key": "key"})
        assert unread.status_code == 200
        assert router.states() == before


def test_connections_to_a_model_are_used_again(router: RouterServer) -> None:
    def sockets() -> set[str]:
        """Return the open sockets of the router."""
        found = Path(f"/proc/{router.process.pid}/fd").iterdir()
        return {link for each in found if (link := str(each.readlink())).startswith("socket:")}

    client = router.client()
    complete(client, "small")
    before = sockets()
    assert len({complete(client, "small") for _ in range(3)}) == 1
    # Connections of earlier tests may end meanwhile.
    assert sockets() <= before


@pytest.mark.parametrize(
    "head",
    [
        "POST /v1/completions HTTP/1.0",
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncookie: a=b; c=d; ",
    ],
)
def test_requests_of_unusual_clients_reach_the_model(router: RouterServer, head: str) -> None:
    """A client of HTTP/1.0 sends no host, and a header may have blanks after its value."""
    address = urlsplit(router.url)
    body = json.dumps({"model": "small", "prompt": PROMPT, "max_tokens": 1})
    with socket.create_connection((address.hostname, address.port), 120) as connection:
        fields = f"content-type: application/json\r\ncontent-length: {len(body)}"
        end = "authorization: Bearer key\r\nconnection: close"
        connection.sendall(f"{head}\r\n{fields}\r\n{end}\r\n\r\n{body}".encode())
        with connection.makefile("rb") as answer:
            assert answer.readline().split()[1] == b"200", answer.read()


def test_websockets_reach_the_model(router: RouterServer) -> None:
    url = router.url.replace("http", "ws") + "/v1/responses?model=small"
    headers = {"authorization": "Bearer key"}
    create = {"type": "response.create", "model": "small", "input": "Hi", "max_output_tokens": 4}
    with connect(url, additional_headers=headers, open_timeout=120) as socket:
        for _ in range(2):
            socket.send(json.dumps(create))
            kinds = []
            while not kinds or kinds[-1].partition(".")[2] not in ("completed", "incomplete"):
                kinds.append(json.loads(socket.recv(timeout=60))["type"])
            assert kinds[0] == "response.created"
    nowhere = url.replace("responses", "nowhere")
    with pytest.raises(InvalidStatus, match="404"):
        connect(nowhere, additional_headers=headers, open_timeout=120)


def test_a_stream_ends_before_its_model_is_unloaded(router: RouterServer) -> None:
    client = router.client()
    fields = {"ignore_eos": True}
    with (
        client.completions.create(
            model="small", prompt=PROMPT, max_tokens=300, stream=True, extra_body=fields
        ) as stream,
        ThreadPoolExecutor(1) as pool,
    ):
        next(iter(stream))
        text = pool.submit(complete, client, "other")
        wait_until(lambda: router.states()["small"] == "unloaded", what="small is to be unloaded")
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert text.result()


def test_a_client_that_leaves_ends_its_request(router: RouterServer) -> None:
    client = router.client()
    fields = {"ignore_eos": True}
    stream = client.completions.create(
        model="small", prompt=PROMPT, max_tokens=400, stream=True, extra_body=fields
    )
    next(iter(stream))
    stream.close()
    idle = 'num_requests_running{engine="0",model_name="small"} 0.0'
    headers = {"x-api-key": "key"}
    url = f"{router.url}/metrics?model=small"
    wait_until(lambda: idle in httpx.get(url, headers=headers).text, what="the request has ended")


def test_a_crashed_model_is_loaded_again(router: RouterServer) -> None:
    client = router.client()
    complete(client, "small")
    guardians = [c for c in psutil.Process(router.process.pid).children() if c.is_running()]
    for guardian in guardians:
        guardian.kill()
    wait_until(lambda: router.states()["small"] == "failed", what="the exit was noticed")
    assert complete(client, "small")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_models_end_with_the_router(
    tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    with RouterServer(tmp_path, "--models-max", "2", "--idle-seconds", "3") as router:
        client = router.client()
        complete(client, "other")
        fields = {"ignore_eos": True}
        stream = client.completions.create(
            model="small", prompt=PROMPT, max_tokens=200, stream=True, extra_body=fields
        )
        next(iter(stream))
        wait_until(lambda: router.states()["other"] == "unloaded", what="other was idle")
        children = router.find_children()
        router.process.send_signal(number)
        if number == signal.SIGTERM:
            assert list(stream)[-1].choices[0].finish_reason == "length"
            assert router.process.wait(60) == 0
        wait_until(lambda: all(map(has_ended, children)), 60, what="no process is left")
    with RunDirectory() as other:
        assert [str(path) for path in tmp_path.glob("engine-*")] == [other.path]
