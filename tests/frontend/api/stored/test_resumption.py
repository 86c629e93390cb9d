"""A returning client gets the events that it missed and the rest. A retry with the same key gets the same answer."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine.protocol.config import StoreConfig
from support.processes.program import wait_until
from support.servers.frontend_process import MODEL, FrontendProcess, sound_frontend

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

ANSWER = (
    "<think>The weather in Paris… and 東京.</think>Let me look. <tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>\n<tool_call>\n'
    '{"name": "weather", "arguments": {"city": "東京"}}\n</tool_call>'
)
PARAMETERS = {"type": "object", "properties": {"city": {}, "days": {}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


@pytest.fixture(scope="module")
def frontend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontendProcess]:
    store = StoreConfig(path=str(tmp_path_factory.mktemp("store") / "store.db"), resume_grace_s=20)
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1"}
    with sound_frontend(step_s=0.0005, store=store, api_keys=("one", "two"), **parsers) as process:
        process.http.headers["authorization"] = "Bearer one"
        yield process


def body_of(path: str, text: str = ANSWER, **fields: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    return {"model": MODEL, "stream": True, **asked, **fields}


def events_of(text: str) -> list[tuple[str, Any]]:
    """Return the ID, or "", and the data of each event."""
    events = []
    for part in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in part.split("\n") if line[:1] not in ("", ":"))
        if fields:
            data = fields["data"]
            events.append((fields.get("id", ""), data if data == "[DONE]" else json.loads(data)))
    return events


def merged(events: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    """Return the text that a client assembles from the events of each choice."""
    choices: dict[int, dict[str, Any]] = {}
    for _, chunk in events:
        for choice in [] if chunk == "[DONE]" else chunk["choices"]:
            whole = choices.setdefault(choice["index"], {"text": "", "reasoning": "", "calls": {}})
            delta = choice.get("delta", {})
            whole["text"] += choice.get("text") or delta.get("content") or ""
            if (found := choice.get("logprobs")) is not None:
                rows = found.get("content") or list(zip(*found.values(), strict=True))
                whole.setdefault("logprobs", []).extend(rows)
            whole["reasoning"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                known = whole["calls"].setdefault(call["index"], {"id": "", "name": "", "args": ""})
                known["id"] += call.get("id", "")
                known["name"] += call["function"].get("name", "")
                known["args"] += call["function"].get("arguments", "")
            for name in ("finish_reason", "stop_reason"):
                if choice.get(name) is not None:
                    assert name not in whole, "two ends"
                    whole[name] = choice[name]
    return [choices[index] for index in sorted(choices)]


def resume(frontend: FrontendProcess, path: str, event_id: str) -> list[tuple[str, Any]]:
    response = frontend.http.post(path, content=b"{}", headers={"last-event-id": event_id})
    assert response.status_code == 200, response.text
    return events_of(response.text)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"tools": [WEATHER], "max_tokens": 110, "stream_options": {"include_usage": True}}),
        (CHAT, {"n": 2, "max_tokens": 30}),
        (COMPLETIONS, {"stop": ["Paris"], "max_tokens": 60}),
        (COMPLETIONS, {"stop": ["東"], "n": 2, "echo": True}),
        (COMPLETIONS, {"repetition_detection": {"max_pattern_size": 50, "min_count": 3}}),
        (COMPLETIONS, {"max_tokens": 40, "return_token_ids": True, "logprobs": 2}),
        (CHAT, {"n": 2, "max_tokens": 20, "logprobs": True, "top_logprobs": 3}),
    ],
    ids=[
        "tools",
        "choices",
        "stop",
        "stop in choices",
        "repetition",
        "logprobs",
        "logprobs of a chat",
    ],
)
def test_a_stream_continues_at_every_event(
    frontend: FrontendProcess, path: str, fields: dict[str, Any]
) -> None:
    response = frontend.post(path, **body_of(path, **fields))
    assert response.status_code == 200, response.text
    whole = events_of(response.text)
    # A busy machine sends several tokens in one event, or all of them.
    assert len(whole) > 1 and whole[-1][1] == "[DONE]"
    places = [place for place, (event_id, _) in enumerate(whole) if event_id]
    if path == CHAT and "tools" in fields:
        [answer] = merged(whole)
        assert len(answer["calls"]) >= 2 and answer["reasoning"] and answer["text"]
    for place in places:
        event_id, chunk = whole[place]
        rest = resume(frontend, path, event_id)
        assert rest[-1][1] == "[DONE]"
        assert merged(whole[: place + 1] + rest) == merged(whole), event_id
        assert {part["id"] for _, part in rest[:-1]} <= {chunk["id"]}
        assert {part["created"] for _, part in rest[:-1]} <= {chunk["created"]}
        assert [e for e in rest if e[1] != "[DONE]" and not e[1]["choices"]] == [
            e for e in whole[place + 1 :] if e[1] != "[DONE]" and not e[1]["choices"]
        ]


def test_a_stream_continues_while_it_is_generated(frontend: FrontendProcess) -> None:
    body = body_of(COMPLETIONS, max_tokens=300)
    whole = merged(events_of(frontend.post(COMPLETIONS, **body).text))
    with frontend.http.stream("POST", COMPLETIONS, json=body) as response:
        part = ""
        for text in response.iter_text():
            part += text
            if part.count("\n\n") > 5:
                break
    events = events_of(part[: part.rindex("\n\n") + 2])
    event_id, chunk = events[-1]
    # Another client and the first one read at the same time, one of them from the beginning.
    url = f"{COMPLETIONS}/{chunk['id']}/events"
    found: list[str] = []
    other = threading.Thread(target=lambda: found.append(frontend.http.get(url).text))
    other.start()
    assert merged(events + resume(frontend, COMPLETIONS, event_id)) == whole
    other.join()
    assert merged(events_of(found[0])) == whole


def test_a_request_without_readers_ends_after_the_grace_period() -> None:
    with FrontendProcess(step_s=0.01, store=StoreConfig(resume_grace_s=0.5)) as frontend:
        body = body_of(COMPLETIONS, max_tokens=400)
        with frontend.http.stream("POST", COMPLETIONS, json=body) as response:
            event = next(response.iter_text())
        left_at = time.monotonic()
        assert frontend.core.running
        wait_until(lambda: not any(frontend.core.running.values()), what="it is aborted")
        assert time.monotonic() - left_at > 0.4
        [(event_id, _), *_] = events_of(event[: event.rindex("\n\n") + 2])
        answer = frontend.http.post(COMPLETIONS, content=b"{}", headers={"last-event-id": event_id})
        assert answer.status_code == 404, answer.text


def test_a_message_continues_at_every_event(frontend: FrontendProcess) -> None:
    path, prompt = "/v1/messages", [{"role": "user", "content": ANSWER}]
    body = {"model": MODEL, "stream": True, "max_tokens": 110, "messages": prompt}
    tools = [{"name": "weather", "input_schema": PARAMETERS}]
    whole = events_of(frontend.post(path, **body, tools=tools).text)
    assert len(whole) > 12
    for place, (event_id, _) in enumerate(whole):
        if event_id:
            known = whole[: place + 1]
            assert content_of(known + resume(frontend, path, event_id)) == content_of(whole)
    url = f"{path}/{whole[0][1]['message']['id']}/events"
    assert content_of(events_of(frontend.http.get(url).text)) == content_of(whole)
    headers = {"last-event-id": event_id}
    assert frontend.http.get(url, headers=headers).text == ""
    unknown = frontend.http.get(f"{path}/msg_x/events")
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")


def content_of(events: list[tuple[str, Any]]) -> list[Any]:
    """Return the events of a message, with the deltas of a block joined, and its ID."""
    found: list[Any] = []
    for _, event in events:
        delta = event.get("delta", {})
        text = [key for key in ("text", "thinking", "partial_json") if key in delta]
        place = [event["index"], *text] if text else []
        if text and isinstance(found[-1], list) and found[-1][:2] == place:
            found[-1][2] += delta[text[0]]
        else:
            found.append([*place, delta[text[0]]] if text else event)
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_with_the_same_key_gets_the_same_answer(
    frontend: FrontendProcess, stream: bool
) -> None:
    key = {"idempotency-key": f"key {stream}"}
    wanted = {} if stream else {"prompt_logprobs": 1, "logprobs": True}
    body = body_of(CHAT, tools=[WEATHER], stream=stream, **wanted)
    answers = [frontend.http.post(CHAT, json=body, headers=key) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    if stream:
        assert merged(events_of(answers[0].text)) == merged(events_of(answers[1].text))
    else:
        assert answers[0].json() == answers[1].json()
    other = frontend.http.post(CHAT, json={**body, "max_tokens": 5}, headers=key)
    assert other.status_code == 422 and other.json()["error"]["param"] == "Idempotency-Key"
    another = {**key, "authorization": "Bearer two"}
    theirs = frontend.http.post(CHAT, json={**body, "max_tokens": 5}, headers=another)
    assert theirs.status_code == 200


def test_requests_with_one_key_at_once_are_one_request(frontend: FrontendProcess) -> None:
    body = body_of(COMPLETIONS, stream=False, max_tokens=200)
    answers: list[httpx.Response] = []

    def post() -> None:
        headers = {"idempotency-key": "at once"}
        answers.append(frontend.http.post(COMPLETIONS, json=body, headers=headers))

    threads = [threading.Thread(target=post) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {answer.status_code for answer in answers} <= {200, 409}
    assert len({a.json()["id"] for a in answers if a.status_code == 200}) == 1


def test_unknown_or_foreign_event_ids_are_rejected(frontend: FrontendProcess) -> None:
    def error_of(event_id: str, path: str = CHAT, **headers: str) -> tuple[int, str]:
        response = frontend.http.post(
            path, content=b"{}", headers={"last-event-id": event_id, **headers}
        )
        return response.status_code, response.json()["error"]["message"]

    [*_, (event_id, chunk), _] = events_of(frontend.post(CHAT, **body_of(CHAT)).text)
    assert error_of(event_id.replace("chatcmpl-", "chatcmpl-x"))[0] == 404
    assert error_of(event_id, authorization="Bearer two")[0] == 404
    assert error_of(event_id, COMPLETIONS) == (
        404,
        f"Last-Event-ID belongs to a request to {CHAT}; send it there",
    )
    assert error_of(f"{chunk['id']}:99999")[0] == 400
    assert error_of(f"{chunk['id']}:1.1")[0] == 400
    for nonsense in ("x", ":1", "a:", "a:-1", "a:1e1", "a:" + "9" * 50, "a:" + "1." * 3000 + "1"):
        assert error_of(nonsense)[0] == 400, nonsense[:50]
    assert frontend.http.get(f"{CHAT}/{chunk['id']}x/events").status_code == 404


def test_streams_have_no_ids_unless_requests_are_kept(tmp_path: Path) -> None:
    with FrontendProcess() as frontend:
        body = body_of(COMPLETIONS, max_tokens=5)
        response = frontend.http.post(COMPLETIONS, json=body, headers={"last-event-id": "other:1"})
        assert response.status_code == 200
        assert all(not event_id for event_id, _ in events_of(response.text))
        assert frontend.http.get(f"{COMPLETIONS}/x/events").status_code == 404


@pytest.mark.parametrize("is_same_model", [True, False])
def test_the_next_server_finishes_what_its_model_began(tmp_path: Path, is_same_model: bool) -> None:
    store = StoreConfig(path=str(tmp_path / "store.db"))
    body = body_of(COMPLETIONS, max_tokens=120, n=2)
    part = ""
    with (
        FrontendProcess(step_s=0.03, store=store) as first,
        first.http.stream("POST", COMPLETIONS, json=body) as response,
    ):
        for text in response.iter_text():
            part += text
            if part.count("\n\n") > 9:
                first.process.kill()
                break
    begun = events_of(part[: part.rindex("\n\n") + 2])
    event_id, _ = [event for event in begun if event[0]][-1]
    with FrontendProcess(store=store, max_model_len=512 if is_same_model else 400) as second:
        finished = 'engine:store_requests{model_name="echo",state="finished"} 1.0'
        wait_until(lambda: finished in second.http.get("/metrics").text, what="it is finished")
        if is_same_model:
            whole = merged(events_of(second.post(COMPLETIONS, **body).text))
            assert merged(begun + resume(second, COMPLETIONS, event_id)) == whole
            return
        answer = second.http.post(COMPLETIONS, content=b"{}", headers={"last-event-id": event_id})
        assert answer.status_code == 410, answer.text


def test_an_answer_of_one_adapter_is_never_continued_with_another(tmp_path: Path) -> None:
    """Another version would generate other tokens. The fingerprint of the answer identifies the version."""
    for version in ("first", "second"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "adapter_config.json").write_text("{}")
        (tmp_path / version / "adapter_model.safetensors").write_text(version)
    store = StoreConfig(path=str(tmp_path / "store.db"), resume_grace_s=20)
    with FrontendProcess(store=store, allow_runtime_lora_updating=True) as frontend:

        def load(version: str) -> None:
            body = {"lora_name": "tuned", "lora_path": str(tmp_path / version)}
            loaded = frontend.post("/v1/load_lora_adapter", **body, load_inplace=True)
            assert loaded.status_code == 200, loaded.text

        def answer(model: str) -> list[tuple[str, Any]]:
            response = frontend.post(COMPLETIONS, **body_of(COMPLETIONS) | {"model": model})
            assert response.status_code == 200, response.text
            return events_of(response.text)

        load("first")
        base, first = answer(MODEL), answer("tuned")
        load("second")
        second = answer("tuned")
        fingerprints = [events[0][1]["system_fingerprint"] for events in (base, first, second)]
        assert len(set(fingerprints)) == 3
        assert all(each.startswith(fingerprints[0]) for each in fingerprints)
        for events, status in ((base, 200), (first, 410), (second, 200)):
            headers = {"last-event-id": events[0][0]}
            resumed = frontend.http.post(COMPLETIONS, content=b"{}", headers=headers)
            assert resumed.status_code == status, resumed.text
        copy = {"source": "tuned", "destination": "copy:latest"}
        assert frontend.post("/api/copy", **copy).status_code == 200
        assert "already been loaded" in frontend.post("/api/copy", **copy).json()["error"]
        answer("copy")
        removed = frontend.http.request("DELETE", "/api/delete", json={"model": "copy"})
        assert removed.status_code == 200, removed.text
        assert frontend.post(COMPLETIONS, model="copy", prompt="a").status_code == 404
        load("first")
        assert merged(resume(frontend, COMPLETIONS, first[0][0])) == merged(first[1:])


def test_the_stream_of_a_conversation_is_found_replayed_and_stopped(
    frontend: FrontendProcess,
) -> None:
    """These are llama.cpp's routes. The ID of a conversation may end with the name of a model."""
    http, stream = frontend.http, {"params": {"conv_id": "c 1::org/model"}}

    def known() -> list[tuple[str, bool]]:
        asked = {"conversation_ids": ["c 1", "c 2"]}
        reply = http.post("/v1/streams/lookup", json=asked)
        return [(each["conversation_id"], each["is_done"]) for each in reply.json()]

    def send(text: str, conversation: str, **fields: Any) -> httpx.Response:
        headers = {"x-conversation-id": conversation}
        return http.post(CHAT, json=body_of(CHAT, text, **fields), headers=headers)

    assert known() == []
    send("earlier", "c 1::org/model")
    sent = merged(events_of(send(ANSWER, "c 1::org/model", max_tokens=40).text))
    send(ANSWER, "c 2", max_tokens=3, stream=False)
    assert known() == [("c 1", True), ("c 2", True)]
    replayed = http.get("/v1/stream?from=0", **stream)
    assert merged(events_of(replayed.text)) == sent
    assert http.get("/v1/stream", params={"conv_id": "c 2"}).json()["choices"]
    other = {"authorization": "Bearer two"}
    assert http.get("/v1/stream", **stream, headers=other).status_code == 404
    for start in ("1", "x"):
        refused = http.get("/v1/stream", params={"conv_id": "c 1", "from": start})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "from"

    body = body_of(COMPLETIONS, max_tokens=400)
    headers = {"x-conversation-id": "c 1::org/model"}
    thread, step_s = frontend.core_thread, frontend.core_thread.step_s
    thread.step_s = 0.02
    with http.stream("POST", COMPLETIONS, json=body, headers=headers) as running:
        pieces = running.iter_text()
        text = next(pieces)
        wait_until(lambda: ("c 1", False) in known())
        assert http.delete("/v1/stream", **stream).status_code == 204
        text += "".join(pieces)
    thread.step_s = step_s
    assert "[DONE]" in text and len(events_of(text)) < 400
    assert known() == [("c 2", True)]
    assert http.get("/v1/stream", **stream).status_code == 404
    for _ in range(2):
        assert http.delete("/v1/stream", params={"conv_id": "c 2"}).status_code == 204
    assert known() == []
    for conversation in ("", "é", "a" * 256):
        assert http.get("/v1/stream", params={"conv_id": conversation}).status_code == 400
