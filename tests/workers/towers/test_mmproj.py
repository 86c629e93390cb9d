"""mmproj files of GGUF models give the same towers as their Hugging Face checkpoints."""

import json

import msgspec
import numpy as np
import pytest
import torch
import transformers
from engine.frontend.model_source.images.read import read_image_processor
from engine.protocol.checkpoint.audio.tower import audio_tower_spec
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.protocol.checkpoint.field_names import fields_of_part
from engine.protocol.checkpoint.files import read_model_config
from engine.protocol.checkpoint.gguf import GGUFFile
from engine.protocol.checkpoint.gguf_config.convert import gguf_to_hf_config
from engine.protocol.checkpoint.gguf_config.mmproj.read import read_mmproj
from engine.protocol.checkpoint.vision.read import vision_spec
from engine.protocol.encoder_inputs.payloads import AudioPayload, ImagePayload
from engine.protocol.errors import CheckpointError
from engine.workers.loaders.mmproj import MmprojCheckpoint
from engine.workers.loaders.open_checkpoint import open_checkpoint
from engine.workers.models.families.registry import model_spec
from engine.workers.towers.audio_tower import AudioTower
from engine.workers.towers.grid_tower import GridTower
from engine.workers.towers.image_tower import TowerSource
from engine.workers.towers.make_tower import make_tower
from gguf import GGUFWriter
from msgspec.structs import replace
from support.audio.checkpoints import OMNI_MODELS, PARTS, audio_directory
from support.checkpoints.tiny import sentencepiece_tokenizer
from support.gguf.finish import finish
from support.gguf.hybrid import write_hybrid
from support.mmproj.audio import PROJECTORS as AUDIO_PROJECTORS
from support.mmproj.audio import write_audio_mmproj
from support.mmproj.grid import DECODERS as GRID_DECODERS
from support.mmproj.grid import PROJECTORS as GRID_PROJECTORS
from support.mmproj.grid import write_grid_tower
from support.mmproj.kinds import PROJECTORS as KINDS
from support.mmproj.kinds import write_mmproj_of_kind
from support.mmproj.qwen import PROJECTORS as QWEN_PROJECTORS
from support.mmproj.qwen import write_tower
from support.mmproj.writer import (
    PROJECTORS,
    write_kimi_mmproj,
    write_lfm2_mmproj,
    write_mmproj,
    write_phi4_mmproj,
    write_unified_mmproj,
)
from support.own_code.grid_towers.mimo import mimo_v2, write_mimo_mmproj
from support.own_code.known_towers.deepseek_ocr import deepseek_ocr, write_deepseek_mmproj
from support.own_code.known_towers.glm_edge import glm_edge, write_glm_edge_mmproj
from support.own_code.known_towers.ling3_vl import ling3_vl, write_ling3_mmproj
from support.own_code.own_towers.dots_ocr import dots_ocr, write_dots_mmproj
from support.own_code.own_towers.minicpm import minicpmv, write_minicpmv_mmproj
from support.own_code.own_towers.youtu import write_youtu_mmproj, youtu_vl
from support.vision.checkpoints import TILE, vision_directory
from support.vision.gemma3n import gemma3n_directory
from support.vision.grid_models import write_grid_model
from support.vision.qwen import UNIT, qwen_directory

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
TOKENS = [
    "<image>",
    "<IMG_CONTEXT>",
    "<image_soft_token>",
    "[IMG]",
    "<|image|>",
    "<|image_pad|>",
    "<|media_pad|>",
    "<|patch|>",
]


def _decoder(path, tokens=TOKENS, architecture="llama"):
    writer = GGUFWriter(path, architecture)
    writer.add_array(f"{architecture}.deepstack_mapping", [-1, -1, 1, 2, 3, 4, -1, 5])
    writer.add_array("tokenizer.ggml.tokens", tokens)
    finish(writer)
    return GGUFFile(path)


def _read(file, text, decoder):
    """Return the metadata of a file, and its fields."""
    found = read_mmproj(GGUFFile(file), decoder, text)
    return found, ConfigFields(found.config, file)


def _assert_same_spec(fields, config, size):
    """Return the spec of a tower, which is the same from a file as from a checkpoint."""
    specs = [vision_spec(each, size) for each in (fields, config)]
    assert specs[0] == specs[1]
    return specs[0]


def _assert_same_processor(file, found, path, config, options=None, **own):
    """Compare the processors of images but for the token of images, and fields that only the file has."""
    fields = ConfigFields(found.config, file)
    section = config.section("text_config") or config
    stored = read_image_processor(path, config, section, {})
    read = read_image_processor(file, fields, fields.section("text_config"), options or {}, found)
    values = {name: getattr(stored, name) for name in ("token_id", *own)}
    assert replace(read, **values) == stored


def _assert_same_outputs(file, path, spec, width, height, mean=0.5, std=0.5, expected=None):
    """Compare the outputs for an image. The checkpoint's tower has the spec `expected`, if given."""
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8).tobytes()
    image = ImagePayload(width, height, pixels, 1 / 255, (mean,) * 3, (std,) * 3)
    outputs = [
        make_tower(each, TowerSource(checkpoint, CPU, torch.float32))(image)
        for each, checkpoint in (
            (spec, MmprojCheckpoint(file)),
            (expected or spec, open_checkpoint(path)),
        )
    ]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", PROJECTORS)
def test_towers_of_mmproj_files_equal_those_of_checkpoints(kind, tmp_path):
    path, model = vision_directory(tmp_path / "model", kind)
    file = write_mmproj(tmp_path / "mmproj-tiny.gguf", model, kind)
    text = model.config.text_config.to_dict()
    _, fields = _read(file, text, _decoder(tmp_path / "tiny.gguf"))
    spec = vision_spec(fields, text["hidden_size"])
    expected = vision_spec(ConfigFields.read(path / "config.json"), text["hidden_size"])
    same = {name: getattr(spec, name) for name in ("image_size", "max_outputs", "norm_eps")}
    assert replace(expected, **same) == spec
    _assert_same_outputs(file, path, spec, TILE, TILE)


@pytest.mark.parametrize("kind", QWEN_PROJECTORS)
def test_towers_of_qwen_files_equal_those_of_checkpoints(kind, tmp_path):
    path, model = qwen_directory(tmp_path / "model", kind)
    file = write_tower(tmp_path / "mmproj-tiny.gguf", model, path)
    text = model.config.text_config.to_dict()
    _, fields = _read(file, text, _decoder(tmp_path / "tiny.gguf"))
    spec = vision_spec(fields, text["hidden_size"])
    expected = vision_spec(ConfigFields.read(path / "config.json"), text["hidden_size"])
    deepstack = tuple(sorted(expected.deepstack_layers))
    assert replace(expected, deepstack_layers=deepstack) == spec
    _assert_same_outputs(file, path, spec, 5 * UNIT, 4 * UNIT, expected=expected)


def test_projections_of_unified_gemma4_files_equal_those_of_checkpoints(tmp_path):
    path, model = vision_directory(tmp_path / "model", "gemma4_unified")
    file = write_unified_mmproj(tmp_path / "mmproj-tiny.gguf", model)
    text = model.config.text_config.to_dict()
    _, fields = _read(file, text, _decoder(tmp_path / "tiny.gguf"))
    config = ConfigFields.read(path / "config.json")
    spec = _assert_same_spec(fields, config, text["hidden_size"])
    _assert_same_outputs(file, path, spec, 3 * spec.side_factor, 2 * spec.side_factor, 0.0, 1.0)


_GRID = {
    "exaone4_5": (lambda file, model, path: write_tower(file, model, path), {}),
    "kimi_k25": (lambda file, model, path: write_kimi_mmproj(file, path), {}),
    "kimi_vl": (lambda file, model, path: write_kimi_mmproj(file, path), {"in_token_limit": 60}),
    "lfm2_vl": (
        lambda file, model, path: write_lfm2_mmproj(file, model),
        {"tile_size": 16, "max_tiles": 4, "min_image_tokens": 4, "max_image_tokens": 20},
    ),
}
"""The function that writes the file, and the options that the file lacks, by kind."""


@pytest.mark.parametrize("kind", _GRID)
def test_towers_of_files_with_grids_equal_those_of_checkpoints(kind, tmp_path):
    write, options = _GRID[kind]
    model = write_grid_model(tmp_path, kind)
    file = write(tmp_path / "mmproj-tiny.gguf", model, tmp_path)
    text = model.config.text_config.to_dict()
    config = ConfigFields.read(tmp_path / "config.json")
    found, fields = _read(file, text, _decoder(tmp_path / "tiny.gguf"))
    spec = _assert_same_spec(fields, config, text["hidden_size"])
    _assert_same_processor(file, found, tmp_path, config, options)
    _assert_same_outputs(file, tmp_path, spec, 40, 24)


@pytest.mark.parametrize("size", [(40, 24), (24, 24), (60, 8)])
def test_tower_of_a_phi4_file_equals_that_of_transformers(size, tmp_path):
    torch.manual_seed(0)
    config = transformers.Siglip2VisionConfig(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_patches=36,
        patch_size=4,
    )
    tower = transformers.Siglip2VisionModel(config).eval()
    projection = torch.nn.Sequential(
        torch.nn.Linear(48, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)
    )
    for parameter in (*tower.parameters(), *projection.parameters()):
        torch.nn.init.normal_(parameter, 0, 0.2)
    file = tmp_path / "mmproj-tiny.gguf"
    write_phi4_mmproj(file, tower, projection)
    text = {"model_type": "phi3", "hidden_size": 64, "vocab_size": 4}
    decoder = _decoder(tmp_path / "tiny.gguf", ["a", "<|endoftext|>", "<|dummy_0|>"], "phi3")
    found, fields = _read(file, text, decoder)
    assert found.config["image_token_id"] == 2
    processor = read_image_processor(file, fields, fields.section("text_config"), {}, found)
    assert (processor.unit, processor.min_pixels, processor.max_pixels) == (4, 256, 2048)
    width, height = size
    pixels = np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8)
    image = ImagePayload(*size, pixels.tobytes(), 1 / 255, (0.5,) * 3, (0.5,) * 3)
    spec = vision_spec(fields, 64)
    rows, columns = height // 4, width // 4
    values = torch.from_numpy(pixels).float() / 255 * 2 - 1
    patches = values.view(rows, 4, columns, 4, 3).transpose(1, 2).reshape(1, rows * columns, -1)
    with torch.inference_mode():
        states = tower(
            patches,
            torch.ones(1, rows * columns, dtype=torch.long),
            torch.tensor([[rows, columns]]),
            output_hidden_states=True,
        ).hidden_states[-2]
        expected = projection(states)[0]
    written = GridTower(spec, TowerSource(MmprojCheckpoint(file), CPU, torch.float32))(image)
    torch.testing.assert_close(written, expected, rtol=0, atol=1e-5)


_OWN_CODE = {
    "dots_ocr": (dots_ocr, write_dots_mmproj, "<|imgpad|>"),
    "mimo_v2": (mimo_v2, write_mimo_mmproj, "<|image_pad|>"),
    "youtu_vl": (youtu_vl, write_youtu_mmproj, "<|image_pad|>"),
}


@pytest.mark.parametrize("kind", _OWN_CODE)
def test_towers_of_files_equal_those_of_checkpoints_of_authors(kind, tmp_path):
    write_model, write_file, token = _OWN_CODE[kind]
    write_model(tmp_path)
    file = tmp_path / "mmproj-tiny.gguf"
    write_file(file, tmp_path)
    config = ConfigFields.read(tmp_path / "config.json")
    text = {"hidden_size": 64, "vocab_size": 96}
    found, fields = _read(file, text, _decoder(tmp_path / "tiny.gguf", ["a", token]))
    spec = _assert_same_spec(fields, config, 64)
    _assert_same_processor(file, found, tmp_path, config)
    _assert_same_outputs(file, tmp_path, spec, 40, 24)


def test_towers_of_glm_edge_files_equal_those_of_checkpoints(tmp_path):
    glm_edge(tmp_path)
    file = tmp_path / "mmproj-tiny.gguf"
    write_glm_edge_mmproj(file, tmp_path)
    config = read_model_config(tmp_path)
    text = {"hidden_size": 64, "vocab_size": 96}
    found, fields = _read(file, text, _decoder(tmp_path / "tiny.gguf", ["a", "<|begin_of_image|>"]))
    spec = _assert_same_spec(fields, config, 64)
    _assert_same_processor(file, found, tmp_path, config)
    _assert_same_outputs(file, tmp_path, spec, 24, 24)


def test_towers_of_ling_files_equal_those_of_checkpoints(tmp_path):
    tokenizer = sentencepiece_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image_pad|>"]})
    model = ling3_vl(tmp_path, vocab_size=len(tokenizer), image_token=len(tokenizer) - 1)
    file = tmp_path / "mmproj-tiny.gguf"
    write_ling3_mmproj(file, tmp_path)
    config = read_model_config(tmp_path)
    decoder = model.decoder
    size = decoder.config.hidden_size
    decoder.config.rope_parameters["mrope_section"] = [2, 1, 1]
    path = write_hybrid(tmp_path / "tiny.gguf", decoder, tokenizer)
    text = gguf_to_hf_config(GGUFFile(path))
    found, fields = _read(file, text, GGUFFile(path))
    spec = _assert_same_spec(fields, config, size)
    _assert_same_outputs(file, tmp_path, spec, 40, 24)
    # The file of the decoder has the axes of its positions.
    read = model_spec(found.config, path)
    expected = model_spec(config.config, tmp_path / "config.json")
    assert expected.rotary_axes
    assert read.rotary_axes == expected.rotary_axes
    assert read.layers == expected.layers


def test_towers_of_deepseek_ocr_files_equal_those_of_checkpoints(tmp_path):
    deepseek_ocr(tmp_path)
    file = tmp_path / "mmproj-tiny.gguf"
    write_deepseek_mmproj(file, tmp_path)
    _, fields = _read(file, {"hidden_size": 64}, _decoder(tmp_path / "tiny.gguf"))
    spec = _assert_same_spec(fields, ConfigFields.read(tmp_path / "config.json"), 64)
    _assert_same_outputs(file, tmp_path, spec, 64, 64)


@pytest.mark.parametrize("version", ["2.5", "2.6"])
def test_towers_of_minicpm_files_equal_those_of_checkpoints(version, tmp_path):
    minicpmv(tmp_path, version)
    file = tmp_path / "mmproj-tiny.gguf"
    write_minicpmv_mmproj(file, tmp_path)
    config = ConfigFields.read(tmp_path / "config.json")
    decoder = _decoder(tmp_path / "tiny.gguf", ["a", "<unk>"])
    found, fields = _read(file, {"hidden_size": 256, "vocab_size": 2}, decoder)
    spec = _assert_same_spec(fields, config, 256)
    tokenizer = {"added_tokens_decoder": {"1": {"content": "<unk>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    stored = read_image_processor(tmp_path, config, config, {"max_slice_nums": 9})
    assert read_image_processor(file, fields, fields.section("text_config"), {}, found) == stored
    _assert_same_outputs(file, tmp_path, spec, 36, 24)


@pytest.mark.parametrize("kind", GRID_PROJECTORS)
def test_towers_of_glm_and_paddle_files_equal_those_of_checkpoints(kind, tmp_path):
    path, model = qwen_directory(tmp_path, kind)
    file = write_grid_tower(tmp_path / "mmproj-tiny.gguf", path, kind)
    text = model.config.text_config.to_dict()
    config = ConfigFields.read(path / "config.json")
    decoder = _decoder(
        tmp_path / "tiny.gguf", [*TOKENS, "<|IMAGE_PLACEHOLDER|>"], GRID_DECODERS[kind]
    )
    found, fields = _read(file, text, decoder)
    spec = _assert_same_spec(fields, config, text["hidden_size"])
    # The files of GLM do not have the limits of an image.
    limits = {}
    if kind not in ("glm5_next", "paddleocr_vl"):
        limits = {"size": {"shortest_edge": 8 * UNIT**2, "longest_edge": 200 * UNIT**2}}
    # The files have the statistics as float32.
    _assert_same_processor(file, found, path, config, limits, mean=None, std=None)
    _assert_same_outputs(file, path, spec, 5 * UNIT, 4 * UNIT)


_KINDS = {
    "deepseek_ocr2": ("<image>", (256, 256)),
    "dots3_note": ("<|imgpad|>", (40, 24)),
    "gemma3n": ("<image_soft_token>", (256, 256)),
    "granite4_vision": ("<image>", (64, 64)),
    "hunyuan_vl": ("<｜hy_place▁holder▁no▁102｜>", (40, 24)),
    "janus": ("<image_placeholder>", (24, 24)),
    "minicpmv4_6": ("<|image_pad|>", (32, 16)),
    "minimax_m3_vl": ("]<]image[>[", (40, 24)),
    "muse_glimmer": ("<|patch|>", (40, 24)),
    "nemotron_h_omni": ("<image>", (24, 24)),
    "step3p7": ("<im_patch>", (32, 32)),
}
"""The token of images and the width and the height of an image, by kind."""


@pytest.mark.parametrize("kind", KINDS)
def test_towers_of_other_files_equal_those_of_checkpoints(kind, tmp_path):
    token, (width, height) = _KINDS[kind]
    if kind == "gemma3n":
        gemma3n_directory(tmp_path)
    elif kind == "granite4_vision":
        vision_directory(tmp_path, kind)
    elif kind == "hunyuan_vl":
        qwen_directory(tmp_path, kind)
    else:
        write_grid_model(tmp_path, kind)
    config = ConfigFields.read(tmp_path / "config.json")
    if kind == "nemotron_h_omni":
        config = config.with_values({"model_type": "NemotronH_Nano_VL_V2"})
    if kind == "muse_glimmer":
        # The file does not say which layers have windows, so it has those of the published model.
        layers = ["window_attention"] * 2 + ["full_attention"]
        config = config.with_values(
            {"vision_config": config.config["vision_config"] | {"layer_types": layers}}
        )
    if kind == "deepseek_ocr2":
        # The file does not have this number.
        vision = json.loads(json.dumps(config.config["vision_config"]))
        vision["encoder_config"]["rope_parameters"]["rope_theta"] = 1e6
        config = config.with_values({"vision_config": vision})
    if kind == "granite4_vision":
        # The converter expects layers that are counted from the last one.
        config = config.with_values({"deepstack_layer_map": [[-1, 0], [-3, 3]]})
    text = (config.section("text_config") or config).config
    file = write_mmproj_of_kind(tmp_path / "mmproj-tiny.gguf", tmp_path, kind)
    decoder = _decoder(tmp_path / "tiny.gguf", ["<end_of_image>", token])
    found, fields = _read(file, text, decoder)
    assert 1 in (found.config.get("image_token_id"), found.config.get("image_token_index"))
    specs = [vision_spec(each, text["hidden_size"]) for each in (fields, config)]
    if kind == "muse_glimmer":
        specs[0] = replace(specs[0], frames_per_patch=2)
    assert specs[0] == specs[1]
    spec = vision_spec(fields, text["hidden_size"])
    _assert_same_outputs(file, tmp_path, spec, width, height, expected=specs[1])


@pytest.mark.parametrize("kind", AUDIO_PROJECTORS)
def test_audio_towers_of_mmproj_files_equal_those_of_checkpoints(kind, tmp_path):
    path, model = audio_directory(tmp_path / "model", kind)
    images = None
    if kind in OMNI_MODELS:
        images = write_tower(tmp_path / "images.gguf", model, path)
    elif kind == "gemma4":
        images = write_mmproj(tmp_path / "images.gguf", model, kind)
    elif kind == "gemma4_unified":
        images = write_unified_mmproj(tmp_path / "images.gguf", model)
    elif kind in ("dots3_note", "nemotron_h_omni"):
        images = write_mmproj_of_kind(tmp_path / "images.gguf", path, kind)
    file = write_audio_mmproj(tmp_path / "mmproj-tiny.gguf", model, kind, images)
    tokens = [*TOKENS, *PARTS[kind]]
    if kind == "nemotron_h_omni":
        tokens.append("<image>")
    if kind == "dots3_note":
        tokens.append("<|imgpad|>")
    config = read_model_config(path)
    text = (config.section("thinker_config") or config).required_section("text_config").config
    found = read_mmproj(GGUFFile(file), _decoder(tmp_path / "tiny.gguf", tokens), text)
    assert tokens[found.config["audio_token_id"]] == PARTS[kind][1]
    config = config.with_values(fields_of_part(config))
    fields = ConfigFields(found.config, file)
    specs = [audio_tower_spec(each, text["hidden_size"]) for each in (fields, config)]
    # The file does not say how long the windows of this one are.
    lengths = {"num_frames": specs[1].num_frames}
    if kind == "dots3_note":
        lengths["chunks"] = specs[1].chunks
    assert replace(specs[0], **lengths) == specs[1]
    if kind in OMNI_MODELS:
        towers = [vision_spec(each, text["hidden_size"]) for each in (fields, config)]
        assert towers[0] == towers[1]
    spec, num_frames = specs[1], min(specs[1].num_frames, 200)
    features = np.random.default_rng(1).standard_normal((spec.num_mel_bins, num_frames), np.float32)
    payload = AudioPayload(spec.num_mel_bins, num_frames, features.tobytes())
    clip = msgspec.msgpack.encode(payload)
    outputs = [
        AudioTower(spec, TowerSource(checkpoint, CPU, torch.float32)).encode(clip)
        for checkpoint in (MmprojCheckpoint(file), open_checkpoint(path))
    ]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-6)


def test_mmproj_files_of_another_model_are_rejected(tmp_path):
    _, model = vision_directory(tmp_path / "model", "idefics3")
    file = GGUFFile(write_mmproj(tmp_path / "mmproj.gguf", model, "idefics3"))
    decoder = _decoder(tmp_path / "tiny.gguf", ["a"])
    with pytest.raises(CheckpointError, match="there is no token '<image>'"):
        read_mmproj(file, decoder, {})
    with pytest.raises(CheckpointError, match="not an mmproj file"):
        read_mmproj(decoder, decoder, {})
