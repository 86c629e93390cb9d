"""Phi-4-multimodal gives the logits of transformers for images of any size."""

import ast
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from engine.frontend.media.layouts.pixels import Tile
from engine.frontend.media.processor import process_image
from engine.frontend.model_source.images.read import read_image_processor
from engine.frontend.offline.llm import LLM
from engine.protocol.checkpoint.config_fields import ConfigFields
from engine.protocol.encoder_inputs.payloads import ImagePayload
from engine.protocol.errors import CheckpointError, ConfigError, EngineError
from engine.protocol.sampling_params import SamplingParams
from engine.workers.loaders.open_checkpoint import open_checkpoint
from engine.workers.towers.image_tower import TowerSource
from engine.workers.towers.make_tower import make_tower
from PIL import Image
from safetensors.torch import load_file, save_file
from support.checkpoints.lora_adapters import write_adapter
from support.checkpoints.tiny import sentencepiece_tokenizer
from support.families import SMALL
from support.media.pictures import random_picture
from support.servers.server import default_model
from support.vision.checkpoints import CHAT_TEMPLATE
from support.workers.decoders import CPU, Runner, load_decoder, load_native_decoder
from support.workers.towers import load_tower, media_logits
from torch.nn import functional as F
from transformers import BatchFeature

pytestmark = pytest.mark.slow

torch.set_num_threads(1)
SIDE, PATCH, MAX_TILES = 64, 2, 5
"""Like the real sizes, these have 32 patches per side of a tile, which transformers' processor takes for granted."""

SIZES = ((50, 30), (150, 61), (30, 95), (700, 130))
ORIGINAL_NAMES = {
    "img_projection_up": "img_projection.0",
    "img_projection_down": "img_projection.2",
    "sub_img_feature_extensor": "sub_GN",
    "global_img_feature_extensor": "glb_GN",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tokenizer = sentencepiece_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(path)
    config = transformers.Phi4MultimodalConfig(
        **SMALL | {"vocab_size": len(tokenizer), "max_position_embeddings": 4096},
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "crop_size": SIDE,
            "patch_size": PATCH,
            "image_token_id": tokenizer.convert_tokens_to_ids("<image>"),
        },
        audio_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 16,
            "depthwise_separable_out_channel": 16,
            "nemo_conv_channels": 16,
            "audio_token_id": 97,
        },
    )
    torch.manual_seed(0)
    reference = transformers.Phi4MultimodalForCausalLM._from_config(
        config, attn_implementation="eager"
    )
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, 0, 0.2)
    reference.eval().save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
    return path, reference


_PROCESSOR = {
    "image_processor_type": "Phi4MultimodalImageProcessor",
    "size": {"height": SIDE, "width": SIDE},
    "patch_size": PATCH,
    "dynamic_hd": MAX_TILES,
}


def _read_processor(path, **overrides):
    config = ConfigFields.read(path / "config.json")
    return read_image_processor(path, config, config, overrides)


def _tile(picture, processor):
    [tile] = [part for part in process_image(picture, processor) if isinstance(part, Tile)]
    return tile


def _reference_inputs(pictures):
    """Return what transformers' processor returns, with Pillow in place of torchvision, which rounds like Pillow."""
    directory = Path(transformers.__file__).parent / "models/phi4_multimodal"
    tree = ast.parse((directory / "image_processing_phi4_multimodal.py").read_text())
    [processor] = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "Phi4MultimodalImageProcessor"
    ]
    functions = [
        node
        for node in processor.body
        if isinstance(node, ast.FunctionDef) and not node.decorator_list and node.name[1] != "_"
    ]
    known = {"torch": torch, "math": math, "BatchFeature": BatchFeature, "SizeDict": object}
    known |= {"TensorType": object, "tvF": SimpleNamespace(resize=_resize, pad=_pad)}
    exec("\n".join(map(ast.unparse, functions)), known)
    own = SimpleNamespace(resize=_resize_floats, rescale_and_normalize=_normalize)
    for function in functions:
        if function.name != "_preprocess":
            setattr(own, function.name, known[function.name].__get__(own))
    images = [torch.from_numpy(np.array(each)).permute(2, 0, 1) for each in pictures]
    size = SimpleNamespace(height=SIDE, width=SIDE)
    options = (1 / 255, True, [0.5] * 3, [0.5] * 3, PATCH, MAX_TILES, "pt")
    return dict(known["_preprocess"](own, images, True, size, 3, True, *options))


def _resize(image, size):
    picture = Image.fromarray(image.permute(1, 2, 0).numpy())
    resized = picture.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)


def _pad(image, padding, fill):
    left, top, right, bottom = padding
    return F.pad(image, (left, right, top, bottom), value=fill[0])


def _resize_floats(image, size, resample, antialias):
    assert (resample, antialias) == (3, False)
    return F.interpolate(image[None], (size.height, size.width), mode="bicubic")[0]


def _normalize(image, _rescales, factor, _normalizes, mean, std):
    return (image * factor - mean[0]) / std[0]


@pytest.mark.parametrize("load", [load_decoder, load_native_decoder])
def test_logits_equal_those_of_transformers(model, load):
    path, reference = model
    processor = _read_processor(path)
    pictures = [random_picture(*size, seed) for seed, size in enumerate(SIZES)]
    inputs = _reference_inputs(pictures)
    tiles = [_tile(picture, processor) for picture in pictures]
    assert [tile.num_outputs for tile in tiles] == inputs.pop("num_img_tokens").tolist()
    rng = random.Random(3)
    image_token = processor.token_id
    prompt = []
    for tile in tiles:
        prompt += [rng.randrange(90) for _ in range(4)] + [image_token] * tile.num_outputs
    prompt += [rng.randrange(90) for _ in range(4)]
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([prompt]), **inputs).logits[0]
    length = len(prompt) + 1
    decoder = load(path, max_model_len=length)
    tower = load_tower(path, decoder, load)
    encoded = torch.cat([tower(tile.payload) for tile in tiles])
    is_image = np.array(prompt) == image_token
    runner = Runner(decoder, 1, max_tokens=length)
    # The chunks end within images.
    found = media_logits(runner, prompt, is_image, encoded, [300, 1500])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_original_checkpoints_are_read(model, tmp_path):
    path, _ = model
    config = json.loads((path / "config.json").read_text())
    own = ConfigFields(config | {"model_type": "phi4mm"}, path)
    processor = _read_processor(path)
    tile = _tile(random_picture(90, 70, 1), processor)
    tower = load_tower(path, load_decoder(path))
    expected = tower(tile.payload)
    tensors = load_file(path / "model.safetensors")
    for now, before in ORIGINAL_NAMES.items():
        tensors = {name.replace(now, before): value for name, value in tensors.items()}
    assert any(name.endswith("image_embed.img_projection.2.bias") for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(own.config))
    other = make_tower(tower.spec, TowerSource(open_checkpoint(tmp_path), CPU, torch.float32))
    assert torch.equal(other(tile.payload), expected)


def test_the_default_adapter_reads_images(model, tmp_path):
    path, reference = model
    write_adapter(tmp_path / "vision-lora", reference, 1, r"model\.layers\..*_proj")
    text = [{"role": "user", "content": "the quick brown fox"}]
    part = {"type": "image_pil", "image_pil": random_picture(50, 30, 1)}
    image = [{"role": "user", "content": [part, {"type": "text", "text": "fox"}]}]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    loras = {
        "lora_modules": [f"vision={tmp_path / 'vision-lora'}"],
        "default_mm_loras": {"image": "vision"},
    }
    with LLM(str(path), dtype="float32", enable_lora=True, **loras) as llm:

        def tokens(conversation, **options):
            return llm.chat([conversation], params, **options)[0].outputs[0].token_ids

        assert tokens(image) == tokens(image, lora_request="vision")
        assert tokens(text) != tokens(text, lora_request="vision")
    for values, message in (
        ({"audio": "vision"}, "--default-mm-loras has audio, but this model reads only image"),
        ({"image": "none"}, "none is no GGUF file, and neither a directory nor ORG/NAME"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(str(path), enable_lora=True, **loras | {"default_mm_loras": values})
    with pytest.raises(ConfigError, match="this model reads only text"):
        LLM(default_model(), enable_lora=True, default_mm_loras={"image": "vision"})


def test_images_that_do_not_fit_are_refused(model):
    path, _ = model
    with pytest.raises(ValueError, match="have 3 x 64 pixels, but both sides need at least 10"):
        process_image(random_picture(2, 39, 1), _read_processor(path))
    with pytest.raises(CheckpointError, match="resample must be 3"):
        _read_processor(path, resample=2)
    tower = load_tower(path, load_decoder(path))
    with pytest.raises(EngineError, match="has 64 x 9 pixels, of which 0 x 0 are no margin"):
        tower(ImagePayload(64, 9, bytes(1728), 1 / 255, (0.5,) * 3, (0.5,) * 3))
