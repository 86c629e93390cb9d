"""GLM-Edge-V, whose tower is transformers' SigLIP."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
import transformers
from engine.protocol.encoder_inputs.payloads import ImagePayload
from safetensors.torch import load_file
from support.checkpoints.tiny import DECODER_SIZES
from support.gguf.finish import finish
from support.mmproj.header import tower_sizes, vision_writer
from support.own_code.model import OwnCodeModel, fill, normalized, write
from torch import Tensor, nn
from torch.nn import functional as F

_PATCH, _SIZE, _SIDE, _INNER = 4, 48, 24, 72
_GGUF_NAMES = (
    (r"^model\.vision\.adapter\.", "adapter."),
    (r"^model\.vision\.vit\.model\.vision_model\.", "v."),
    (r"encoder\.layers\.", "blk."),
    (r"\.layer_norm([12])\.", r".ln\1."),
    (r"\.self_attn\.([qkv])_proj\.", r".attn_\1."),
    (r"\.self_attn\.out_proj\.", ".attn_out."),
    (r"\.mlp\.fc1\.", ".ffn_up."),
    (r"\.mlp\.fc2\.", ".ffn_down."),
    (r"^v\.embeddings\.patch_embedding\.", "v.patch_embd."),
    (r"^v\.embeddings\.position_embedding\.", "v.position_embd."),
    (r"^v\.post_layernorm\.", "v.post_ln."),
)


class _Adapter(nn.Module):
    """A convolution of squares and a gated MLP, whose results are between two embeddings."""

    def __init__(self, output: int) -> None:
        super().__init__()
        self.boi, self.eoi = (nn.Parameter(torch.zeros(1, 1, output)) for _ in range(2))
        self.conv = nn.Conv2d(_SIZE, output, 2, 2)
        self.linear = nn.ModuleDict(
            {
                "linear": nn.Linear(output, output, bias=False),
                "norm1": nn.LayerNorm(output),
                "gate": nn.Linear(output, _INNER, bias=False),
                "dense_h_to_4h": nn.Linear(output, _INNER, bias=False),
                "dense_4h_to_h": nn.Linear(_INNER, output, bias=False),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        side, mlp = _SIDE // _PATCH, self.linear
        x = self.conv(x.T.view(1, _SIZE, side, side))[0].flatten(1).T
        x = F.gelu(mlp["norm1"](mlp["linear"](x)))
        x = mlp["dense_4h_to_h"](F.silu(mlp["gate"](x)) * mlp["dense_h_to_4h"](x))
        return torch.cat((self.boi[0], x, self.eoi[0]))


def glm_edge(directory: Path, *, vocab_size: int = 96, image_token: int = 95) -> OwnCodeModel:
    """Write a GLM-Edge-V."""
    text = DECODER_SIZES | {"vocab_size": vocab_size, "tie_word_embeddings": False}
    text |= {"head_dim": 16, "pad_token_id": 0, "intermediate_size": _INNER}
    decoder = transformers.GlmForCausalLM(transformers.GlmConfig(**text))
    vision = {
        "hidden_size": _SIZE,
        "intermediate_size": 80,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "image_size": _SIDE,
        "patch_size": _PATCH,
    }
    tower = transformers.SiglipVisionModel(
        transformers.SiglipVisionConfig(**vision, vision_use_head=False)
    )
    adapter = _Adapter(text["hidden_size"])
    fill(decoder, tower, adapter)

    def encode(payload: ImagePayload) -> Tensor:
        found: Tensor = adapter(tower(normalized(payload)[None]).last_hidden_state[0])
        return found

    config = decoder.config.to_dict() | {
        "architectures": ["GlmForCausalLM"],
        "boi_token_id": image_token,
        "vision_config": vision | {"model_type": "siglip_vision_model"},
    }
    parts = {
        "": decoder,
        "model.vision.vit.model.vision_model.": tower,
        "model.vision.adapter.": adapter,
    }
    write(directory, config, parts, {"size": {"height": _SIDE, "width": _SIDE}})
    return OwnCodeModel(decoder, lambda images: [encode(each) for each in images], image_token)


def write_glm_edge_mmproj(path: Path, checkpoint: Path) -> None:
    """Write the tower of a GLM-Edge-V in a directory as an mmproj file."""
    vision = json.loads((checkpoint / "config.json").read_text())["vision_config"]
    numbers = tower_sizes(vision) | {"image_size": vision["image_size"]}
    writer = vision_writer(path, "adapter", numbers)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if not name.startswith("model.vision."):
            continue
        for pattern, replacement in _GGUF_NAMES:
            name = re.sub(pattern, replacement, name)
        writer.add_tensor(name, tensor.numpy())
    finish(writer)
