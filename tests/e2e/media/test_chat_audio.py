"""A server of models that read audio."""

from __future__ import annotations

import base64
import concurrent.futures
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import transformers
from engine.core.replay.__main__ import main as replay
from engine.frontend.offline.llm import LLM
from engine.protocol.encoder_inputs.payloads import ImagePayload
from engine.protocol.errors import ParameterError
from engine.protocol.sampling_params import SamplingParams
from PIL import Image
from safetensors.torch import load_file, save_file
from support.audio.checkpoints import MARKS, OMNI_MODELS, audio_directory, reference_inputs
from support.gguf.gemma import write_gemma
from support.gguf.hybrid import write_hybrid
from support.gguf.saved import write_saved
from support.gguf.writer import write_gguf
from support.media.image_marks import GEMMA_MARKS
from support.media.image_processors import image_processor
from support.media.image_requests import data_url
from support.mmproj.audio import write_audio_mmproj
from support.mmproj.kinds import write_mmproj_of_kind
from support.mmproj.qwen import write_decoder, write_tower
from support.mmproj.writer import write_mmproj
from support.servers.server import DEVICE, Server, assert_nothing_is_held
from support.vision.grid_models import reference_inputs as grid_inputs
from support.vision.qwen import qwen_image_processor, video_patches

torch.set_num_threads(1)
FLAGS = ("--dtype", "float32", "--device", DEVICE, "--served-model-name", "tiny")
NUM_TOKENS = 8
MIXED_MODELS = ("dots3_note", "gemma4", "gemma4_unified", "nemotron_h_omni", *OMNI_MODELS)
pytestmark = pytest.mark.sampled


def clip(seed: int, seconds: float) -> np.ndarray:
    random = np.random.default_rng(seed)
    samples = 0.3 * random.standard_normal(int(16_000 * seconds))
    return (samples.clip(-1, 1) * 32767).astype(np.int16)


def encoded(samples: np.ndarray, file_format: str = "WAV") -> str:
    file = io.BytesIO()
    soundfile.write(file, samples, 16_000, format=file_format)
    return base64.b64encode(file.getvalue()).decode()


def picture(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def chat(*parts: Any, kind: str = "input_audio") -> dict[str, Any]:
    """Return a request for the greedy answer to texts, images and audio clips."""
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            content.append({"type": "text", "text": part})
        elif isinstance(part, list):
            frames = [data_url(frame) for frame in part]
            content.append({"type": "video", "video": frames, "fps": 4.0})
        elif isinstance(part, Image.Image):
            content.append({"type": "image_url", "image_url": {"url": data_url(part)}})
        elif kind == "input_audio":
            value = {"data": encoded(part), "format": "wav"}
            content.append({"type": "input_audio", "input_audio": value})
        else:
            url = f"data:audio/flac;base64,{encoded(part, 'FLAC')}"
            content.append({"type": "audio_url", "audio_url": {"url": url}})
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


CHATS = [
    ("the quick", clip(1, 0.7), "brown fox", clip(2, 1.99), "jumps"),
    (clip(3, 1.0), "over the lazy dog"),
    ("seven wizards", clip(3, 1.0), clip(3, 1.0)),
    ("brew tea",),
]
MIXED_CHATS = [
    ("the quick", picture(48, 32), "brown fox", clip(2, 1.99), "jumps", picture(80, 64)),
    (clip(3, 1.0), clip(4, 0.5), "over", picture(48, 32)),
    ("seven wizards", clip(3, 1.0)),
    (picture(48, 32), "brew tea"),
]
HALF = (0.5, 0.5, 0.5)
FRAMES = [picture(256, 128).crop((64 * i, 0, 64 * i + 64, 128)) for i in range(4)]
"""A video for Qwen-Omni, which needs no resizing."""


class Model:
    """A checkpoint, and transformers' greedy answers to the prompts that the server made."""

    def __init__(self, directory: Path, kind: str) -> None:
        self.kind, self.is_omni = kind, kind in OMNI_MODELS
        self.chats: list[Any] = MIXED_CHATS if kind in MIXED_MODELS else CHATS
        if self.is_omni:
            self.chats = [*MIXED_CHATS, (clip(3, 1.0), FRAMES, "over", picture(48, 32))]
        self.path, self.model = audio_directory(directory, kind)
        self._answers: dict[int, list[int]] = {}

    def check(self, index: int, answer: dict[str, Any]) -> None:
        if index not in self._answers:
            self._answers[index] = self.generate(self.chats[index], answer["prompt_token_ids"])
        assert answer["choices"][0]["token_ids"] == self._answers[index], self.chats[index]

    @torch.inference_mode()
    def generate(self, parts: Any, prompt: list[int]) -> list[int]:
        clips = [part / np.float32(32768) for part in parts if isinstance(part, np.ndarray)]
        inputs = reference_inputs(self.kind, clips) if clips else {}
        images = [part for part in parts if isinstance(part, Image.Image)]
        if images and self.kind in ("dots3_note", "nemotron_h_omni"):
            # Their sizes are valid as they are.
            payloads = [ImagePayload(*x.size, x.tobytes(), 1, HALF, HALF) for x in images]
            inputs |= grid_inputs(self.kind, payloads)
        elif images:
            process = (
                qwen_image_processor(self.path)
                if self.is_omni
                else image_processor(self.path, self.kind)
            )
            found = process(images, return_tensors="pt")
            names = ("pixel_values", "image_position_ids", "image_grid_thw")
            inputs |= {name: found[name] for name in names if name in found}
        if videos := [part for part in parts if isinstance(part, list)]:
            inputs["pixel_values_videos"] = video_patches(*videos, [0.5] * 3, [0.5] * 3)
            inputs["video_grid_thw"] = torch.tensor([[2, 32, 16]])
            inputs["video_second_per_grid"] = torch.tensor([0.5])
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            ids = torch.tensor([tokens])
            if self.kind == "gemma4_unified":
                inputs["mm_token_type_ids"] = (ids == self.model.config.image_token_id).long()
            if self.is_omni:
                # Without a mask, transformers places images like text.
                inputs["attention_mask"] = torch.ones_like(ids)
            logits = self.model(input_ids=ids, **inputs).logits[0, -1]
            tokens.append(int(logits.argmax()))
        return tokens[len(prompt) :]

    def check_all(self, server: Server, indices: list[int]) -> None:
        """Send conversations at the same time, and compare all answers."""

        def ask(index: int) -> None:
            kind = "input_audio" if index % 2 else "audio_url"
            body = chat(*self.chats[index], kind=kind)
            status, answer = server.post("/v1/chat/completions", body)
            assert status == 200, answer
            self.check(index, answer)

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(ask, indices))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("model"), "qwen2_audio")


@pytest.fixture(scope="module")
def server(model: Model) -> Iterator[Server]:
    with Server(str(model.path), *FLAGS, "--limit-mm-per-prompt", '{"audio": 2}') as server:
        yield server


def test_answers_equal_those_of_transformers(model: Model, server: Server) -> None:
    model.check_all(server, [0, 1, 2, 3])
    assert_nothing_is_held(server)


@pytest.mark.parametrize(
    "kind",
    ["voxtral", "voxtral mistral", "funaudiochat add", "meralion2", "midashenglm", "moss_audio"],
)
def test_tensor_parallel_models_hear_under_memory_pressure_and_crashes(
    tmp_path: Path, kind: str
) -> None:
    model = Model(tmp_path, kind)
    small = ("--max-num-batched-tokens", "20", "--max-num-seqs", "4", "--max-model-len", "200")
    blocks = ("--num-gpu-blocks-override", "16", "--encoder-cache-size", "60")
    dumps = ("--dump-dir", str(tmp_path / "dumps"))
    with Server(str(model.path), *FLAGS, *small, *blocks, *dumps, "-tp", "2") as server:
        model.check_all(server, [0, 1, 2, 3, 0])
        status, dumped = server.post("/debug/dump", {})
        assert status == 200
        assert replay(dumped["files"]) == 0
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answers = pool.submit(model.check_all, server, [0, 2, 3, 1])
            server.child("worker 0").kill()
            answers.result()
        server.wait_until_whole()
        assert_nothing_is_held(server)


@pytest.mark.parametrize("kind", MIXED_MODELS)
def test_images_and_audio_are_read_together_across_a_crash(tmp_path: Path, kind: str) -> None:
    model = Model(tmp_path, kind)
    # The tokens of an image that see each other are computed in one step.
    step = "80" if kind == "gemma4_unified" else "32"
    small = ("--max-num-batched-tokens", step, "--max-num-seqs", "4", "--max-model-len", "512")
    with Server(str(model.path), *FLAGS, *small, "-tp", "2") as server:
        model.check_all(server, [0, 1, 2, 3, 0, *[4] * model.is_omni])
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answers = pool.submit(model.check_all, server, [0, 1, 3, 2])
            server.child("worker 0").kill()
            answers.result()
        server.wait_until_whole()
        assert_nothing_is_held(server)


def _with_gemma4_marks(directory: Path) -> Any:
    """Return the tokenizer of a directory with the tokens of images that Gemma 4 has."""
    marks = dict(zip(GEMMA_MARKS.values(), ("<|image>", "<image|>", "<|image|>"), strict=True))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        text = (directory / name).read_text()
        for mark, other in marks.items():
            text = text.replace(mark, other)
        (directory / name).write_text(text)
    return transformers.AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize(
    "kind", ["dots3_note", "gemma4", "glmasr", "lfm2_audio", "ultravox", "voxtral", *OMNI_MODELS]
)
def test_gguf_models_read_audio_with_the_mmproj_file_beside_them(tmp_path: Path, kind: str) -> None:
    model = Model(tmp_path / "model", kind)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.path)
    path, images = tmp_path / "tiny.gguf", None
    if model.is_omni:
        write_decoder(path, model.model, tokenizer)
        images = write_tower(tmp_path / "images", model.model, model.path)
    elif kind == "dots3_note":
        decoder = transformers.Dots3NoteForCausalLM(model.model.config.text_config)
        decoder.model.load_state_dict(model.model.model.language_model.state_dict())
        decoder.lm_head = model.model.lm_head
        decoder.save_pretrained(tmp_path / "decoder")
        path = write_saved(tmp_path / "decoder", "dots3note", tokenizer).rename(path)
        images = write_mmproj_of_kind(tmp_path / "images", model.path, kind)
    elif kind == "gemma4":
        decoder = transformers.Gemma4ForCausalLM(model.model.config.text_config)
        decoder.model.load_state_dict(model.model.model.language_model.state_dict())
        # The files of this family have one matrix of embeddings.
        model.model.lm_head.weight = model.model.get_input_embeddings().weight
        write_gemma(path, decoder, _with_gemma4_marks(model.path))
        images = write_mmproj(tmp_path / "images", model.model, kind)
    elif kind == "ultravox":
        write_gguf(path, model.model.language_model, tokenizer)
    elif kind == "lfm2_audio":
        write_hybrid(path, model.model.lfm, tokenizer)
    else:
        # It shows no parts of messages, so the server adds the token before a clip.
        tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
        decoder = transformers.LlamaForCausalLM(model.model.config.text_config)
        decoder.model.load_state_dict(model.model.model.language_model.state_dict())
        decoder.lm_head = model.model.lm_head
        write_gguf(path, decoder, tokenizer)
    write_audio_mmproj(tmp_path / "mmproj-tiny.gguf", model.model, kind, images)
    # The file does not say how large an image of this model may be.
    limit = ("--mm-processor-kwargs", '{"max_soft_tokens": 70}') if kind == "gemma4" else ()
    with Server(str(path), *FLAGS, *limit) as server:
        model.check_all(server, [0, 1, 2, 3])
        if kind == "voxtral":
            _, answer = server.post("/v1/chat/completions", chat("the", clip(1, 0.7)))
            begin = tokenizer.convert_tokens_to_ids("[BEGIN_AUDIO]")
            assert answer["prompt_token_ids"].count(begin) == 1
    with Server(str(path), *FLAGS, "--mmproj", "none") as server:
        status, answer = server.post("/v1/chat/completions", chat(*model.chats[1]))
        assert status == 400
        assert "reads only text" in answer["error"]["message"]


@pytest.mark.parametrize("is_gguf", [False, True])
def test_the_decoder_of_ultravox_may_be_another_model(tmp_path: Path, is_gguf: bool) -> None:
    model = Model(tmp_path / "model", "ultravox")
    decoder = tmp_path / "decoder"
    if is_gguf:
        tokenizer = transformers.AutoTokenizer.from_pretrained(model.path)
        decoder.mkdir()
        decoder = write_gguf(decoder / "tiny.gguf", model.model.language_model, tokenizer)
    else:
        model.model.language_model.save_pretrained(decoder)
    config = json.loads((model.path / "config.json").read_text())
    del config["text_config"]
    config["text_model_id"] = str(decoder)
    (model.path / "config.json").write_text(json.dumps(config))
    file = model.path / "model.safetensors"
    tensors = load_file(file)
    save_file({name: x for name, x in tensors.items() if "language_model" not in name}, file)
    with Server(str(model.path), *FLAGS) as server:
        model.check_all(server, [0, 1, 2, 3])
    with Server(str(model.path), *FLAGS, "--language-model-only") as server:
        model.check_all(server, [3])


def test_a_prefix_with_the_same_audio_is_cached(server: Server) -> None:
    _assert_audio_is_cached(server)


def test_a_prefix_with_the_same_audio_of_meralion_2_is_cached(tmp_path: Path) -> None:
    model = Model(tmp_path, "meralion2")
    with Server(str(model.path), *FLAGS) as server:
        _assert_audio_is_cached(server)
        # Its answers are the same with blocks of the cache.
        model.check_all(server, [0, 1, 2, 3])
        model.check_all(server, [3, 2, 1, 0])


def _assert_audio_is_cached(server: Server) -> None:
    def num_cached(*parts: str | np.ndarray) -> int:
        status, answer = server.post("/v1/chat/completions", chat(*parts))
        assert status == 200, answer
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    text = "the old tower " * 20
    first, second = clip(21, 1.5), clip(22, 1.5)
    assert num_cached(text, first, "fox") == 0
    assert num_cached(text, first, "dog") > num_cached(text, second, "dog") > 0


@pytest.mark.parametrize(
    ("kind", "empty"),
    [
        ("input_audio", None),
        ("input_audio", {"data": "", "format": "wav"}),
        ("audio_url", {"url": None}),
        ("audio_url", ...),
    ],
)
def test_clips_are_referred_to_by_uuid(server: Server, kind: str, empty: Any) -> None:
    body = chat("fox", clip(9, 1.2), clip(10, 0.6), kind=kind)
    parts = body["messages"][0]["content"]
    for name, part in zip("xy", parts[1:], strict=True):
        part["uuid"] = name
    status, sent = server.post("/v1/chat/completions", body)
    assert status == 200, sent
    for part in parts[1:]:
        part.pop(kind)
        if empty is not ...:
            part[kind] = empty
    status, again = server.post("/v1/chat/completions", body)
    assert status == 200, again
    assert again["prompt_token_ids"] == sent["prompt_token_ids"]
    assert again["choices"][0]["token_ids"] == sent["choices"][0]["token_ids"]
    parts[1]["uuid"] = "z"
    status, refused = server.post("/v1/chat/completions", body)
    assert status == 400
    assert f"must name media of type {kind}" in refused["error"]["message"]


def test_offline_callers_pass_arrays(model: Model) -> None:
    samples = clip(7, 1.2)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(model.path), dtype="float32") as llm:
        content = [{"type": "audio", "audio": (samples, 16_000)}, {"type": "text", "text": "fox"}]
        first = llm.chat([{"role": "user", "content": content}], params)[0]
        mark = MARKS[model.kind]
        assert first.prompt is not None
        start, end = first.prompt.index(mark), first.prompt.rindex(mark)
        prompt = {
            "prompt": first.prompt[:start] + first.prompt[end:],
            "multi_modal_data": {"audio": (samples, 16_000)},
        }
        second = llm.generate(prompt, params)[0]
        assert first.prompt_token_ids == second.prompt_token_ids
        assert first.outputs[0].token_ids == second.outputs[0].token_ids
        assert first.outputs[0].token_ids == model.generate([samples], first.prompt_token_ids)
        with pytest.raises(ParameterError, match=r"must have pairs \(samples, rate\)"):
            llm.generate(prompt | {"multi_modal_data": {"audio": samples}}, params)
        with pytest.raises(ParameterError, match="must be samples of shape"):
            llm.generate(prompt | {"multi_modal_data": {"audio": (samples, 10)}}, params)
        with pytest.raises(ParameterError, match="is not a speech model, so it cannot transcribe"):
            llm.transcribe((samples, 16_000))


@pytest.mark.parametrize(
    ("part", "field", "message"),
    [
        ({"data": encoded(clip(1, 2.1))}, ".data", "is 2.1 s long, but at most 2 s are allowed"),
        (
            {"data": encoded(clip(1, 0.01))},
            ".data",
            "is too short: it has 160 samples at 16000 Hz, and about 480 are needed",
        ),
        ({"data": encoded(clip(1, 1.0))[:2000]}, ".data", "is truncated"),
        ({"data": "aGVsbG8="}, ".data", "is not an audio file that can be read"),
        ({"data": "!!"}, ".data", "is not valid base64"),
        ({"data": ""}, ".data", "must be audio in base64"),
        ("a file", "", "must be audio in base64"),
        (7, "", "must be audio in base64"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_audio_is_refused_by_name(server: Server, part: Any, field: str, message: str) -> None:
    content = [{"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": part}]
    body = {"messages": [{"role": "user", "content": content}]}
    status, answer = server.post("/v1/chat/completions", body)
    if part == "a file":
        message = "is not valid base64"
    assert status == 400
    assert answer["error"]["param"] == "messages[0].content[1].input_audio" + field
    assert message in answer["error"]["message"]


def test_too_many_audio_clips_and_remote_urls_are_rejected(server: Server) -> None:
    status, answer = server.post("/v1/chat/completions", chat(*[clip(1, 0.5)] * 3))
    assert status == 400
    assert "messages have 3 audio clips, but at most 2 are allowed" in answer["error"]["message"]
    url = {"type": "audio_url", "audio_url": {"url": "https://127.0.0.1/a.wav"}}
    status, answer = server.post(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": [url]}]}
    )
    assert status == 400
    assert "must be a data URL" in answer["error"]["message"]
    status, answer = server.post("/v1/audio/transcriptions", {"model": "tiny"})
    assert (status, answer["error"]["param"]) == (400, "model")
    form = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n\r\n--x--\r\n'
    headers = {"content-type": "multipart/form-data; boundary=x"}
    status, answer = server.post("/v1/audio/transcriptions", form, headers=headers)
    assert status == 400 and answer["error"]["param"] == "model"
    assert "'tiny' is not a speech model, so it cannot transcribe" in answer["error"]["message"]
    assert_nothing_is_held(server)
