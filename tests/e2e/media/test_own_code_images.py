"""A server of models that read images in several formats, under memory pressure and with a killed worker."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import torch
from engine.frontend.media.frame_sampling import Sampling
from engine.frontend.media.layouts.frames import fit_frames, frames
from engine.frontend.media.layouts.pixels import Tile
from engine.frontend.media.processor import process_image
from engine.frontend.media.video_files import open_video
from engine.frontend.model_source.config import resolve_model
from engine.frontend.model_source.images.read import read_image_processor
from engine.frontend.model_source.images.videos import read_video_processor
from engine.frontend.model_source.options import ModelOptions
from engine.frontend.supervisor.console import Console
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.protocol.checkpoint.field_names import read_text_config, text_section, with_common_names
from engine.protocol.checkpoint.files import read_model_config
from engine.protocol.config.images.details import SlicesProcessor
from engine.protocol.config.videos import VideoProcessor
from engine.protocol.errors import CheckpointError
from PIL import Image
from safetensors.torch import load_file, save_file
from support.checkpoints.tiny import sentencepiece_tokenizer
from support.gguf.writer import write_gguf
from support.media.image_requests import ask_together, chat, data_url, picture
from support.mmproj.grid import write_grid_decoder
from support.own_code.grid_towers.mimo import mimo_v2, write_mimo_mmproj
from support.own_code.grid_towers.step3 import step3
from support.own_code.known_towers import sarashina2
from support.own_code.known_towers.deepseek_ocr import deepseek_ocr, write_deepseek_mmproj
from support.own_code.known_towers.deepseek_vl2 import deepseek_vl2
from support.own_code.known_towers.git import Git, git
from support.own_code.known_towers.isaac import IsaacModel, isaac
from support.own_code.known_towers.keye import KeyeModel, keye
from support.own_code.known_towers.kosmos2 import kosmos2
from support.own_code.known_towers.ling3_vl import ling3_vl
from support.own_code.known_towers.openpangu_vl import openpangu_vl
from support.own_code.known_towers.vision_decoders import donut, formula_net, trocr
from support.own_code.model import CrossModel, OwnCodeModel
from support.own_code.own_towers.blip import blip
from support.own_code.own_towers.dots_ocr import dots_ocr
from support.own_code.own_towers.glm4v import Glm4vModel, glm4v_9b
from support.own_code.own_towers.minicpm import minicpmv, write_minicpmv_mmproj
from support.own_code.own_towers.mobilevlm import mobilevlm, write_mobilevlm_mmproj
from support.own_code.own_towers.molmo import TEXTS, Molmo, molmo
from support.own_code.own_towers.moondream import Moondream, moondream
from support.own_code.own_towers.nemotron_parse import NemotronParse, nemotron_parse
from support.own_code.own_towers.onevision2 import onevision2
from support.own_code.own_towers.openvla import openvla
from support.own_code.own_towers.ovis2_5 import ovis2_5
from support.own_code.own_towers.perception_lm import perception_lm
from support.own_code.own_towers.phi3_v import phi3_v
from support.own_code.own_towers.youtu import write_youtu_mmproj, youtu_vl
from support.servers.server import DEVICE, Server, assert_nothing_is_held
from support.vision.checkpoints import CHAT_TEMPLATE
from support.vision.grid_models import GridModel, grid_model
from support.vision.models import CHATS, Model

torch.set_num_threads(1)
pytestmark = pytest.mark.sampled

STEP_MARKS = [
    "<im_patch>",
    "<im_start>",
    "<im_end>",
    "<patch_start>",
    "<patch_end>",
    "<patch_newline>",
]
CHAMELEON_MARKS = ["<image>", "<racm3:break>", "<eoss>"]
GLM_MARKS = ["<|endoftext|>", "<|begin_of_image|>", "<|end_of_image|>"]
GLM_MARK = "<|begin_of_image|><|endoftext|><|end_of_image|>"
LING_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
LING_MARKS = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>"]
MOONDREAM_MARK = "<|endoftext|><image>"
IDEFICS2_MARKS = ["<image>", "<fake_token_around_image>"]
MODELS: dict[
    str,
    tuple[
        Callable[
            ...,
            OwnCodeModel
            | CrossModel
            | Git
            | GridModel
            | KeyeModel
            | IsaacModel
            | Glm4vModel
            | Molmo
            | Moondream
            | NemotronParse,
        ],
        str,
        str,
        list[str],
    ],
] = {
    "blip": (blip, "</s>", "", ["</s>"]),
    "chameleon": (partial(grid_model, kind="chameleon"), "<image>", "<image>", CHAMELEON_MARKS),
    "deepseek_ocr": (deepseek_ocr, "<image>", "<image>", ["<image>"]),
    "deepseek_vl2": (deepseek_vl2, "<image>", "<image>", ["<image>"]),
    "donut": (donut, "<s_task>", "", ["<s_task>"]),
    "nougat": (partial(donut, is_nougat=True), "</s>", "", ["</s>"]),
    "dots3_note": (
        partial(grid_model, kind="dots3_note-published"),
        "<|imgpad|>",
        "<|imgpad|>",
        ["<|audio_comp_pad|>", "<|imgpad|>"],
    ),
    "dots_ocr": (dots_ocr, "<|imgpad|>", "<|imgpad|>", ["<|imgpad|>"]),
    "formula_net": (formula_net, "</s>", "", ["</s>"]),
    "git": (git, "[PAD]", "", ["[CLS]", "[PAD]"]),
    "glm4v_9b": (glm4v_9b, GLM_MARKS[0], GLM_MARK, GLM_MARKS),
    "idefics2": (partial(grid_model, kind="idefics2"), "<image>", "<image>", IDEFICS2_MARKS),
    "isaac": (isaac, "<|image_pad|>", "<image>", ["<|image_pad|>"]),
    "janus": (
        partial(grid_model, kind="janus-published"),
        "<image_placeholder>",
        "<image_placeholder>",
        ["<image_placeholder>", "<begin_of_image>", "<end_of_image>"],
    ),
    "deepseek_vl_hybrid": (
        partial(grid_model, kind="deepseek_vl_hybrid-published"),
        "<image_placeholder>",
        "<image_placeholder>",
        ["<image_placeholder>"],
    ),
    "keye": (keye, "<|image_pad|>", "<|image_pad|>", ["<|image_pad|>"]),
    "keye1.5": (
        partial(keye, is_later=True),
        "<|image_pad|>",
        "<|image_pad|>",
        ["<|image_pad|>"],
    ),
    "kosmos2": (kosmos2, "<unk>", "<image>", ["<image>", "</image>"]),
    "ling3_vl": (ling3_vl, "<|image_pad|>", LING_MARK, LING_MARKS),
    "mimo_v2": (mimo_v2, "<|image_pad|>", "<|image_pad|>", ["<|image_pad|>"]),
    "minicpmv": (
        partial(minicpmv, version="2.6"),
        "<unk>",
        "(<image>./</image>)",
        ["<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"],
    ),
    "molmo": (partial(molmo, max_crops=2), "<im_patch>", "<|image|>", [*TEXTS]),
    # It has the template that comes with Engine.
    "moondream": (moondream, "<|endoftext|>", "", ["<|endoftext|>"]),
    "moondream2": (
        partial(moondream, is_third=False),
        "<|endoftext|>",
        MOONDREAM_MARK,
        ["<|endoftext|>"],
    ),
    "nemotron_h_omni": (
        partial(grid_model, kind="nemotron_h_omni"),
        "<image>",
        "<image>",
        ["<image>", "<img>", "</img>"],
    ),
    "nemotron_parse": (nemotron_parse, "</s>", "", ["</s>"]),
    "onevision2": (onevision2, "<|image_pad|>", "<|image_pad|>", ["<|image_pad|>"]),
    "openpangu_vl": (openpangu_vl, "[unused19]", "[unused19]", ["[unused19]"]),
    "openvla": (openvla, "<PAD>", "<image>", ["<PAD>"]),
    "ovis2_5": (ovis2_5, "<|image_pad|>", "<image>", ["<|image_pad|>"]),
    "ovis2_6": (
        partial(ovis2_5, architecture="Ovis2_6_MoeForCausalLM"),
        "<|image_pad|>",
        "<image>",
        ["<|image_pad|>"],
    ),
    "perception_lm": (perception_lm, "<|image|>", "<|image|>", ["<|image|>"]),
    "phi3_v": (phi3_v, "<|image|>", "<|image|>", ["<|image|>"]),
    "sarashina2": (sarashina2, "<|file|>", "<|file|>", ["<|file|>"]),
    "step3": (step3, "<im_patch>", "<im_patch>", STEP_MARKS),
    "step3p7": (partial(grid_model, kind="step3p7"), "<im_patch>", "<im_patch>", STEP_MARKS),
    "trocr": (trocr, "</s>", "", ["</s>"]),
    "unlimited_ocr": (partial(deepseek_ocr, window=4), "<image>", "<image>", ["<image>"]),
    "video_llama_3": (partial(grid_model, kind="video_llama_3"), "<image>", "<image>", ["<image>"]),
    "youtu_vl": (
        partial(youtu_vl, max_patches=240),
        "<|image_pad|>",
        "<|image_pad|>",
        ["<|image_pad|>"],
    ),
}
"""The function that writes a model, the text of its placeholder, its mark of an image, and its special tokens."""


WRITERS = {
    "mimo_v2": write_mimo_mmproj,
    "mobilevlm": write_mobilevlm_mmproj,
    "youtu_vl": write_youtu_mmproj,
}
"""The functions that write mmproj files."""

_CAPTIONS = ("blip", "donut", "formula_net", "git", "nougat", "trocr")
"""Models that read images alone. Their texts are too short to need another block."""

ONLY_IN_GGUF = {"mobilevlm": (mobilevlm, "<unk>", "<unk>", list[str]())}
"""The same for models whose towers are read from GGUF files only."""

FRAMES = [picture(6, 90, 60), picture(7, 90, 60)]
VIDEO = {"type": "video", "video": [data_url(frame) for frame in FRAMES]}
CHATS_WITH_ONE_IMAGE = [CHATS[2], ("sphinx of", picture(8, 130, 70), "quartz"), CHATS[4]] * 2
CHATS_WITH_VIDEOS = [*CHATS, ("sphinx of", VIDEO, "black quartz", picture(2, 64, 64))]


@pytest.mark.parametrize("kind", MODELS)
def test_answers_survive_preemption_and_a_killed_worker(tmp_path: Path, kind: str) -> None:
    chats = CHATS_WITH_VIDEOS if kind in ("minicpmv", "ovis2_5") else CHATS
    # Layers with windows have blocks of their own, and those of models with states are larger.
    others = {
        "dots3_note": "30",
        "ling3_vl": "9",
        "mimo_v2": "34",
        "moondream": "8",
        "moondream2": "8",
        "step3p7": "26",
    }
    blocks, length = others.get(kind, "14"), "200"
    if kind in _CAPTIONS or kind.startswith(("moondream", "nemotron_parse")):
        chats, length = CHATS_WITH_ONE_IMAGE, "100"
    model, _ = _write(tmp_path, kind)
    flags = ("--dtype", "float32", "--device", DEVICE, "--served-model-name", "tiny", "-tp", "2")
    memory = ["--max-num-batched-tokens", "40", "--max-num-seqs", "4", "--max-model-len", length]
    if kind in _CAPTIONS:
        chats = [each for each in chats if any(isinstance(x, Image.Image) for x in each)]
    if kind in (*_CAPTIONS, "kosmos2"):
        memory += ["--inject-preemption", "0.2"]
    with (
        Server(str(tmp_path), *flags, *memory, "--num-gpu-blocks-override", blocks) as server,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        bodies = [chat(*parts) for parts in chats]
        answers = ask_together(server, bodies * 2)
        assert server.metric("engine:num_preemptions_total") > 0
        killed = pool.submit(ask_together, server, bodies)
        server.child("worker 0").kill()
        answers += killed.result()
        server.wait_until_whole()
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        stream = client.chat.completions.create(
            model="tiny",
            messages=bodies[0]["messages"],
            max_tokens=12,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text == answers[0]["choices"][0]["message"]["content"]
        if kind == "git":
            status, refused = server.post("/v1/completions", {"prompt": "fox", "max_tokens": 2})
            assert status == 400 and "needs an image" in refused["error"]["message"]
        assert_nothing_is_held(server)
    _check(model, tmp_path, chats, answers)


def test_a_prefix_with_the_same_image_of_kosmos_2_is_cached(tmp_path: Path) -> None:
    model, _ = _write(tmp_path, "kosmos2")
    flags = ("--dtype", "float32", "--device", DEVICE, "--max-model-len", "200")
    text, first, second = "the old tower " * 8, picture(3, 60, 40), picture(4, 60, 40)
    chats = [(text, first, "fox"), (text, first, "dog"), (text, second, "dog")]
    with Server(str(tmp_path), *flags) as server:
        answers = [ask_together(server, [chat(*parts)])[0] for parts in chats]
    cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers]
    assert cached[1] > cached[2] > cached[0] == 0
    _check(model, tmp_path, chats, answers)


def test_gguf_model_reads_images_with_the_mmproj_file_beside_it(tmp_path: Path) -> None:
    model, tokenizer = _write(tmp_path, "minicpmv-4")
    (tmp_path / "gguf").mkdir()
    path = write_gguf(tmp_path / "gguf" / "tiny.gguf", model.decoder, tokenizer)
    write_minicpmv_mmproj(path.parent / "mmproj-tiny.gguf", tmp_path)
    # The file does not say how many slices there may be.
    limit = ("--mm-processor-kwargs", '{"max_slice_nums": 4}')
    with Server(str(path), "--dtype", "float32", "--device", DEVICE, *limit) as server:
        answers = ask_together(server, [chat(*parts) for parts in CHATS])
    _check(model, tmp_path, CHATS, answers)


def test_gguf_of_deepseek_ocr_reads_images_with_the_mmproj_file_beside_it(tmp_path: Path) -> None:
    model, tokenizer = _write(tmp_path, "deepseek_ocr")
    (tmp_path / "gguf").mkdir()
    path = tmp_path / "gguf" / "tiny.gguf"
    write_grid_decoder(path, model.decoder, "deepseek_ocr", tokenizer)
    write_deepseek_mmproj(path.parent / "mmproj-tiny.gguf", tmp_path)
    # The sizes of tiles are those of published models unless they are given.
    sizes = ("--mm-processor-kwargs", (tmp_path / "preprocessor_config.json").read_text())
    with Server(str(path), "--dtype", "float32", "--device", DEVICE, *sizes) as server:
        answers = ask_together(server, [chat(*parts) for parts in CHATS])
    _check(model, tmp_path, CHATS, answers)


@pytest.mark.parametrize("kind", WRITERS)
def test_other_gguf_models_read_images_with_mmproj_files(tmp_path: Path, kind: str) -> None:
    model, tokenizer = _write(tmp_path, kind)
    (tmp_path / "gguf").mkdir()
    path = write_gguf(tmp_path / "gguf" / "tiny.gguf", model.decoder, tokenizer)
    WRITERS[kind](path.parent / "mmproj-tiny.gguf", tmp_path)
    # The files do not have the maximum number of patches.
    sizes = ("--mm-processor-kwargs", (tmp_path / "preprocessor_config.json").read_text())
    with Server(str(path), "--dtype", "float32", "--device", DEVICE, *sizes) as server:
        answers = ask_together(server, [chat(*parts) for parts in CHATS])
    _check(model, tmp_path, CHATS, answers)


def _write(directory: Path, kind: str) -> tuple[Any, Any]:
    """Write a model, and return what gives its logits, and its tokenizer."""
    write, placeholder, mark, marks = (MODELS | ONLY_IN_GGUF)[kind.removesuffix("-4")]
    if kind == "minicpmv-4":
        write = partial(minicpmv, version="4.0")
    tokenizer = sentencepiece_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    if mark:
        tokenizer.chat_template = CHAT_TEMPLATE.replace("<image>", mark).replace(
            "<video>", mark.replace("image", "video")
        )
    tokenizer.save_pretrained(directory)
    image_token = tokenizer.convert_tokens_to_ids(placeholder)
    return write(directory, vocab_size=len(tokenizer), image_token=image_token), tokenizer


def _frames_of(directory: Path, config: ConfigFields) -> list[Any]:
    """Return the encoder inputs of `VIDEO`."""
    videos = read_video_processor(directory, config, text_section(config) or config, {})
    assert isinstance(videos, VideoProcessor)
    video = open_video(
        FRAMES, Sampling(), "v", videos, lambda *sizes: fit_frames(*sizes, videos, 1000)
    )
    return [part.payload for part in frames(video, videos, ("", "")) if isinstance(part, Tile)]


def _check(
    model: Any, directory: Path, chats: Sequence[Sequence[Any]], answers: Sequence[dict[str, Any]]
) -> None:
    """Compare the answers to chats, each of which was asked several times, with the model's own."""
    config = read_model_config(directory)
    text = read_text_config(config) or with_common_names(config)
    processor = read_image_processor(directory, config, text, {})
    assert processor is not None
    for index, parts in enumerate(chats):
        images = []
        count = sum(isinstance(part, Image.Image) for part in parts)
        for part in parts:
            # A frame is an image without slices.
            pictures, how = [part], processor
            if part is VIDEO and not isinstance(processor, SlicesProcessor):
                images.append(_frames_of(directory, config))
            elif part is VIDEO:
                pictures, how = FRAMES, msgspec.structs.replace(processor, max_slices=1)
            images += [
                [x.payload for x in process_image(each, how, count) if isinstance(x, Tile)]
                for each in pictures
                if isinstance(each, Image.Image)
            ]
        same = answers[index :: len(chats)]
        [written] = {tuple(answer["choices"][0]["token_ids"]) for answer in same}
        prompt = same[0]["prompt_token_ids"]
        # All tokens are checked at once, each after those that the server wrote.
        length = len(prompt)
        limits = {"num_prompt_tokens": length} if getattr(model, "window", 0) else {}
        logits = model.logits([*prompt, *written], images, **limits)[length - 1 : -1]
        assert logits.argmax(-1).tolist() == list(written)


def test_the_tower_of_llava_may_be_another_checkpoint(tmp_path: Path) -> None:
    model = Model(tmp_path / "model", "llava_next-published")
    tower = tmp_path / "tower"
    tower.mkdir()
    prefix, file = "model.vision_tower.vision_tower.", model.path / "model.safetensors"
    tensors = load_file(file)
    own = {name: x for name, x in tensors.items() if not name.startswith(prefix)}
    save_file(own, file)
    moved = {name.removeprefix(prefix): tensors[name] for name in tensors.keys() - own.keys()}
    config = json.loads((model.path / "config.json").read_text())
    config["mm_vision_tower"] = str(tower)
    sections = {"model_type": "clip", "vision_config": config.pop("vision_config")}
    (tower / "config.json").write_text(json.dumps(sections))
    (model.path / "config.json").write_text(json.dumps(config))
    options = ModelOptions(model=str(model.path))
    with pytest.raises(CheckpointError, match=f"lack the weights.* names {tower}, which cannot"):
        resolve_model(options, Console())
    save_file(moved, tower / "model.safetensors")
    flags = ("--dtype", "float32", "--device", DEVICE, "--served-model-name", "tiny")
    with Server(str(model.path), *flags) as server:
        model.check_all(server, [0, 1, 2])
    with Server(str(model.path), *flags, "--language-model-only") as server:
        assert server.post("/v1/chat/completions", chat("the tower"))[0] == 200
