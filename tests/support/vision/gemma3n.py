"""A tiny Gemma 3n that reads images, with weights that are determined by their names.

Transformers builds the vision tower with timm, which these tests do without. So the names and shapes are those of timm
1.0.31 (`mobilenetv5_300m_enc` with `channel_multiplier=1 / 16`).
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from support.checkpoints.tiny import sentencepiece_tokenizer
from support.media.image_marks import GEMMA_MARKS

OUTSIDE = "conv_stem.conv 64 3 3 3; conv_stem.bn 64; msfa.ffn.pw_exp.conv 240 120 1 1; msfa.ffn.pw_exp.bn 240; msfa.ffn.pw_proj.conv 2048 240 1 1; msfa.ffn.pw_proj.bn 2048; msfa.norm 2048"
BLOCKS = (
    (0, range(1), "conv_exp 256 64 3 3; bn1 256; conv_pwl 8 256 1 1; bn2 8"),
    (0, range(1, 3), "conv_exp 32 8 3 3; bn1 32; conv_pwl 8 32 1 1; bn2 8"),
    (
        1,
        range(1),
        "dw_start.conv 8 1 3 3; dw_start.bn 8; pw_exp.conv 48 8 1 1; pw_exp.bn 48; dw_mid.conv 48 1 5 5; dw_mid.bn 48; pw_proj.conv 16 48 1 1; pw_proj.bn 16; layer_scale 16",
    ),
    (
        1,
        range(1, 5, 2),
        "dw_start.conv 16 1 5 5; dw_start.bn 16; pw_exp.conv 64 16 1 1; pw_exp.bn 64; pw_proj.conv 16 64 1 1; pw_proj.bn 16; layer_scale 16",
    ),
    (
        1,
        range(2, 5, 2),
        "dw_start.conv 16 1 3 3; dw_start.bn 16; pw_exp.conv 64 16 1 1; pw_exp.bn 64; pw_proj.conv 16 64 1 1; pw_proj.bn 16; layer_scale 16",
    ),
    (
        2,
        range(1),
        "dw_start.conv 16 1 5 5; dw_start.bn 16; pw_exp.conv 96 16 1 1; pw_exp.bn 96; dw_mid.conv 96 1 5 5; dw_mid.bn 96; pw_proj.conv 40 96 1 1; pw_proj.bn 40; layer_scale 40",
    ),
    (
        2,
        range(1, 8),
        "dw_start.conv 40 1 5 5; dw_start.bn 40; pw_exp.conv 160 40 1 1; pw_exp.bn 160; pw_proj.conv 40 160 1 1; pw_proj.bn 40; layer_scale 40",
    ),
    (
        2,
        range(8, 9),
        "pw_exp.conv 40 40 1 1; pw_exp.bn 40; pw_proj.conv 40 40 1 1; pw_proj.bn 40; layer_scale 40",
    ),
    (
        2,
        range(9, 37, 2),
        "norm 40; attn.query.proj 768 40 1 1; attn.key.down_conv 40 1 3 3; attn.key.norm 40; attn.key.proj 64 40 1 1; attn.value.down_conv 40 1 3 3; attn.value.norm 40; attn.value.proj 64 40 1 1; attn.output.proj 40 768 1 1; layer_scale 40",
    ),
    (
        2,
        range(10, 37, 2),
        "pw_exp.conv 80 40 1 1; pw_exp.bn 80; pw_proj.conv 40 80 1 1; pw_proj.bn 40; layer_scale 40",
    ),
    (
        3,
        range(1),
        "dw_start.conv 40 1 5 5; dw_start.bn 40; pw_exp.conv 240 40 1 1; pw_exp.bn 240; dw_mid.conv 240 1 5 5; dw_mid.bn 240; pw_proj.conv 80 240 1 1; pw_proj.bn 80; layer_scale 80",
    ),
    (
        3,
        range(1, 39, 2),
        "norm 80; attn.query.proj 1536 80 1 1; attn.key.proj 96 80 1 1; attn.value.proj 96 80 1 1; attn.output.proj 80 1536 1 1; layer_scale 80",
    ),
    (
        3,
        range(2, 39, 2),
        "pw_exp.conv 160 80 1 1; pw_exp.bn 160; pw_proj.conv 80 160 1 1; pw_proj.bn 80; layer_scale 80",
    ),
)
"""For each kind of blocks: the stage, the blocks' indices, and the names and shapes of their tensors."""

SIDE = 256
NUM_IMAGE_TOKENS = 256
TEXT = {
    "hidden_size": 64,
    "intermediate_size": [96, 96, 80, 80],
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    "laurel_rank": 6,
    "max_position_embeddings": 2048,
}


def gemma3n_directory(directory: Path) -> Path:
    """Write the model, its tokenizer and its image processor. Return the directory."""
    tokenizer = sentencepiece_tokenizer()
    marks = ["<start_of_image>", "<end_of_image>", "<image>"]
    first = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.init_kwargs |= {f"{name}_token": mark for name, mark in GEMMA_MARKS.items()}
    ids = {
        name: tokenizer.convert_tokens_to_ids(GEMMA_MARKS[name]) for name in ("boi", "eoi", "image")
    }
    assert ids["eoi"] == first + 1
    # Like the real model, only the mark before an image has an embedding as text.
    text = transformers.Gemma3nTextConfig(
        **TEXT, vocab_size=len(tokenizer), vocab_size_per_layer_input=first + 1
    )
    config = {
        "architectures": ["Gemma3nForConditionalGeneration"],
        "model_type": "gemma3n",
        "text_config": text.to_dict(),
        "vision_config": {
            "model_type": "gemma3n_vision",
            "architecture": "mobilenetv5_300m_enc",
            "model_args": {"channel_multiplier": 1 / 16},
            "vocab_size": 2,
            "vocab_offset": first + 1,
            "label_names": ["LABEL_0", "LABEL_1"],
        },
        **{f"{name}_token_id": id_ for name, id_ in ids.items()},
        "tie_word_embeddings": True,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(directory)
    processor = {
        "image_processor_type": "SiglipImageProcessorFast",
        "do_normalize": False,
        "resample": 2,
        "size": {"height": SIDE, "width": SIDE},
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    save_file(_tensors(text), directory / "model.safetensors")
    return directory


def _tensors(text: transformers.Gemma3nTextConfig) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        decoder = transformers.Gemma3nForCausalLM(text)
    shapes = {
        name.replace("model.", "model.language_model.", 1): tuple(value.shape)
        for name, value in decoder.state_dict().items()
        if name != "lm_head.weight"
    }
    tower = "model.vision_tower.timm_model."
    groups = [("", OUTSIDE)]
    groups += [(f"blocks.{stage}.{i}.", each) for stage, of, each in BLOCKS for i in of]
    for prefix, listed in groups:
        for name, *sizes in (entry.split() for entry in listed.split("; ")):
            last = "gamma" if name == "layer_scale" else "weight"
            shapes[f"{tower}{prefix}{name}.{last}"] = tuple(map(int, sizes))
    shapes[f"{tower}conv_stem.conv.bias"] = (64,)
    projection = {
        "embedding": (2, 2048),
        "hard_embedding_norm": (2048,),
        "soft_embedding_norm": (2048,),
        "embedding_projection": (text.hidden_size, 2048),
    }
    for name, shape in projection.items():
        shapes[f"model.embed_vision.{name}.weight"] = shape
    return {name: named_weight(name, shape) for name, shape in shapes.items()}


def named_weight(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return normally distributed numbers, whose deviation keeps hidden states of a similar size."""
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) == 1:
        return torch.from_numpy(1 + 0.2 * values).float()
    return torch.from_numpy(values / np.prod(shape[1:]) ** 0.5).float()
