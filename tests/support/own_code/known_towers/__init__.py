"""Models of which transformers has the tower and the decoder, but not the projection between them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from engine.protocol.encoder_inputs.payloads import ImagePayload
from safetensors.torch import load_file, save_file
from support.checkpoints.tiny import DECODER_SIZES
from support.own_code.model import OwnCodeModel, fill, normalized, qwen_patches, write
from torch import Tensor, nn
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen

_PATCH, _SIZE = 4, 48
_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 8 * 8 * 4,
    "max_pixels": 8 * 8 * 60,
    "patch_size": _PATCH,
    "merge_size": 2,
    "temporal_patch_size": 2,
}


def _text(vocab_size: int) -> dict[str, Any]:
    return DECODER_SIZES | {"vocab_size": vocab_size, "tie_word_embeddings": False}


def _qwen_tower(text: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the tower of a Qwen2-VL and its config."""
    config = {
        "model_type": "qwen2_vl",
        "depth": 3,
        "embed_dim": _SIZE,
        "hidden_size": text["hidden_size"],
        "num_heads": 4,
        "mlp_ratio": 2,
        "patch_size": _PATCH,
    }
    made = qwen.Qwen2VLVisionConfig(**config, _attn_implementation="eager")
    return qwen.Qwen2VisionTransformerPretrainedModel(made), config


def points(directory: Path, *, vocab_size: int = 96, image_token: int = 95) -> OwnCodeModel:
    """Write a POINTS 1.5, whose projection is not a part of its tower."""
    text = _text(vocab_size)
    decoder = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**text))
    tower, vision = _qwen_tower(text)
    fill(decoder, tower)
    # The projection is named like a part of the model.
    merger, encoder = tower.merger, nn.ModuleDict(dict(tower.named_children()))
    del encoder["merger"]
    config = {
        "architectures": ["POINTSV15ChatModel"],
        "model_type": "pointsv1.5_chat",
        "llm_config": text | {"model_type": "qwen2"},
        "vision_config": vision,
    }
    parts = {"llm.": decoder, "vision_encoder.": encoder, "vision_projector.": merger}
    write(directory, config, parts, _PROCESSOR)
    return OwnCodeModel(
        decoder,
        lambda images: [tower(*qwen_patches(x, _PATCH)).pooler_output for x in images],
        image_token,
    )


def sarashina2(directory: Path, *, vocab_size: int = 96, image_token: int = 95) -> OwnCodeModel:
    """Write a Sarashina2-Vision."""
    text = _text(vocab_size)
    decoder = transformers.LlamaForCausalLM(transformers.LlamaConfig(**text))
    tower, vision = _qwen_tower(text)
    norm = nn.LayerNorm(text["hidden_size"])
    fill(decoder, tower, norm)
    config = {
        "architectures": ["Sarashina2VisionForCausalLM"],
        "model_type": "sarashina2_vision",
        "image_token_index": image_token,
        "text_config": text | {"model_type": "llama"},
        "vision_config": vision,
    }
    write(directory, config, {"llm.": decoder, "visual.": tower, "norm.": norm}, _PROCESSOR)
    return OwnCodeModel(
        decoder,
        lambda images: [norm(tower(*qwen_patches(x, _PATCH)).pooler_output) for x in images],
        image_token,
    )


def phi4_siglip(directory: Path, *, vocab_size: int = 96, image_token: int = 95) -> OwnCodeModel:
    """Write a Phi-4-reasoning-vision, whose features are the inputs of the last layer of a SigLIP 2."""
    text = _text(vocab_size) | {"pad_token_id": 0}
    decoder = transformers.Phi3ForCausalLM(transformers.Phi3Config(**text))
    sizes = {
        "model_type": "siglip2_vision_model",
        "hidden_size": _SIZE,
        "intermediate_size": 80,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_patches": 36,
        "patch_size": _PATCH,
        "vision_use_head": False,
    }
    tower = transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**sizes))
    output = text["hidden_size"]
    projection = nn.Sequential(nn.Linear(_SIZE, output), nn.GELU(), nn.Linear(output, output))
    fill(decoder, tower, projection)

    def encode(payload: ImagePayload) -> Tensor:
        rows, columns = payload.height // _PATCH, payload.width // _PATCH
        cells = normalized(payload).view(3, rows, _PATCH, columns, _PATCH)
        patches = cells.permute(1, 3, 2, 4, 0).reshape(1, rows * columns, -1)
        mask, shape = torch.ones(1, rows * columns), torch.tensor([[rows, columns]])
        states = tower(patches, mask, shape, output_hidden_states=True).hidden_states
        found: Tensor = projection(states[-2][0])
        return found

    config = text | {
        "architectures": ["Phi4ForCausalLMV"],
        "model_type": "phi4-siglip",
        "mm_projector_type": "mlp2x_gelu",
        "mm_vision_tower": "google/siglip2-so400m-patch16-naflex",
        "min_num_patches": 16,
        "max_num_patches": 120,
        "vision_config": sizes,
    }
    parts = {
        "": decoder,
        "model.vision_tower.vision_tower.": tower,
        "model.mm_projector.": projection,
    }
    write(directory, config, parts, {"image_processor_type": "Siglip2ImageProcessorNoUpscale"})
    return OwnCodeModel(decoder, lambda images: [encode(each) for each in images], image_token)


def _shuffled(x: Tensor, side: int) -> Tensor:
    """Return the rows of each square of 2 x 2 patches after each other."""
    return x.view(side // 2, 2, side // 2, 2, -1).transpose(1, 2).flatten(2).flatten(0, 1)


def _normed_mlp(output: int) -> nn.Sequential:
    norm = nn.LayerNorm(4 * _SIZE)
    return nn.Sequential(norm, nn.Linear(4 * _SIZE, 56), nn.GELU(), nn.Linear(56, output))


def nemotron_vl(directory: Path, *, vocab_size: int = 96, image_token: int = 95) -> OwnCodeModel:
    """Write a Llama Nemotron Nano VL, whose tower is a RADIO."""
    text = _text(vocab_size)
    decoder = transformers.LlamaForCausalLM(transformers.LlamaConfig(**text))
    sizes = {
        "hidden_size": _SIZE,
        "mlp_ratio": 1.5,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "patch_size": _PATCH,
    }
    config = transformers.RadioConfig(
        **sizes,
        max_img_size=24,
        num_cls_tokens=2,
        num_registers=1,
        _attn_implementation="eager",
    )
    tower = transformers.RadioModel(config)
    tower.make_preprocessor_external()
    mlp = _normed_mlp(text["hidden_size"])
    fill(decoder, tower, mlp)
    with torch.no_grad():
        for name, parameter in tower.named_parameters():
            if "layer_scale" in name:
                parameter.fill_(1.0)
    published = {
        "architectures": ["Llama_Nemotron_Nano_VL"],
        "model_type": "Llama_Nemotron_Nano_VL",
        "downsample_ratio": 0.5,
        "force_image_size": 16,
        "projector_hidden_size": 56,
        "ps_version": "v2",
        "vit_hidden_size": _SIZE,
        "llm_config": text | {"architectures": ["LlamaForCausalLM"]},
        "vision_config": sizes | {"args": {"cpe_max_size": 24}},
    }
    tower.save_pretrained(directory)
    own = load_file(directory / "model.safetensors")
    processor = {"image_size": 16, "max_num_tiles": 4, "use_thumbnail": True}
    write(directory, published, {"language_model.": decoder, "mlp1.": mlp}, processor)
    file = directory / "model.safetensors"
    save_file(load_file(file) | {f"vision_model.{name}": x for name, x in own.items()}, file)

    def encode(payload: ImagePayload) -> Tensor:
        found: Tensor = mlp(_shuffled(tower(normalized(payload)[None]).features[0], 4))
        return found

    return OwnCodeModel(decoder, lambda images: [encode(each) for each in images], image_token)


class _SiglipWithMLP:
    """A SigLIP, whose squares of patches an MLP joins, and their names in a checkpoint."""

    def __init__(self) -> None:
        self.sizes = {
            "model_type": "siglip_vision_model",
            "hidden_size": _SIZE,
            "intermediate_size": 80,
            "num_attention_heads": 4,
            "num_hidden_layers": 3,
            "image_size": 16,
            "patch_size": _PATCH,
            "vision_use_head": False,
        }
        self.tower = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**self.sizes))
        self.mlp = _normed_mlp(64)
        self.mlp[1], self.mlp[3] = nn.Linear(4 * _SIZE, 64), nn.Linear(64, 64)
        self.fields = {
            "downsample_ratio": 0.5,
            "force_image_size": 16,
            "select_layer": -1,
            "vision_config": self.sizes,
        }

    def encode(self, images: Sequence[ImagePayload]) -> list[Tensor]:
        states = [self.tower(normalized(each)[None]).last_hidden_state[0] for each in images]
        return [self.mlp(_shuffled(each, 4)) for each in states]


def eagle2_5(directory: Path, *, vocab_size: int = 96, image_token: int = 95) -> OwnCodeModel:
    """Write an Eagle 2.5, whose tower is a SigLIP."""
    text = _text(vocab_size)
    decoder = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**text))
    vision = _SiglipWithMLP()
    fill(decoder, vision.tower, vision.mlp)
    published = vision.fields | {
        "architectures": ["Eagle2_5_VLForConditionalGeneration"],
        "model_type": "eagle_2_5_vl",
        "image_token_index": image_token,
        "max_dynamic_patch": 4,
        "text_config": text | {"model_type": "qwen2"},
    }
    parts = {"language_model.": decoder, "vision_model.vision_model.": vision.tower}
    processor = {"size": {"height": 16, "width": 16}, "use_thumbnail": True}
    write(directory, published, parts | {"mlp1.": vision.mlp}, processor)
    return OwnCodeModel(decoder, vision.encode, image_token)


def llama_nemotron_vl(
    directory: Path,
    *,
    vocab_size: int = 96,
    image_token: int = 95,
    score: nn.Linear | None = None,
) -> OwnCodeModel:
    """Write a Llama Nemotron Embed VL, which has Eagle's tower, or Rerank VL with the head `score`."""
    text = _text(vocab_size)
    decoder = transformers.LlamaModel(transformers.LlamaConfig(**text))
    vision = _SiglipWithMLP()
    fill(decoder, vision.tower, vision.mlp)
    published = vision.fields | {
        "architectures": ["LlamaNemotronVLModel"],
        "model_type": "llama_nemotron_vl",
        "img_context_token_id": image_token,
        "max_input_tiles": 2,
        "llm_config": text | {"model_type": "llama_bidirec", "pooling": "avg"},
    }
    parts = {"language_model.": decoder, "vision_model.": vision.tower, "mlp1.": vision.mlp}
    if score is not None:
        fill(score)
        published["architectures"] = ["LlamaNemotronVLForSequenceClassification"]
        published["llm_config"] |= {"architectures": ["LlamaForCausalLM"], "num_labels": 1}
        parts = {f"model.{name}": part for name, part in parts.items()} | {"score.": score}
    write(directory, published, parts, {})
    (directory / "preprocessor_config.json").unlink()
    (directory / "processor_config.json").write_text(json.dumps({"max_input_tiles": 4}))
    return OwnCodeModel(decoder, vision.encode, image_token)


def locate_anything(
    directory: Path, *, vocab_size: int = 96, image_token: int = 95
) -> OwnCodeModel:
    """Write a LocateAnything, whose tower is a MoonViT."""
    text = _text(vocab_size)
    decoder = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**text))
    sizes = {
        "hidden_size": _SIZE,
        "intermediate_size": 80,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "patch_size": _PATCH,
    }
    own = transformers.Kimi_K25Config(
        text_config={"model_type": "qwen2"} | text,
        vision_config=sizes | {"pos_emb_height": 6, "pos_emb_width": 6},
    ).vision_config
    tower = transformers.AutoModel.from_config(own, attn_implementation="eager")
    mlp = _normed_mlp(text["hidden_size"])
    mlp[1], mlp[3] = nn.Linear(4 * _SIZE, 64), nn.Linear(64, 64)
    fill(decoder, tower, mlp)
    published = {
        "architectures": ["LocateAnythingForConditionalGeneration"],
        "model_type": "locateanything",
        "image_token_index": image_token,
        "text_config": text | {"model_type": "qwen2"},
        "vision_config": sizes
        | {
            "model_type": "moonvit",
            "init_pos_emb_height": 6,
            "init_pos_emb_width": 6,
            "merge_kernel_size": [2, 2],
        },
    }
    stored = _moonvit_names(tower.state_dict())
    processor = {"patch_size": _PATCH, "merge_kernel_size": [2, 2], "in_token_limit": 60}
    write(directory, published, {"language_model.": decoder, "mlp1.": mlp}, processor)
    file = directory / "model.safetensors"
    save_file(load_file(file) | {f"vision_model.{name}": x for name, x in stored.items()}, file)

    def encode(payload: ImagePayload) -> Tensor:
        rows, columns = payload.height // _PATCH, payload.width // _PATCH
        cells = normalized(payload).view(3, rows, _PATCH, columns, _PATCH)
        patches = cells.permute(1, 3, 0, 2, 4).reshape(-1, 3, _PATCH, _PATCH)
        states = tower(patches, torch.tensor([[1, rows, columns]]))
        found: Tensor = mlp(states.pooler_output.flatten(1))
        return found

    return OwnCodeModel(decoder, lambda images: [encode(each) for each in images], image_token)


def _moonvit_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a MoonViT with the names in its authors' files."""
    found = {}
    for name, tensor in tensors.items():
        if ".attn.q_proj." in name:
            q, k, v = (tensors[name.replace(".q_", f".{each}_")] for each in "qkv")
            # Elements that are rotated together are neighbors.
            q, k = (x.unflatten(0, (4, 2, -1)).transpose(1, 2).flatten(0, 2) for x in (q, k))
            name, tensor = name.replace("attn.q_proj", "wqkv"), torch.cat((q, k, v))
        elif re.search(r"\.attn\.[kv]_proj\.", name):
            continue
        for pattern, replacement in _MOONVIT_NAMES:
            name = re.sub(pattern, replacement, name)
        found[name] = tensor
    return found


_MOONVIT_NAMES = (
    (r"\.norm1\.", ".norm0."),
    (r"\.norm2\.", ".norm1."),
    (r"\.fc1\.", ".fc0."),
    (r"\.fc2\.", ".fc1."),
    (r"\.attn\.proj\.", ".wo."),
    (r"^layers\.", "encoder.blocks."),
    (r"^final_layernorm\.", "encoder.final_layernorm."),
    (r"^patch_embed\.pos_emb\.\w+$", "patch_embed.pos_emb.weight"),
)
