"""MobileVLM and MobileVLM V2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import load_file
from support.checkpoints.tiny import DECODER_SIZES
from support.gguf.finish import finish
from support.mmproj.header import tower_sizes, vision_writer
from support.own_code.model import OwnCodeModel, fill, normalized, write
from torch import Tensor, nn
from torch.nn import functional as F

_SIZE, _OUTPUT = 48, 64
_VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": _SIZE,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 4,
}


class _ChannelNorm(nn.LayerNorm):
    """A norm of the channels of each place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class _InvertedResidual(nn.Module):
    def __init__(self, stride: int) -> None:
        super().__init__()
        depthwise = nn.Conv2d(_OUTPUT, _OUTPUT, 3, stride, 1, groups=_OUTPUT, bias=False)
        inner = _OUTPUT // 4
        excitation = {"fc1": nn.Conv2d(_OUTPUT, inner, 1), "fc2": nn.Conv2d(inner, _OUTPUT, 1)}
        self.stride = stride
        self.block = nn.ModuleList(
            (
                nn.Sequential(depthwise, _ChannelNorm(_OUTPUT)),
                nn.ModuleDict(excitation),
                nn.Sequential(nn.Conv2d(_OUTPUT, _OUTPUT, 1, bias=False), _ChannelNorm(_OUTPUT)),
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        first, excitation, last = self.block
        y = F.hardswish(first(x))
        inner = F.relu(excitation["fc1"](F.adaptive_avg_pool2d(y, 1)))
        y = last(y * F.hardsigmoid(excitation["fc2"](inner)))
        found: Tensor = y + x if self.stride == 1 else y
        return found


class _Projector(nn.Module):
    """The projector of the first version, with the names of its checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Identity(), nn.Linear(_SIZE, _OUTPUT), nn.GELU(), nn.Linear(_OUTPUT, _OUTPUT))
        self.model = nn.ModuleDict(
            {
                "mlp": nn.Sequential(*layers),
                "mb_block": nn.Sequential(
                    nn.Identity(), _InvertedResidual(1), _InvertedResidual(2)
                ),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.model["mlp"](x).T.unflatten(1, (6, 6))
        found: Tensor = self.model["mb_block"](x[None])[0].flatten(1).T
        return found


class _ProjectorV2(nn.Module):
    """The projector of the second version, with the names of its checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(_SIZE, _OUTPUT), nn.GELU(), nn.Linear(_OUTPUT, _OUTPUT))
        self.mlp = nn.ModuleDict({"mlp": nn.Sequential(*layers)})
        convolution = nn.Conv2d(_OUTPUT, _OUTPUT, 3, 1, 1, groups=_OUTPUT)
        self.peg = nn.ModuleDict({"peg": nn.Sequential(convolution)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.mlp["mlp"](x).T.unflatten(1, (6, 6))
        x = F.adaptive_avg_pool2d(x[None], 3)
        found: Tensor = (self.peg["peg"](x) + x)[0].flatten(1).T
        return found


def mobilevlm(
    directory: Path, *, vocab_size: int = 96, image_token: int = 95, version: int = 2
) -> OwnCodeModel:
    """Write a MobileVLM in a directory, with the config that Engine makes of its mmproj file."""
    text: dict[str, Any] = DECODER_SIZES | {"vocab_size": vocab_size, "tie_word_embeddings": False}
    decoder = transformers.LlamaForCausalLM(transformers.LlamaConfig(**text))
    tower = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**_VISION))
    projector = _Projector() if version == 1 else _ProjectorV2()
    fill(decoder, tower, projector)

    def encode(pixels: Tensor) -> Tensor:
        states = tower(pixels[None], output_hidden_states=True).hidden_states
        found: Tensor = projector(states[-2][0, 1:])
        return found

    config = {
        "architectures": ["MobileLlamaForCausalLM"],
        "model_type": "mobilevlm",
        "mm_projector_type": "ldpnet" if version == 1 else "ldpnetv2",
        "image_token_index": image_token,
        "text_config": text | {"model_type": "llama"},
        "vision_config": _VISION,
    }
    processor = {"image_processor_type": "CLIPImageProcessor", "size": {"height": 24, "width": 24}}
    write(directory, config, {"": tower, "model.mm_projector.": projector}, processor)
    return OwnCodeModel(
        decoder, lambda images: [encode(normalized(each)) for each in images], image_token
    )


_NAMES = (
    ("model.mm_projector.model.", "mm.model."),
    ("model.mm_projector.mlp.mlp.", "mm.model.mlp."),
    ("model.mm_projector.peg.peg.", "mm.model.peg."),
    ("vision_model.", "v."),
    ("encoder.layers", "blk"),
    ("embeddings.", ""),
    ("_proj", ""),
    ("self_attn.", "attn_"),
    ("layer_norm", "ln"),
    ("layrnorm", "ln"),
    ("mlp.fc1", "ffn_down"),
    ("mlp.fc2", "ffn_up"),
    ("embedding", "embd"),
)


def write_mobilevlm_mmproj(path: Path, checkpoint: Path) -> None:
    """Write the tower of a MobileVLM in a directory as the mmproj file that llama.cpp's old converter makes of it."""
    config = json.loads((checkpoint / "config.json").read_text())
    vision, last = config["vision_config"], config["vision_config"]["num_hidden_layers"] - 1
    is_first = config["mm_projector_type"] == "ldpnet"
    writer = vision_writer(
        path,
        "ldp" if is_first else "ldpv2",
        tower_sizes(vision) | {"image_size": vision["image_size"], "block_count": last},
        eps=1e-5,
        uses_gelu=False,
        mean=[0.48145466, 0.4578275, 0.40821073],
        std=[0.26862954, 0.26130258, 0.27577711],
    )
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if "post_layernorm" in name or f"layers.{last}." in name or "position_ids" in name:
            continue
        name = name if name.startswith("model.") else f"vision_model.{name}"
        for theirs, ours in _NAMES:
            name = name.replace(theirs, ours)
        # The projector has no dimensions of size 1.
        writer.add_tensor(name, (tensor.squeeze() if name.startswith("mm.") else tensor).numpy())
    finish(writer)
