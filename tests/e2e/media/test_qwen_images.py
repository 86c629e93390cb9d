"""A server of Qwen-VL models, which read images of any size."""

from __future__ import annotations

import base64
import concurrent.futures
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from engine.core.replay.__main__ import main as replay
from engine.frontend.offline.llm import LLM
from engine.protocol.errors import ParameterError
from engine.protocol.sampling_params import SamplingParams
from PIL import Image
from support.media.image_requests import NUM_TOKENS, ask_together, chat, data_url, picture
from support.media.video_files import write_video
from support.mmproj.grid import write_grid_decoder, write_grid_tower
from support.mmproj.qwen import write_decoder, write_tower
from support.servers.server import DEVICE, Server, assert_nothing_is_held
from support.vision.qwen import (
    END,
    IMAGE,
    START,
    UNIT,
    VIDEO,
    qwen_directory,
    qwen_image_processor,
    rotary_positions,
    video_patches,
)

torch.set_num_threads(1)
MP4 = "mp4", "libx264", 45, (24, 40)
FLAGS = ("--dtype", "float32", "--device", DEVICE, "--served-model-name", "tiny")
pytestmark = pytest.mark.sampled


class Clip(NamedTuple):
    """A video as frames of 24 x 40 pixels."""

    seed: int
    num_frames: int

    @property
    def frames(self) -> list[Image.Image]:
        return [picture(self.seed + number, 24, 40) for number in range(self.num_frames)]

    @property
    def part(self) -> dict[str, Any]:
        return {"type": "video", "video": [data_url(frame) for frame in self.frames], "fps": 1.0}


Part = str | Image.Image | Clip

POISON = "zephyr"
"""A word whose first token crashes the worker of `server`."""

CHATS: list[tuple[Part, ...]] = [
    ("the quick", picture(1, 100, 70), "brown fox", picture(2, 20, 33), "jumps"),
    ("the quick", picture(1, 100, 70), "brown fox", picture(3, 20, 33), "jumps"),
    (picture(4, 41, 90), "over the lazy dog"),
    ("seven wizards", picture(5, 64, 64), picture(5, 64, 64)),
    ("brew tea",),
    (picture(4, 41, 90), "before", Clip(30, 5), "and behind", picture(5, 64, 64)),
]


def ask(*parts: Part) -> dict[str, Any]:
    """Return a request for the greedy answer to texts, images and videos."""
    return chat(*(part.part if isinstance(part, Clip) else part for part in parts))


class Model:
    """A checkpoint, and transformers' greedy answers to the prompts that the server made."""

    def __init__(self, directory: Path, kind: str) -> None:
        self.path, self.model = qwen_directory(directory, kind)
        self._answers: dict[int, list[int]] = {}

    def check(self, index: int, answer: dict[str, Any]) -> None:
        """Compare the server's answer to `CHATS[index]` with that of transformers."""
        if index not in self._answers:
            self._answers[index] = self._generate(CHATS[index], answer["prompt_token_ids"])
        assert answer["choices"][0]["token_ids"] == self._answers[index], CHATS[index]

    @torch.inference_mode()
    def _generate(self, parts: tuple[Part, ...], prompt: list[int]) -> list[int]:
        images = [part for part in parts if isinstance(part, Image.Image)]
        inputs: dict[str, Any] = {}
        grids = []
        if images:
            inputs = dict(qwen_image_processor(self.path)(images, return_tensors="pt"))
            # Rows of Hy4-VL end with one more embedding.
            added = int(self.model.config.model_type == "hy_v4_vl")
            grids = [
                (1, rows // 2, columns // 2 + added)
                for _, rows, columns in inputs["image_grid_thw"]
            ]
        clip = next((part for part in parts if isinstance(part, Clip)), None)
        if clip is not None and self.model.config.model_type == "hy_v4_vl":
            frames = [frame.resize((16, 32)) for frame in clip.frames]
            processed = qwen_image_processor(self.path)(frames, return_tensors="pt")
            inputs["pixel_values_videos"] = processed["pixel_values"]
            inputs["video_grid_thw"] = torch.tensor([[len(frames), 8, 4]])
            grids[1:1] = [(1, 4, 3)] * len(frames)
        elif clip is not None:
            mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
            inputs["pixel_values_videos"] = video_patches(clip.frames, mean, std)
            inputs["video_grid_thw"] = torch.tensor([[3, 10, 6]])
            is_joined = self.model.config.model_type in ("qwen2_vl", "qwen2_5_vl")
            grids[1:1] = [(3, 5, 3)] if is_joined else [(1, 5, 3)] * 3
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            if self.model.config.model_type == "lfm3_vl":
                # Its decoder has one position a token.
                pass
            elif clip is not None:
                inputs["position_ids"] = rotary_positions(self.model.config, tokens, grids)
            elif images:
                is_image = np.array(tokens) == self.model.config.image_token_id
                inputs["mm_token_type_ids"] = torch.from_numpy(is_image.astype(np.int32))[None]
            if self.model.config.model_type == "ernie4_5_vl_moe":
                names = ("image_token_id", "image_start_token_id", "image_end_token_id")
                has_own = np.isin(tokens, [getattr(self.model.config, name) for name in names])
                inputs["moe_mm_token_type_ids"] = torch.from_numpy(has_own.astype(np.int32))[None]
            logits = self.model(input_ids=torch.tensor([tokens]), use_cache=False, **inputs).logits
            tokens.append(int(logits[0, -1].argmax()))
        return tokens[len(prompt) :]

    def check_all(self, server: Server, indices: list[int]) -> None:
        """Send conversations at the same time, and compare all answers."""
        answers = ask_together(server, [ask(*CHATS[index]) for index in indices])
        for index, answer in zip(indices, answers, strict=True):
            self.check(index, answer)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("qwen3"), "qwen3_vl")


@pytest.fixture(scope="module")
def server(qwen3: Model) -> Iterator[Server]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(qwen3.path)
    crash = tokenizer(POISON, add_special_tokens=False).input_ids[0]
    flags = ("--enable-mm-embeds", "--inject-crash", str(crash))
    flags += ("--allowed-local-media-path", str(qwen3.path))
    with Server(str(qwen3.path), *FLAGS, *flags) as server:
        yield server


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5", "qwen3_5_moe"])
def test_gguf_models_read_images_with_the_mmproj_file_beside_them(
    tmp_path: Path, qwen3: Model, kind: str
) -> None:
    model = qwen3 if kind == "qwen3_vl" else Model(tmp_path / "model", kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.path)
    path = write_decoder(tmp_path / "tiny.gguf", model.model, tokenizer)
    write_tower(tmp_path / "mmproj-tiny.gguf", model.model, model.path)
    with Server(str(path), *FLAGS) as server:
        model.check_all(server, [0, 2, 3, 4])


@pytest.mark.parametrize("kind", ["glm4v", "glm4v_moe", "glm_ocr", "paddleocr_vl"])
def test_gguf_models_of_other_families_read_images(tmp_path: Path, kind: str) -> None:
    model = Model(tmp_path / "model", kind)
    tower = write_grid_tower(tmp_path / "mmproj-tiny.gguf", model.path, kind)
    mark = "<|IMAGE_PLACEHOLDER|>" if kind == "paddleocr_vl" else "<|image|>"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        file = model.path / name
        file.write_text(file.read_text().replace(IMAGE, mark))
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.path)
    path = write_grid_decoder(tmp_path / "tiny.gguf", model.model, kind, tokenizer)
    # The files of GLM do not have the limits of an image.
    fields = {"size": {"shortest_edge": 8 * UNIT**2, "longest_edge": 200 * UNIT**2}}
    limits = () if kind == "paddleocr_vl" else ("--mm-processor-kwargs", json.dumps(fields))
    with Server(str(path), *FLAGS, *limits) as server:
        model.check_all(server, [0, 2, 3, 4])
    tower.unlink()
    # Texts are rotated as in the file with images.
    with Server(str(path), *FLAGS) as server:
        model.check_all(server, [4])


def test_the_tower_is_not_loaded_for_text_alone(tmp_path: Path, qwen3: Model) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(qwen3.path)
    path = write_decoder(tmp_path / "tiny.gguf", qwen3.model, tokenizer)
    write_tower(tmp_path / "mmproj-tiny.gguf", qwen3.model, qwen3.path)
    for source in (qwen3.path, path):
        with Server(str(source), *FLAGS, "--language-model-only") as server:
            qwen3.check_all(server, [4])
            status, answer = server.post("/v1/chat/completions", ask(*CHATS[2]))
            assert status == 400 and "this model reads only text" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("qwen2_vl", ()),
        ("qwen2_5_vl", ("--cpu-backend", "torch", "-tp", "2")),
        ("qwen3_5", ("-tp", "2")),
        ("cosmos3_edge", ("-tp", "2")),
        ("lfm3_vl", ("-tp", "2")),
        ("hy_v4_vl", ("-tp", "2")),
        ("glm4v", ()),
        ("ernie4_5_vl_moe", ("-tp", "2", "-pp", "2", "--enable-expert-parallel")),
    ],
)
def test_answers_equal_those_of_transformers(
    tmp_path: Path, kind: str, flags: tuple[str, ...]
) -> None:
    model = Model(tmp_path, kind)
    with Server(str(model.path), *FLAGS, *flags) as server:
        reads_videos = kind.startswith(("qwen", "lfm", "hy"))
        model.check_all(server, [0, 1, 2, 3, 4, *[5] * reads_videos])
        assert_nothing_is_held(server)


def test_images_are_read_under_memory_pressure_and_crashes(qwen3: Model, tmp_path: Path) -> None:
    small = ("--max-num-batched-tokens", "40", "--max-num-seqs", "4", "--max-model-len", "256")
    # Two long prompts do not fit into the KV cache at once.
    memory = ("--num-gpu-blocks-override", "17", "--encoder-cache-size", "120")
    with Server(
        str(qwen3.path), *FLAGS, *small, *memory, "--dump-dir", str(tmp_path), "-pp", "2"
    ) as server:
        # The second stage reads outputs of the tower as well, which are added after its first layer.
        for _ in range(5):
            qwen3.check_all(server, [0, 1, 2, 3, 4, 5, 0, 1])
            # On a slow machine, the requests may arrive one after another.
            if server.metric("engine:num_preemptions_total") > 0:
                break
        else:
            raise AssertionError("no request was preempted")
        status, dumped = server.post("/debug/dump", {})
        assert status == 200
        assert replay(dumped["files"]) == 0
        for victim in ("worker 0", "core 0"):
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                answers = pool.submit(qwen3.check_all, server, [0, 2, 5, 4, 1])
                server.child(victim).kill()
                answers.result()
            server.wait_until_whole()
        assert_nothing_is_held(server)


def test_conversations_and_prompts_with_images_are_embedded(qwen3: Model, server: Server) -> None:
    @torch.inference_mode()
    def expected(images: list[Image.Image], prompt: list[int]) -> torch.Tensor:
        tokens = torch.tensor([prompt])
        inputs = dict(qwen_image_processor(qwen3.path)(images, return_tensors="pt"))
        inputs["mm_token_type_ids"] = (tokens == qwen3.model.config.image_token_id).int()
        hidden = qwen3.model.model(input_ids=tokens, use_cache=False, **inputs).last_hidden_state
        return torch.nn.functional.normalize(hidden[0, -1], dim=0)

    bodies = [ask(*parts) for parts in (CHATS[0], CHATS[2])]
    prompts = [server.post("/v1/chat/completions", body)[1]["prompt_token_ids"] for body in bodies]
    conversations = [body["messages"] for body in bodies]
    for messages in (conversations, conversations[0]):
        status, answer = server.post(
            "/v1/embeddings", {"messages": messages, "add_generation_prompt": True}
        )
        assert status == 200, answer
        pictures = ([picture(1, 100, 70), picture(2, 20, 33)], [picture(4, 41, 90)])
        for entry, images, prompt in zip(answer["data"], pictures, prompts, strict=False):
            np.testing.assert_allclose(entry["embedding"], expected(images, prompt), atol=1e-4)
        assert len(answer["data"]) == (2 if messages is conversations else 1)
    smaller = {"messages": conversations[0], "mm_processor_kwargs": {"max_pixels": 2000}}
    status, small = server.post("/v1/embeddings", smaller)
    assert status == 200 and small["usage"]["total_tokens"] < answer["usage"]["total_tokens"]
    for fields, words in (
        ({"input": "a"}, "messages must be omitted"),
        ({"truncate_prompt_tokens": 4}, "cannot be cut to 4"),
    ):
        status, answer = server.post("/v1/embeddings", {"messages": conversations[1]} | fields)
        assert status == 400 and words in answer["error"]["message"], answer
    with LLM(str(qwen3.path), dtype="float32") as llm:
        text = f"the quick {START}{IMAGE}{END} fox"
        data = {"prompt": text, "multi_modal_data": {"image": picture(4, 41, 90)}}
        [output] = llm.embed(data)
        wanted = expected([picture(4, 41, 90)], output.prompt_token_ids)
        np.testing.assert_allclose(output.outputs.embedding, wanted, atol=1e-4)
    assert_nothing_is_held(server)


def test_a_file_url_names_an_image_in_the_allowed_directory(qwen3: Model, server: Server) -> None:
    image = picture(4, 41, 90)
    image.save(qwen3.path / "a.png")
    expected = server.post("/v1/chat/completions", chat(image, "a"))[1]["choices"]
    for url, status in ((f"file://{qwen3.path}/a.png", 200), ("file:///etc/passwd", 400)):
        part = {"type": "image_url", "image_url": {"url": url}}
        found, answer = server.post("/v1/chat/completions", chat(part, "a"))
        assert found == status, answer
        if status == 200:
            assert answer["choices"] == expected
        else:
            assert "--allowed-local-media-path" in answer["error"]["message"]


def test_images_share_prefixes_and_bad_ones_are_refused(qwen3: Model, server: Server) -> None:
    def num_cached(*parts: Part) -> int:
        status, answer = server.post("/v1/chat/completions", ask(*parts))
        assert status == 200, answer
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    text = "the old tower " * 20
    first, second = picture(21, 64, 64), picture(22, 64, 64)
    assert num_cached(text, first, "fox") == 0
    assert num_cached(text, first, "dog") > num_cached(text, second, "dog") > 0
    # The tokens after a cached image have the same positions as without the cache.
    qwen3.check_all(server, [0])
    qwen3.check_all(server, [0, 1])
    status, answer = server.post("/v1/chat/completions", ask("a", picture(1, 2000, 8)))
    assert status == 400
    assert answer["error"]["param"] == "messages[0].content[1].image_url.url"
    assert "it has 2000 x 8 pixels, and one side may be at most 200" in answer["error"]["message"]
    animation = {"type": "video_url", "video_url": {"url": data_url(picture(1, 8, 8), "GIF")}}
    status, answer = server.post("/v1/chat/completions", chat("a", animation, animation))
    assert status == 200, answer
    status, answer = server.post("/v1/chat/completions", chat("a", *[animation] * 5))
    assert status == 400
    assert "have 5 videos, but at most 4 are allowed" in answer["error"]["message"]
    animation["video_url"]["url"] = "data:video/mp4;base64,AAAA"
    status, answer = server.post("/v1/chat/completions", chat("a", animation))
    assert status == 400
    assert answer["error"]["param"] == "messages[0].content[1].video_url.url"
    assert_nothing_is_held(server)


def test_a_request_with_an_image_that_crashes_the_worker_fails_alone(server: Server) -> None:
    images = [picture(seed, 40 + 4 * seed, 100) for seed in range(8)]

    def send(*parts: Part) -> tuple[int, Any]:
        return server.post("/v1/chat/completions", ask("the quick", *parts))

    undisturbed = [send(image, "brown fox") for image in images]
    assert {status for status, _ in undisturbed} == {200}
    with concurrent.futures.ThreadPoolExecutor(len(images) + 1) as pool:
        found = pool.submit(send, picture(50, 256, 60), POISON)
        answers = list(pool.map(send, images, ["brown fox"] * len(images)))
        status, answer = found.result()
    assert status == 500, answer
    assert "alone when another one crashed" in answer["error"]["message"]
    for (status, answer), (_, expected) in zip(answers, undisturbed, strict=True):
        assert status == 200, answer
        assert answer["choices"] == expected["choices"]
    assert server.log.count("was killed by SIGSEGV") == 2, server.log
    # It is refused from now on, without another crash.
    assert send(picture(50, 256, 60), POISON)[0] == 500
    assert server.log.count("was killed by SIGSEGV") == 2, server.log
    assert_nothing_is_held(server)


def test_frames_of_video_files_are_read(server: Server) -> None:
    url = f"data:video/mp4;base64,{base64.b64encode(write_video(*MP4)).decode()}"
    tokens = []
    for fields in ({}, {"num_frames": 5}, {"fps": 4}):
        part = {"type": "video_url", "video_url": {"url": url, **fields}}
        status, answer = server.post("/v1/chat/completions", chat("a", part))
        assert status == 200, answer
        tokens.append(answer["usage"]["prompt_tokens"])
    # 9, 5 and 18 frames, two of which are a grid after its time.
    assert tokens[1] < tokens[0] < tokens[2]
    for wrong, param, message in (
        ({"num_frames": 5, "fps": 1}, "num_frames", "must not be given with fps"),
        ({"num_frames": 0}, "num_frames", "must be 1 to 1024, got 0"),
        ({"url": url[:-400]}, "url", "is not a video that can be read"),
    ):
        part = {"type": "video_url", "video_url": {"url": url, **wrong}}
        status, answer = server.post("/v1/chat/completions", chat("a", part))
        assert status == 400, answer
        assert answer["error"]["param"] == f"messages[0].content[1].video_url.{param}"
        assert message in answer["error"]["message"]
    assert_nothing_is_held(server)


def test_requests_limit_the_pixels_of_images_and_videos(qwen3: Model, server: Server) -> None:
    image, clip = picture(7, 100, 70), Clip(30, 4).part
    url, token_id = data_url(image), qwen3.model.config.image_token_id

    def tokens(part: dict[str, Any], **fields: object) -> list[int]:
        status, answer = server.post("/v1/chat/completions", chat(part, "fox") | fields)
        assert status == 200, answer
        found: list[int] = answer["prompt_token_ids"]
        return found

    def count(part: dict[str, Any], **fields: object) -> int:
        given = [{"role": "user", "content": [part, {"type": "input_text", "text": "fox"}]}]
        status, answer = server.post("/v1/responses", {"model": "tiny", "input": given, **fields})
        assert status == 200, answer
        return int(answer["usage"]["input_tokens"])

    part = {"type": "image_url", "image_url": {"url": url}}
    limits, size = {"max_pixels": 2000}, {"size": {"shortest_edge": 256, "longest_edge": 2000}}
    patches = qwen_image_processor(qwen3.path)(image, **size)["image_grid_thw"][0]
    expected = tokens(part, mm_processor_kwargs=limits)
    assert expected.count(token_id) == patches.prod() // 4 < tokens(part).count(token_id)
    assert tokens(part | limits) == tokens(part, images_config=limits) == expected
    assert tokens(part, mm_processor_kwargs={"images_kwargs": size}) == expected
    few = tokens(clip, mm_processor_kwargs={"videos_kwargs": limits})
    assert few == tokens(clip | limits) == tokens(clip, video_config=limits)
    assert len(few) < len(tokens(clip))
    given = {"type": "input_image", "image_url": url}
    assert count(given, mm_processor_kwargs=limits) == count(given | limits) == len(expected)
    movie = f"data:video/mp4;base64,{base64.b64encode(write_video(*MP4)).decode()}"
    video, frames = {"type": "input_video", "video_url": movie}, {"num_frames": 5}
    assert count(video, media_io_kwargs={"video": frames}) == count(video | frames) < count(video)
    for wrong, message in (
        ({"min_pixels": 10**9}, "must be at most "),
        ({"max_pixels": True}, "must be an integer, got true"),
        ({"max_crops": 5}, "is no setting of this model's processor"),
    ):
        body = chat(part) | {"mm_processor_kwargs": wrong}
        status, answer = server.post("/v1/chat/completions", body)
        assert status == 400 and message in answer["error"]["message"], answer


def test_the_server_chooses_the_frames_of_requests_that_choose_none(qwen3: Model) -> None:
    url = f"data:video/mp4;base64,{base64.b64encode(write_video(*MP4)).decode()}"
    flags = ("--media-io-kwargs", '{"video": {"num_frames": 5, "fps": 0}, "image": {}}')

    def num_tokens(**fields: object) -> int:
        part = {"type": "video_url", "video_url": {"url": url, **fields}}
        status, answer = server.post("/v1/chat/completions", chat("a", part))
        assert status == 200, answer
        return int(answer["usage"]["prompt_tokens"])

    with Server(str(qwen3.path), *FLAGS, *flags) as server:
        assert num_tokens() == num_tokens(num_frames=5) < num_tokens(fps=4)


def test_embeddings_with_a_grid_take_the_place_of_an_image(qwen3: Model, server: Server) -> None:
    image = picture(6, 40, 72)
    inputs = qwen_image_processor(qwen3.path)(image, return_tensors="pt")
    patches = inputs["image_grid_thw"]
    with torch.inference_mode():
        found = qwen3.model.model.get_image_features(inputs["pixel_values"], patches)
    # The parts that are added after the decoder's first layers follow the embeddings.
    parts = [torch.cat(tuple(each)) for each in (found.pooler_output, *found.deepstack_features)]
    values = torch.cat(parts, 1)
    file = base64.b64encode(safetensors.torch.save({"embeddings": values.contiguous()})).decode()
    rows, columns = (patches[0, 1:] // 2).tolist()

    def ask_about(part: Image.Image | dict[str, Any]) -> tuple[int, Any]:
        return server.post("/v1/chat/completions", chat("a", part, "b"))

    def embedded(**fields: Any) -> dict[str, Any]:
        return {"type": "image_embeds", "image_embeds": {"image_embeds": file, **fields}}

    _, expected = ask_about(image)
    for fields in ({"grid": [rows, columns]}, {"image_grid_thw": patches.tolist()}):
        status, answer = ask_about(embedded(**fields))
        assert status == 200, answer
        assert answer["prompt_token_ids"] == expected["prompt_token_ids"]
        assert answer["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    # The same embeddings have other positions in another grid, so their prefix is another one.
    _, answer = ask_about(embedded(grid=[columns, rows]))
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    for fields, param, message in (
        ({}, "image_embeds", "needs the grid of its embeddings, [rows, columns]"),
        ({"grid": [rows, columns + 1]}, "image_embeds", "a grid of"),
        ({"grid": [0, 1]}, "grid", "must be [rows, columns], got [0,1]"),
        ({"image_grid_thw": [2, 4, 4]}, "image_grid_thw", "must be [1, rows, columns]"),
        ({"image_grid_thw": [1, 2, 3]}, "image_grid_thw", "which do not match"),
    ):
        status, answer = ask_about(embedded(**fields))
        assert status == 400, answer
        assert answer["error"]["param"] == f"messages[0].content[1].image_embeds.{param}"
        assert message in answer["error"]["message"]
    assert_nothing_is_held(server)


def test_offline_callers_pass_videos(qwen3: Model) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    clip, image = Clip(30, 5), picture(5, 64, 64)
    array = np.stack([np.asarray(frame) for frame in clip.frames])
    with LLM(str(qwen3.path), dtype="float32") as llm:
        conversations = [
            [{"role": "user", "content": [part, {"type": "image", "image": image}]}]
            for part in (clip.part, {"type": "video", "video": array, "fps": 1.0})
        ]
        first, second = llm.chat(conversations, params)
        frames = {"image": image, "video": clip.frames}
        text = f"user: {START}{VIDEO}{END}{START}{IMAGE}{END}\nassistant:"
        third = llm.generate({"prompt": text, "multi_modal_data": frames}, params)[0]
        assert first.prompt_token_ids == second.prompt_token_ids
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
        # The default is two frames per second.
        assert third.prompt is not None and "<0.2 seconds>" in third.prompt
        assert first.prompt is not None and "<0.5 seconds>" in first.prompt
        with pytest.raises(ParameterError, match="must have images or arrays, got 5"):
            llm.generate({"prompt": text, "multi_modal_data": {"image": 5}}, params)
