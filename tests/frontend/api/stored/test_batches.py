"""OpenAI's Files and Batches, used by OpenAI's own client. The core repeats the last message."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from engine.protocol.config import StoreConfig
from support.servers.frontend_process import MODEL, FrontendProcess, sound_frontend

pytestmark = pytest.mark.slow

KEYS = ("sesame", "other")
WAIT_S = 30.0


@pytest.fixture(scope="module")
def frontend() -> Iterator[FrontendProcess]:
    with sound_frontend(step_s=0.0005, api_keys=KEYS) as process:
        yield process


@pytest.fixture(scope="module")
def client(frontend: FrontendProcess) -> Iterator[openai.OpenAI]:
    with frontend.client(KEYS[0]) as openai_client:
        yield openai_client


@pytest.fixture(scope="module")
def stranger(frontend: FrontendProcess) -> Iterator[openai.OpenAI]:
    with frontend.client(KEYS[1]) as openai_client:
        yield openai_client


def chat(number: int, text: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
    return {
        "custom_id": f"request-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body,
    }


def upload(client: openai.OpenAI, lines: list[dict[str, Any]]) -> str:
    content = "\n".join(map(json.dumps, lines)).encode()
    return client.files.create(file=("in.jsonl", content), purpose="batch").id


def start(client: openai.OpenAI, lines: list[dict[str, Any]], **fields: Any) -> Any:
    options: dict[str, Any] = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return client.batches.create(input_file_id=upload(client, lines), **(options | fields))


def wait_for(client: openai.OpenAI, batch: Any, *statuses: str) -> Any:
    wanted = statuses or ("completed", "failed", "expired", "cancelled")
    deadline = time.monotonic() + WAIT_S
    while batch.status not in wanted:
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    return batch


def read_lines(client: openai.OpenAI, identifier: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.files.content(identifier).text.splitlines()]


def test_file_can_be_read_and_deleted(client: openai.OpenAI, stranger: openai.OpenAI) -> None:
    content = bytes(range(256)) * 20_000
    file = client.files.create(
        file=("a b.bin", content),
        purpose="user_data",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert (file.bytes, file.filename, file.purpose) == (len(content), "a b.bin", "user_data")
    assert file.expires_at == file.created_at + 3600
    assert client.files.content(file.id).content == content
    assert client.files.retrieve(file.id) == file
    assert file.id in [each.id for each in client.files.list(purpose="user_data")]
    assert file.id not in [each.id for each in client.files.list(purpose="batch")]
    assert not stranger.files.list().data
    for call in (stranger.files.retrieve, stranger.files.content, stranger.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)


def test_file_errors_name_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="purpose must be one of") as caught:
        client.files.create(file=b"x", purpose="nothing")  # type: ignore[arg-type]
    assert caught.value.param == "purpose"
    with pytest.raises(openai.BadRequestError, match="between 3600 and"):
        client.files.create(
            file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 1}
        )


def test_file_can_be_sent_in_parts(client: openai.OpenAI, stranger: openai.OpenAI) -> None:
    content = bytes(range(256)) * 20_000
    done = client.uploads.upload_file_chunked(
        file=content,
        filename="a.bin",
        bytes=len(content),
        mime_type="application/octet-stream",
        purpose="user_data",
        part_size=1_500_000,
        md5=hashlib.md5(content, usedforsecurity=False).hexdigest(),
    )
    assert (done.status, done.filename, done.bytes) == ("completed", "a.bin", len(content))
    assert done.file == client.files.retrieve(done.file.id)
    assert client.files.content(done.file.id).content == content
    for call in (client.uploads.cancel, stranger.uploads.cancel):
        with pytest.raises(openai.APIStatusError, match=r"is completed|was not found"):
            call(done.id)


def test_parts_of_an_upload_have_the_stated_size_and_order(client: openai.OpenAI) -> None:
    upload = client.uploads.create(
        bytes=5, filename="b.txt", mime_type="text/plain", purpose="user_data"
    )
    late, early = (client.uploads.parts.create(upload.id, data=data) for data in (b"rld", b"wo"))
    other = client.uploads.create(
        bytes=5, filename="c.txt", mime_type="text/plain", purpose="user_data"
    )
    for changes, problem in (
        ({"part_ids": [late.id]}, "have 3 bytes, but the upload has 5"),
        ({"part_ids": []}, "must have 1 to 1000 entries"),
        ({"part_ids": [early.id, late.id], "md5": "0" * 32}, "md5 must be"),
        ({"part_ids": [early.id, late.id], "upload_id": other.id}, "parts of this upload"),
        ({"part_ids": ["part_x"]}, "part_x"),
    ):
        with pytest.raises(openai.APIStatusError, match=problem):
            client.uploads.complete(**({"upload_id": upload.id} | changes))
    done = client.uploads.complete(upload.id, part_ids=[early.id, late.id])
    assert client.files.content(done.file.id).content == b"world"
    assert client.uploads.cancel(other.id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="is cancelled"):
        client.uploads.parts.create(other.id, data=b"x")


@pytest.mark.timeout(60)
def test_batch_answers_every_request(client: openai.OpenAI, stranger: openai.OpenAI) -> None:
    lines = [chat(i, f"word {i}", max_tokens=4) for i in range(20)]
    lines[7]["body"]["top_p"] = 9
    batch = start(client, lines, metadata={"a": "b"})
    assert batch.status == "validating" and batch.metadata == {"a": "b"}
    done = wait_for(client, batch)
    assert done.status == "completed"
    counts = done.request_counts
    assert (counts.total, counts.completed, counts.failed) == (20, 19, 1)
    output = read_lines(client, done.output_file_id)
    assert [line["custom_id"] for line in output] == [f"request-{i}" for i in range(20) if i != 7]
    assert all(line["error"] is None for line in output)
    for line in output:
        number = line["custom_id"].removeprefix("request-")
        answer = line["response"]
        assert answer["status_code"] == 200 and answer["request_id"]
        text = answer["body"]["choices"][0]["message"]["content"]
        assert text.startswith(f"word {number}")
    [error] = read_lines(client, done.error_file_id)
    assert error["custom_id"] == "request-7" and error["response"]["status_code"] == 400
    assert error["response"]["body"]["error"]["param"] == "top_p"
    assert batch.id in [each.id for each in client.batches.list()]
    assert not stranger.batches.list().data
    for call in (stranger.batches.retrieve, stranger.batches.cancel):
        with pytest.raises(openai.NotFoundError):
            call(batch.id)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 1}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 1}),
        ("/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    ],
)
def test_batch_accepts_each_supported_endpoint(
    client: openai.OpenAI, endpoint: str, body: Any
) -> None:
    line = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": MODEL, **body}}
    done = wait_for(client, start(client, [line], endpoint=endpoint))
    [answer] = read_lines(client, done.output_file_id)
    assert "Hello" in json.dumps(answer["response"]["body"])
    assert done.error_file_id is None


@pytest.mark.timeout(60)
def test_batch_with_invalid_lines_fails(client: openai.OpenAI) -> None:
    lines = [chat(1, "a"), chat(1, "b"), chat(2, "c", stream=True), chat(3, "d") | {"url": "/v1/x"}]
    done = wait_for(client, start(client, lines))
    assert done.status == "failed"
    assert [(e.line, e.param) for e in done.errors.data] == [
        (2, "custom_id"),
        (3, "body.stream"),
        (4, "url"),
    ]
    with pytest.raises(openai.BadRequestError, match="endpoint must be one of"):
        start(client, lines, endpoint="/v1/moderations")
    with pytest.raises(openai.NotFoundError) as caught:
        client.batches.create(
            input_file_id="file-x", endpoint="/v1/completions", completion_window="24h"
        )
    assert caught.value.param == "input_file_id"


@pytest.mark.timeout(60)
def test_cancelled_batch_keeps_completed_answers(client: openai.OpenAI) -> None:
    lines = [chat(0, "first", max_tokens=1)]
    lines += [chat(i, "word " * 20, max_tokens=450, ignore_eos=True) for i in range(1, 1000)]
    batch = wait_for(client, start(client, lines), "in_progress")
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = wait_for(client, batch)
    assert done.status == "cancelled" and done.request_counts.completed < 1000
    assert done.cancelled_at


@pytest.mark.timeout(120)
def test_batch_continues_after_the_death_of_all_processes(tmp_path: Path) -> None:
    store = StoreConfig(path=str(tmp_path / "store.sqlite"))
    lines = [chat(i, f"word {i}", max_tokens=4) for i in range(300)]
    with FrontendProcess(step_s=0.02, store=store) as frontend, frontend.client() as client:
        batch = start(client, lines)
        deadline = time.monotonic() + WAIT_S
        while not client.batches.retrieve(batch.id).request_counts.completed:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        frontend.process.kill()
    with FrontendProcess(store=store) as frontend, frontend.client() as client:
        done = wait_for(client, batch)
        assert done.status == "completed" and done.request_counts.completed == 300
        output = read_lines(client, done.output_file_id)
        assert [line["custom_id"] for line in output] == [f"request-{i}" for i in range(300)]
