"""Prompts with images, videos and audio in the routes of SGLang and llama.cpp, whose texts mark their places."""

from __future__ import annotations

import base64
import concurrent.futures
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from engine.frontend.offline.llm import LLM
from engine.protocol.sampling_params import SamplingParams
from PIL import Image
from support.audio.checkpoints import audio_directory
from support.media.image_requests import NUM_TOKENS, chat, data_url, picture
from support.media.video_files import write_video
from support.servers.server import DEVICE, Server, assert_nothing_is_held
from support.vision.qwen import END, IMAGE, START

FLAGS = ("--dtype", "float32", "--device", DEVICE, "--served-model-name", "tiny")
MARKER = "<__media__>"
FIRST, SECOND = picture(1, 100, 70), picture(2, 64, 64)
pytestmark = pytest.mark.sampled


def sound(seed: int, seconds: float) -> bytes:
    samples = 0.3 * np.random.default_rng(seed).standard_normal(int(16_000 * seconds))
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format="WAV")
    return file.getvalue()


def movie() -> bytes:
    samples = np.random.default_rng(5).integers(-9000, 9000, 32_000, np.int16)
    return write_video("mp4", "mpeg4", 20, (64, 128), sound=samples)


def encoded(content: bytes | Image.Image) -> str:
    """Return a file in base64."""
    if isinstance(content, Image.Image):
        return data_url(content).partition(",")[2]
    return base64.b64encode(content).decode()


def part(kind: str, content: bytes) -> dict[str, Any]:
    url = f"data:{kind}/x;base64,{encoded(content)}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, _ = audio_directory(tmp_path_factory.mktemp("omni"), "qwen3_omni")
    FIRST.save(path / "first image.png")
    return path


@pytest.fixture(scope="module")
def server(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    limits = ("--limit-mm-per-prompt", '{"image": 3}', "--allowed-local-media-path", str(directory))
    store = ("--store", str(tmp_path_factory.mktemp("store") / "store.db"))
    with Server(str(directory), *FLAGS, *limits, *store) as server:
        yield server


def ask(server: Server, *parts: Any, **fields: Any) -> tuple[list[int], list[int]]:
    """Return the prompt and the answer of a chat."""
    status, answer = server.post("/v1/chat/completions", chat(*parts) | fields)
    assert status == 200, answer
    return answer["prompt_token_ids"], answer["choices"][0]["token_ids"]


def text_of(server: Server, *parts: Any) -> str:
    """Return the prompt of a chat with markers in place of its media."""
    texts = (each if isinstance(each, str) else MARKER for each in parts)
    status, answer = server.post("/apply-template", {"messages": chat(*texts)["messages"]})
    assert status == 200, answer
    return str(answer["prompt"])


def generate(server: Server, **fields: Any) -> Any:
    """Return the answer of SGLang's `/generate`."""
    greedy = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    body = {"sampling_params": greedy, "return_prompt_token_ids": True} | fields
    status, answer = server.post("/generate", body)
    assert status == 200, answer
    return answer


def found(answer: Any) -> tuple[list[int], list[int]]:
    """Return the prompt and the answer of SGLang's `/generate`."""
    return answer["prompt_token_ids"], answer["output_ids"]


def complete(server: Server, prompt: Any) -> Any:
    """Return the answer of llama.cpp's `/completion`."""
    greedy = {"temperature": 0, "n_predict": NUM_TOKENS, "ignore_eos": True, "return_tokens": True}
    status, answer = server.post("/completion", greedy | {"prompt": prompt})
    assert status == 200, answer
    return answer


def test_prompts_with_files_have_the_answers_of_chats(directory: Path, server: Server) -> None:
    clip, video = sound(3, 1.0), movie()
    parts = ("the quick", FIRST, "fox", part("audio", clip), part("video", video), "dog", SECOND)
    expected = ask(server, *parts)
    text = text_of(server, *parts)
    files = [encoded(each) for each in (FIRST, clip, video, SECOND)]
    answer = complete(server, {"prompt_string": text, "multimodal_data": files})
    assert (answer["tokens_evaluated"], answer["tokens"]) == (len(expected[0]), expected[1])
    body = {"prompt": ["brew tea", {"prompt_string": text, "multimodal_data": files}]}
    greedy = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    status, other = server.post("/v1/completions", greedy | body | {"return_token_ids": True})
    assert status == 200, other
    choice = other["choices"][1]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == expected
    others = complete(server, ["brew tea", {"prompt_string": text, "multimodal_data": files}])
    assert others[1]["tokens"] == expected[1]
    assert others[0]["tokens"] == complete(server, "brew tea")["tokens"]
    for place in ("<image>", "<audio>", "<video>", "<image>"):
        text = text.replace(MARKER, place, 1)
    own = f"{START}{IMAGE}{END}"
    media = {"audio_data": encoded(clip), "video_data": [part("video", video)["video_url"]["url"]]}
    path = str(directory / "first image.png")
    for first in (data_url(FIRST), encoded(FIRST), path, f"file://{path}".replace(" ", "%20")):
        answer = generate(server, text=text, image_data=[first, {"url": encoded(SECOND)}], **media)
        assert found(answer) == expected
    media["image_data"] = [data_url(FIRST), data_url(SECOND)]
    for changed in (text.replace("<image>", own), text.replace("<image>", own, 1)):
        assert found(generate(server, text=changed, **media)) == expected
    status, tokens = server.post("/tokenize", {"prompt": text.replace("<image>", own)})
    assert status == 200
    assert found(generate(server, input_ids=tokens["tokens"], **media)) == expected
    assert_nothing_is_held(server)


def test_each_prompt_of_a_list_has_its_files(server: Server) -> None:
    first, second = (ask(server, "the quick", each) for each in (FIRST, SECOND))
    plain, both = ask(server, "the quick"), ask(server, "the quick", FIRST, SECOND)
    text = text_of(server, "the quick", FIRST).replace(MARKER, "<image>")
    twice, none = text.replace("<image>", "<image>" * 2), text.replace("<image>", "")
    urls = [data_url(FIRST), data_url(SECOND)]
    for texts, images, expected in (
        ([text, text], urls, [first, second]),
        ([text, text], urls[0], [first, first]),
        ([text, none, twice], [urls[1:], None, urls], [second, plain, both]),
        ([twice, none], [urls, []], [both, plain]),
    ):
        answers = generate(server, text=texts, image_data=images)
        assert [found(answer) for answer in answers] == expected


def test_settings_of_images_and_sound_are_those_of_chats(server: Server) -> None:
    small = {"mm_processor_kwargs": {"max_pixels": 4096}}
    # Such a body is decoded in another process.
    large = picture(3, 900, 700)
    expected = ask(server, "the quick", large, **small)
    assert len(expected[0]) < 100
    text = text_of(server, "the quick", FIRST).replace(MARKER, "<image>")
    for fields in (small, {"images_config": {"max_pixels": 4096}}):
        answer = generate(server, text=text, image_data=data_url(large), **fields)
        assert found(answer) == expected
    video = movie()
    expected = ask(server, "the quick", part("video", video), use_audio_in_video=True)
    text = text.replace("<image>", "<video>")
    media = {"video_data": encoded(video), "use_audio_in_video": True}
    assert found(generate(server, text=text, **media)) == expected


def test_prompts_with_equal_images_share_their_prefix(server: Server) -> None:
    text = text_of(server, "the old tower " * 9, FIRST, "fox").replace(MARKER, "<image>")

    def num_cached(image: Image.Image) -> int:
        answer = generate(server, text=text, image_data=data_url(image))
        return int(answer["meta_info"]["cached_tokens"])

    image, other = picture(21, 64, 64), picture(22, 64, 64)
    assert num_cached(image) == 0
    assert num_cached(image) > num_cached(other) > 0


@pytest.mark.parametrize(
    ("path", "body", "param", "problem"),
    [
        (
            "/completion",
            {"prompt": {"prompt_string": MARKER * 2, "multimodal_data": ["aGk="]}},
            "prompt.multimodal_data",
            "it has 1, and there are 2 markers",
        ),
        (
            "/completion",
            {"prompt": ["a", {"prompt_string": MARKER, "multimodal_data": ["aGk="]}]},
            "prompt[1].multimodal_data[0]",
            "is not an image that can be read",
        ),
        (
            "/completion",
            {"prompt": {"prompt_string": MARKER, "multimodal_data": [3]}},
            "prompt.multimodal_data[0]",
            "must be a file in base64",
        ),
        (
            "/generate",
            {"text": "<image>" * 4, "image_data": [data_url(SECOND)] * 4},
            "image_data",
            "at most 3 are allowed (--limit-mm-per-prompt)",
        ),
        (
            "/generate",
            {"text": "<image>" * 2, "image_data": data_url(SECOND)},
            "text",
            "have 1 file, but the prompt has 2 markers <image>",
        ),
        ("/generate", {"text": "a", "image_data": [data_url(SECOND)]}, "text", "0 image tokens"),
        (
            "/generate",
            {"text": ["a", "b"], "image_data": [data_url(SECOND)]},
            "image_data",
            "must have one value for each of the 2 prompts, got 1",
        ),
        (
            "/generate",
            {"text": ["a", "<image>"], "image_data": [None, "https://127.0.0.1/x.png"]},
            "image_data[1]",
            "must be a data URL",
        ),
        (
            "/generate",
            {"text": "<image>", "image_data": "/etc/host.conf"},
            "image_data",
            "must name a file in the directory of --allowed-local-media-path",
        ),
        (
            "/generate",
            {"text": "<audio>", "audio_data": [{"url": "?"}]},
            "audio_data[0].url",
            "is not valid base64",
        ),
        (
            "/generate",
            {"text": "<image>", "image_data": data_url(SECOND), "max_dynamic_patch": 2},
            "max_dynamic_patch",
            "",
        ),
    ],
)
def test_errors_name_the_field(
    server: Server, path: str, body: dict[str, Any], param: str, problem: str
) -> None:
    status, answer = server.post(path, body)
    assert status == 400, answer
    assert answer["error"]["param"] == param, answer
    assert problem in answer["error"]["message"]


def test_prompts_with_images_survive_crashes(server: Server) -> None:
    prompts = [text_of(server, "the quick", picture(seed, 64, 64)) for seed in range(3)]
    files = [encoded(picture(seed, 64, 64)) for seed in range(30, 33)]
    given = [
        {"prompt_string": prompt, "multimodal_data": [file]}
        for prompt, file in zip(prompts, files, strict=True)
    ]
    expected = [complete(server, each)["tokens"] for each in given]
    for victim in ("worker 0", "core 0"):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answers = pool.submit(complete, server, given)
            server.child(victim).kill()
        server.wait_until_whole()
        assert [answer["tokens"] for answer in answers.result()] == expected
    assert_nothing_is_held(server)


def test_a_recorded_prompt_is_prepared_again(server: Server) -> None:
    greedy = {"temperature": 0, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    body = {"text": "fox <image>", "image_data": data_url(FIRST), "sampling_params": greedy}
    key = {"idempotency-key": "one"}
    status, first = server.post("/generate", body, headers=key)
    assert status == 200, first
    server.child("frontend 0").kill()
    server.wait_until_whole()
    status, again = server.post("/generate", body, headers=key)
    assert status == 200, again
    assert again["meta_info"]["id"] == first["meta_info"]["id"]
    assert again["output_ids"] == first["output_ids"]


def test_offline_prompts_have_the_same_answers(directory: Path, server: Server) -> None:
    text = text_of(server, "the quick", FIRST, "fox")
    tokens = complete(server, {"prompt_string": text, "multimodal_data": [encoded(FIRST)]})
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompt = text.replace(MARKER, f"{START}{IMAGE}{END}")
    with LLM(str(directory), dtype="float32", device=DEVICE) as llm:
        [output] = llm.generate({"prompt": prompt, "multi_modal_data": {"image": FIRST}}, params)
    assert output.outputs[0].token_ids == tokens["tokens"]
