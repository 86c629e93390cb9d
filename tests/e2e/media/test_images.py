"""A server of models that read images."""

from __future__ import annotations

import base64
import concurrent.futures
import io
import json
import signal
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import pytest
import safetensors.torch
import torch
import transformers
from engine.core.replay.__main__ import main as replay
from engine.frontend.client.beam_search import BeamSearchParams
from engine.frontend.offline.llm import LLM
from engine.protocol.errors import ParameterError
from engine.protocol.sampling_params import SamplingParams
from PIL import Image
from support.gguf.writer import write_gguf
from support.media.image_processors import image_processor
from support.media.image_requests import NUM_TOKENS, ask_together, chat, data_url, picture
from support.mmproj.writer import write_mmproj
from support.processes.program import wait_until
from support.servers.server import DEVICE, Server, assert_nothing_is_held, title_of
from support.vision.mllama import mllama_directory, next_logprobs
from support.vision.models import CHATS, PUBLISHED_MODELS, Model
from support.vision.molmo import molmo2_directory, reference_images

torch.set_num_threads(1)
FLAGS = ("--dtype", "float32", "--device", DEVICE, "--served-model-name", "tiny")
SMALL = ("--max-num-batched-tokens", "40", "--max-num-seqs", "4", "--max-model-len", "700")
pytestmark = pytest.mark.sampled


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("grid"), "idefics3")


@pytest.fixture(scope="module")
def server(grid: Model) -> Iterator[Server]:
    with Server(str(grid.path), *FLAGS, "--limit-mm-per-prompt", '{"image": 3}') as server:
        yield server


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("smolvlm", ()),
        ("internvl", ("--cpu-backend", "torch", "-tp", "2")),
        *((kind, ("-tp", "2")) for kind in ("internvl_chat", *PUBLISHED_MODELS)),
    ],
)
def test_answers_equal_those_of_transformers(
    tmp_path: Path, kind: str, flags: tuple[str, ...]
) -> None:
    model = Model(tmp_path, kind)
    with Server(str(model.path), *FLAGS, *flags) as server:
        model.check_all(server, [0, 1, 2, 3, 4])
        if kind in ("smolvlm", "internvl_chat"):
            model.check_video(server)
        assert_nothing_is_held(server)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("gemma3", (*SMALL, "--max-model-len", "200", "--num-gpu-blocks-override", "30")),
        ("gemma4", ("-tp", "2", "--max-num-batched-tokens", "80")),
        ("granite4_vision", ("-tp", "2", "-pp", "2")),
        ("mistral_large4", ("-tp", "2", "--max-num-batched-tokens", "80")),
        ("llava_onevision", ()),
    ],
)
def test_images_whose_tokens_see_each_other_or_have_any_size(
    tmp_path: Path, kind: str, flags: tuple[str, ...]
) -> None:
    model = Model(tmp_path, kind)
    with Server(str(model.path), *FLAGS, *flags) as server:
        model.check_all(server, [0, 1, 2, 3, 4, 0, 3])
        if kind in ("llava_onevision", "gemma4"):
            model.check_video(server)
        if kind == "gemma3":
            assert server.metric("engine:num_preemptions_total") > 0
            # The model has the name of its whole config, not gemma3_text.
            _, models = server.get("/api/tags")
            assert models["models"][0]["details"]["family"] == kind
        assert_nothing_is_held(server)


@pytest.mark.parametrize(
    "flags", [("-tp", "2"), ("-pp", "2"), ("--cpu-backend", "torch", "-tp", "2", "-pp", "2")]
)
def test_workers_that_divide_layers_with_cross_attention_give_the_answers_of_transformers(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    path, model = mllama_directory(tmp_path)
    with Server(str(path), *FLAGS, *flags) as server:
        answers = ask_together(server, [chat(*parts) for parts in CHATS])
        assert_nothing_is_held(server)
    for parts, answer in zip(CHATS, answers, strict=True):
        tokens = list(answer["prompt_token_ids"])
        images = [part for part in parts if isinstance(part, Image.Image)]
        for token in answer["choices"][0]["token_ids"]:
            assert next_logprobs(model, tokens, images).argmax() == token
            tokens.append(token)


def test_tensor_parallel_models_read_images_under_memory_pressure_and_crashes(
    grid: Model, tmp_path: Path
) -> None:
    # Two long prompts do not fit into the KV cache together.
    blocks = (
        "--num-gpu-blocks-override",
        "48",
        "--encoder-cache-size",
        "64",
        "--dump-dir",
        str(tmp_path),
    )
    with Server(str(grid.path), *FLAGS, *SMALL, *blocks, "-tp", "2") as server:
        grid.check_all(server, [0, 1, 2, 3, 4, 0, 1])
        assert server.metric("engine:num_preemptions_total") > 0
        status, dumped = server.post("/debug/dump", {})
        assert status == 200
        # The log has no pixels, and no decision depends on pixels.
        assert replay(dumped["files"]) == 0
        for victim in ("worker 0", "core 0"):
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                answers = pool.submit(grid.check_all, server, [0, 2, 3, 4, 1])
                server.child(victim).kill()
                answers.result()
            server.wait_until_whole()
        assert_nothing_is_held(server)


def test_images_that_are_read_as_overlapping_tiles_survive_crashes(tmp_path: Path) -> None:
    path, model = molmo2_directory(tmp_path)
    chats = [(*parts, "dog") for parts in (CHATS[2], CHATS[4], (picture(6, 130, 60),))]
    with Server(str(path), *FLAGS, "-tp", "2") as server:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answers = pool.submit(ask_together, server, [chat(*parts) for parts in chats])
            server.child("worker 0").kill()
        server.wait_until_whole()
        status, refused = server.post("/v1/chat/completions", chat(*CHATS[3]))
        assert status == 400
        assert "it reads one image a prompt, not 2" in refused["error"]["message"]
        assert_nothing_is_held(server)
    first = model.config.text_config.vocab_size
    for parts, answer in zip(chats, answers.result(), strict=True):
        tokens = list(answer["prompt_token_ids"])
        [arguments] = [reference_images(x) for x in parts if not isinstance(x, str)] or [{}]
        for token in answer["choices"][0]["token_ids"]:
            ids = torch.tensor([tokens])
            types = (ids >= first).long()
            with torch.inference_mode():
                found = model(input_ids=ids, mm_token_type_ids=types, use_cache=False, **arguments)
            assert found.logits[0, -1].argmax() == token
            tokens.append(token)


def test_gguf_models_read_images_with_the_mmproj_file_beside_them(
    tmp_path: Path, grid: Model
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(grid.path)
    decoder = transformers.LlamaForCausalLM(grid.model.config.text_config).float().eval()
    decoder.model.load_state_dict(grid.model.model.text_model.state_dict())
    decoder.lm_head.load_state_dict(grid.model.lm_head.state_dict())
    path = write_gguf(tmp_path / "tiny.gguf", decoder, tokenizer)
    write_mmproj(tmp_path / "mmproj-tiny.gguf", grid.model, "idefics3")
    with Server(str(path), *FLAGS) as server:
        grid.check_all(server, [0, 2, 3, 4])
    with Server(str(path), *FLAGS, "--mmproj", "none") as server:
        status, answer = server.post("/v1/chat/completions", chat(*CHATS[2]))
        assert status == 400
        assert "reads only text" in answer["error"]["message"]


def test_a_prefix_with_the_same_image_is_cached(grid: Model, server: Server) -> None:
    def num_cached(*parts: str | Image.Image) -> int:
        status, answer = server.post("/v1/chat/completions", chat(*parts))
        assert status == 200, answer
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    text = "the old tower " * 20
    first, second = picture(21, 64, 64), picture(22, 64, 64)
    assert num_cached(text, first, "fox") == 0
    assert num_cached(text, first, "dog") > num_cached(text, second, "dog") > 0


def test_clients_stream_answers_about_images_in_every_format(grid: Model, server: Server) -> None:
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    image = picture(6, 100, 70)
    expected = None
    for file_format in ("PNG", "WEBP", "TIFF", "BMP", "PPM"):
        lossless = {"WEBP": {"lossless": True}}.get(file_format, {})
        file = io.BytesIO()
        image.save(file, file_format, **lossless)
        url = f"data:image/{file_format};base64,{base64.b64encode(file.getvalue()).decode()}"
        stream = client.chat.completions.create(
            model="tiny",
            messages=[
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": url}},
                        {"type": "text", "text": "fox"},
                    ],
                }
            ],
            max_tokens=NUM_TOKENS,
            temperature=0,
            stream=True,
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert expected in (None, text)
        expected = text


def test_offline_callers_pass_images(grid: Model) -> None:
    image = picture(7, 100, 70)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(grid.path), dtype="float32") as llm:
        conversations = [
            [{"role": "user", "content": [part, {"type": "text", "text": "fox"}]}]
            for part in (
                {"type": "image_pil", "image_pil": image},
                {"type": "image_url", "image_url": {"url": data_url(image)}},
            )
        ]
        first, second = llm.chat(conversations, params)
        assert first.prompt is not None and first.prompt.count("<image>") == 208
        start, end = first.prompt.index("<fake"), first.prompt.rindex("image>") + len("image>")
        text = f"{first.prompt[:start]}<image>{first.prompt[end:]}"
        prompt = {"prompt": text, "multi_modal_data": {"image": image}}
        third = llm.generate(prompt, params)[0]
        assert third.prompt_token_ids == first.prompt_token_ids == second.prompt_token_ids
        answers = [output.outputs[0].token_ids for output in (first, second, third)]
        assert answers[0] == answers[1] == answers[2]
        [found] = llm.beam_search(prompt, BeamSearchParams(1, NUM_TOKENS, ignore_eos=True))
        assert found.sequences[0].tokens == [*third.prompt_token_ids, *answers[0]]
        with pytest.raises(ParameterError, match="must be images or audio for a text prompt"):
            llm.generate({"prompt": "a", "multi_modal_data": {"video": image}}, params)


def test_tokenize_counts_the_tokens_of_images(server: Server) -> None:
    request = chat("the quick", picture(1, 200, 150))
    status, answer = server.post("/v1/chat/completions", request)
    assert status == 200
    status, counted = server.post("/tokenize", {"messages": request["messages"]})
    assert status == 200
    assert counted["count"] == answer["usage"]["prompt_tokens"]


def _bomb() -> str:
    """Return a small PNG file with 100 million pixels."""
    return data_url(Image.new("1", (10_000, 10_000)))


def _url_of(data: bytes, file_format: str) -> str:
    return f"data:image/{file_format};base64,{base64.b64encode(data).decode()}"


def _png(width: int, height: int) -> str:
    """Return a PNG file with this size in its header, and without pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (header, b"IDAT" + zlib.compress(b""), b"IEND")
    data = b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
        for chunk in chunks
    )
    return _url_of(b"\x89PNG\r\n\x1a\n" + data, "png")


def _truncated() -> str:
    return data_url(picture(1, 64, 64))[:-400]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (_bomb(), "is too large: it has 10000 x 10000 pixels, and at most 67108864 are allowed"),
        (data_url(Image.new("1", (1 << 14, 1 << 14))), "is too large"),
        (_truncated(), "is not an image that can be read: image file is truncated"),
        (_png(0, 0), "is not an image that can be read"),
        (_png(0, 64), "is not an image that can be read"),
        (_png(64, 64), "is not an image that can be read"),
        (_png(1 << 31, 1), "is "),
        ("data:image/png;base64,aGVsbG8=", "it is none of PNG, JPEG, WEBP, GIF, BMP, TIFF, PPM"),
        ("data:image/svg+xml;base64,PHN2Zy8+", "it is none of PNG"),
        ("data:image/png;base64,a", "is not valid base64"),
        ("data:image/png,abc", "must be a base64 data URL"),
        ("https://127.0.0.1/image.png", "must be a data URL"),
        ("file:///etc/passwd", "must be a data URL"),
        ("", "must be the URL of an image"),
        (None, "must be the URL of an image"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_images_are_refused_by_name(server: Server, url: str | None, message: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    status, answer = server.post("/v1/chat/completions", {"messages": messages})
    assert status == 400
    assert answer["error"]["param"] == "messages[0].content[1].image_url.url"
    assert message in answer["error"]["message"]


def test_an_image_that_crashes_its_decoder_is_refused_and_others_go_on(server: Server) -> None:
    image, texts = chat("a", picture(1, 640, 640)), [chat("the quick"), chat("brew tea")]
    *expected, first = [each["choices"] for each in ask_together(server, [*texts, image])]

    def crash() -> tuple[int, Any]:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.post, "/v1/chat/completions", image)
            while not answer.done():
                for process in server.find_children():
                    if title_of(process) == "media decoder":
                        with suppress(psutil.NoSuchProcess):
                            process.send_signal(signal.SIGSEGV)
            assert [each["choices"] for each in ask_together(server, texts)] == expected
            return answer.result()

    answers: list[tuple[int, Any]] = []
    # It may be decoded before the signal.
    wait_until(lambda: answers.append(crash()) or answers[-1][0] == 400, what="a crash")
    error = answers[-1][1]["error"]
    assert error["param"] == "messages[0].content[1].image_url.url"
    assert "crashes the decoder (SIGSEGV)" in error["message"]
    assert [each["choices"] for each in ask_together(server, [image])] == [first]
    assert_nothing_is_held(server)


def _saved(image: Image.Image, file_format: str, **options: Any) -> str:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return _url_of(file.getvalue(), file_format.lower())


def _unusual_files() -> dict[str, tuple[str, Image.Image]]:
    """Return files of unusual kinds, and the images that a model should see."""
    image, gray = picture(8, 80, 48), picture(9, 80, 48).convert("L")
    exif = Image.Exif()
    exif[0x0112] = 6
    cmyk = image.convert("CMYK")
    palette = image.quantize(16)
    clear = palette.copy()
    clear.info["transparency"] = 0
    opaque = np.where(np.asarray(palette)[..., None] == 0, 255, np.asarray(palette.convert("RGB")))
    wide = np.asarray(gray).astype(np.uint16) * 257
    animation = [picture(seed, 80, 48) for seed in range(3)]
    frames = {"save_all": True, "append_images": animation[1:], "lossless": True}
    return {
        "EXIF rotation": (_saved(image, "PNG", exif=exif), image.rotate(-90, expand=True)),
        "CMYK": (_saved(cmyk, "TIFF"), cmyk.convert("RGB")),
        "16 bits": (_saved(Image.fromarray(wide), "PNG"), gray.convert("RGB")),
        "palette": (_saved(palette, "PNG"), palette.convert("RGB")),
        "transparency": (_saved(clear, "PNG", transparency=0), Image.fromarray(opaque)),
        "one pixel": (_saved(image.crop((0, 0, 1, 1)), "PNG"), image.crop((0, 0, 1, 1))),
        "animation": (_saved(animation[0], "WEBP", **frames), animation[0]),
    }


@pytest.mark.parametrize("kind", _unusual_files())
def test_unusual_image_files_give_the_same_answer(server: Server, kind: str) -> None:
    url, plain = _unusual_files()[kind]
    part = {"type": "image_url", "image_url": {"url": url}}
    # Without a prefix cache both are computed.
    answers = [
        server.post("/v1/chat/completions", chat("a", each) | {"cache_salt": salt})
        for salt, each in (("file", part), ("plain", plain))
    ]
    assert [status for status, _ in answers] == [200, 200], answers
    tokens = [(a["prompt_token_ids"], a["choices"][0]["token_ids"]) for _, a in answers]
    assert tokens[0] == tokens[1]


def test_too_many_images_and_truncation_are_rejected(grid: Model, server: Server) -> None:
    status, answer = server.post("/v1/chat/completions", chat(*[picture(1, 64, 64)] * 4))
    assert status == 400
    assert "messages have 4 images, but at most 3 are allowed" in answer["error"]["message"]
    status, answer = server.post(
        "/v1/chat/completions", chat("a", picture(1, 200, 200)) | {"truncate_prompt_tokens": 20}
    )
    assert status == 400
    assert answer["error"]["param"] == "truncate_prompt_tokens"
    large = chat(picture(1, 1000, 1000), picture(2, 1000, 1000), picture(3, 1000, 1000))
    status, answer = server.post("/v1/chat/completions", large | {"n": 400})
    assert status == 400, answer
    assert answer["error"]["param"] == "n"
    server.post("/v1/chat/completions", chat("the end"))
    assert_nothing_is_held(server)


def _embeddings_file(values: torch.Tensor, *, as_npy: bool = False) -> str:
    file = io.BytesIO()
    if as_npy:
        np.save(file, values.numpy())
    else:
        file.write(safetensors.torch.save({"embeddings": values.contiguous()}))
    return base64.b64encode(file.getvalue()).decode()


@torch.inference_mode()
def _embeddings(model: Model, image: Image.Image) -> tuple[torch.Tensor, list[int] | None]:
    """Return transformers' embeddings of an image, and the grid that clients send with them."""
    processor = image_processor(model.path, model.kind)
    if model.kind == "idefics3":
        inputs = processor([[image]], return_tensors="pt", return_row_col_info=True)
        values = model.model.model.get_image_features(inputs["pixel_values"]).pooler_output
        # One tensor of all tiles, or a list of them.
        flat = torch.cat([tile.reshape(-1, tile.shape[-1]) for tile in values])
        return flat, [inputs["rows"][0][0], inputs["cols"][0][0]]
    options = {"patch_size": 16} if model.kind == "mistral3" else {}
    inputs = processor(image, return_tensors="pt", **options)
    if model.kind == "mistral3":
        sizes = torch.as_tensor(inputs["image_sizes"])
        found = model.model.model.get_image_features(inputs["pixel_values"], image_sizes=sizes)
        return found.pooler_output[0], (sizes[0] // 16).tolist()
    return model.model.model.get_image_features(inputs["pixel_values"]).pooler_output[0], None


@pytest.mark.parametrize("kind", ["idefics3", "mistral3"])
def test_embeddings_take_the_place_of_an_image_with_a_grid(tmp_path: Path, kind: str) -> None:
    model = Model(tmp_path, kind)
    image = next(part for part in CHATS[2] if isinstance(part, Image.Image))
    values, grid = _embeddings(model, image)
    with LLM(str(model.path), dtype="float32", enable_mm_embeds=True) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)

        def ask(part: dict[str, Any]) -> Any:
            content = [part, {"type": "text", "text": "over the lazy dog"}]
            return llm.chat([{"role": "user", "content": content}], params)[0]

        expected = ask({"type": "image_pil", "image_pil": image})
        given = {"image_embeds": values.detach(), "grid": grid}
        found = ask({"type": "image_embeds", "image_embeds": given})
        assert found.prompt_token_ids == expected.prompt_token_ids
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
        for wrong in ([1, 7], [0, 1], "2 x 2", [1]):
            with pytest.raises(ParameterError, match="grid"):
                ask({"type": "image_embeds", "image_embeds": given | {"grid": wrong}})


def test_embeddings_take_the_place_of_an_image(tmp_path: Path, server: Server) -> None:
    model = Model(tmp_path, "llava-siglip")
    image = next(part for part in CHATS[2] if isinstance(part, Image.Image))
    values, _ = _embeddings(model, image)

    def ask(server: Server, file: Any) -> tuple[int, Any]:
        request = chat(*CHATS[2])
        request["messages"][0]["content"][0] = {"type": "image_embeds", "image_embeds": file}
        return server.post("/v1/chat/completions", request)

    with Server(str(model.path), *FLAGS, "--enable-mm-embeds") as own:
        for file in (_embeddings_file(values), _embeddings_file(values[None], as_npy=True)):
            status, answer = ask(own, file)
            assert status == 200, answer
            model.check(2, answer)
        assert ask(own, _embeddings_file(values.bfloat16()))[0] == 200
        wrong = values.clone()
        wrong[1, 2] = torch.nan
        for file, message in (
            (_embeddings_file(values[:, :-1]), "has the shape [64, 63], but this model reads"),
            (_embeddings_file(wrong), "has numbers that are NaN or infinite"),
            (_embeddings_file(values.double()), "its type is F64"),
            (_embeddings_file(values)[:-400], "which do not match the shape"),
            ("aGVsbG8=", "is not a safetensors or npy file"),
            ("?", "is not valid base64"),
            (7, "must be a base64 file"),
        ):
            status, answer = ask(own, file)
            assert status == 400
            assert answer["error"]["param"] == "messages[0].content[0].image_embeds"
            assert message in answer["error"]["message"]
        assert_nothing_is_held(own)
    status, answer = ask(server, _embeddings_file(values))
    assert status == 400
    assert "without --enable-mm-embeds" in answer["error"]["message"]


def test_text_models_refuse_images(tmp_path: Path) -> None:
    model = Model(tmp_path, "llava-siglip")
    no_images = ("--limit-mm-per-prompt", json.dumps({"image": 0}))
    with Server(str(model.path), *FLAGS, *no_images) as server:
        status, answer = server.post("/v1/chat/completions", chat(picture(1, 64, 64)))
        assert status == 400
        assert answer["error"]["param"] == "messages[0].content[0].type"
        assert "reads only text" in answer["error"]["message"]
