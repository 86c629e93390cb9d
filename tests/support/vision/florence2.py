"""A tiny random Florence-2, and the answers of transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

SIDE = 72
_MARKS = ("<s>", "<pad>", "</s>", "<image>")

_DEVIATIONS = (
    (r"norm[\d_a-z]*\.weight$", 0.1),
    (r"language_model.*bias$", 0.02),
    (r"encoder_attn", 1.0),
    (r"shared", 0.1),
    (r"language_model.*(fc|_proj)", 0.2),
    (r"", 0.3),
)
"""Patterns of parameters, and the standard deviations with which answers depend on images and prompts."""


_PUBLISHED_NAMES = (
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.language_model\.", "language_model.model."),
    (r"^model\.vision_tower\.", "vision_tower."),
    (r"^(vision_tower\.convs\.\d+)\.conv\.", r"\1.proj."),
    (r"(_block\.conv[12])\.", r"\1.fn.dw."),
    (r"(spatial_block\.)norm1\.", r"\1window_attn.norm."),
    (r"(channel_block\.)norm1\.", r"\1channel_attn.norm."),
    (r"\.(window|channel)_attn\.(?!norm)", r".\1_attn.fn."),
    (r"\.ffn\.", ".ffn.fn.net."),
    (r"_block\.norm2\.", "_block.ffn.norm."),
    (r"^model\.multi_modal_projector\.image_projection\.weight$", "image_projection"),
    (r"^model\.multi_modal_projector\.image_position_embed\.", "image_pos_embed."),
    (r"^model\.multi_modal_projector\.", ""),
)


def _as_published(directory: Path) -> None:
    """Give a model the format of Microsoft."""
    config = json.loads((directory / "config.json").read_text())
    vision = config["vision_config"]
    vision |= {
        "model_type": "davit",
        "dim_embed": vision.pop("embed_dim"),
        "image_feature_source": ["spatial_avg_pool", "temporal_avg_pool"],
        "image_pos_embed": {
            "type": "learned_abs_2d",
            "max_pos_embeddings": vision.pop("max_position_embeddings"),
        },
        "visual_temporal_embedding": {
            "type": "COSINE",
            "max_temporal_embeddings": vision.pop("max_temporal_embeddings"),
        },
    }
    config["text_config"]["model_type"] = "florence2_language"
    del config["image_token_id"]
    (directory / "config.json").write_text(json.dumps(config))
    file, stored = directory / "model.safetensors", {}
    for name, tensor in load_file(file).items():
        for pattern, replacement in _PUBLISHED_NAMES:
            name = re.sub(pattern, replacement, name)
        stored[name] = tensor.t().contiguous() if name == "image_projection" else tensor
    assert "vision_tower.blocks.0.0.spatial_block.window_attn.fn.qkv.weight" in stored
    save_file(stored, file)


def florence2_directory(directory: Path, *, is_published: bool = False) -> tuple[Path, Any, Any]:
    """Write a model and its processor. Return the directory, and both as transformers' objects.

    Windows of the tower are completed by zeros. The last tokens are parts of words.
    """
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {letter: index for index, letter in enumerate([*_MARKS, *sorted(letters)])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([*_MARKS])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>"},
    )
    images = CLIPImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, do_center_crop=False, image_seq_length=10
    )
    processor = transformers.Florence2Processor(images, fast)
    config = transformers.Florence2Config(
        vision_config={
            "depths": [1, 1, 2, 1],
            "embed_dim": [8, 16, 24, 32],
            "num_heads": [2, 2, 3, 4],
            "num_groups": [2, 4, 3, 4],
            "window_size": 4,
            "projection_dim": 48,
        },
        text_config={
            "model_type": "bart",
            "vocab_size": len(vocabulary),
            "d_model": 48,
            "encoder_layers": 2,
            "decoder_layers": 3,
            "encoder_attention_heads": 6,
            "decoder_attention_heads": 6,
            "encoder_ffn_dim": 80,
            "decoder_ffn_dim": 96,
            "max_position_embeddings": 128,
        },
        image_token_id=vocabulary["<image>"],
    )
    torch.manual_seed(1)
    model = transformers.Florence2ForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    ).eval()
    for name, parameter in model.named_parameters():
        found = (std for pattern, std in _DEVIATIONS if re.search(pattern, name))
        is_norm = re.search(r"norm[\d_a-z]*\.weight$", name)
        torch.nn.init.normal_(parameter, 1 if is_norm else 0, next(found))
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    fast.save_pretrained(directory)
    if is_published:
        _as_published(directory)
    return directory, model, processor


@torch.inference_mode()
def next_logprobs(
    model: Any, processor: Any, prompt: str, picture: Image.Image, tokens: list[int]
) -> torch.Tensor:
    """Return the log-probabilities of the token after the decoder's `tokens`, [V]."""
    inputs = processor(text=prompt, images=picture, return_tensors="pt")
    logits = model(**inputs, decoder_input_ids=torch.tensor([tokens])).logits
    return logits[0, -1].log_softmax(-1)


def greedy(model: Any, processor: Any, prompt: str, picture: Image.Image, count: int) -> list[int]:
    """Return the most likely tokens of an answer."""
    tokens = [model.config.text_config.decoder_start_token_id]
    for _ in range(count):
        row = next_logprobs(model, processor, prompt, picture, tokens)
        tokens.append(int(row.argmax()))
    return tokens[1:]
