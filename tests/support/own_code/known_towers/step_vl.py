"""Step3-VL 10B and Step 5, made of the tower of transformers' Step 3.7 and other decoders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from engine.protocol.encoder_inputs.payloads import ImagePayload
from safetensors.torch import load_file, save_file
from support.families.published import save_published
from support.own_code.model import OwnCodeModel, fill
from support.vision.grid_models import reference_inputs, write_grid_model
from torch import Tensor


def step_vl(
    directory: Path, *, vocab_size: int = 96, image_token: int = 95, is_fifth: bool = False
) -> OwnCodeModel:
    """Write a Step3-VL 10B, or a Step 5."""
    whole = write_grid_model(directory, "step3p7").model
    size = whole.config.text_config.hidden_size
    file = directory / "model.safetensors"
    tower = {
        name: tensor
        for name, tensor in load_file(file).items()
        if name.startswith(("vision_", "vit_"))
    }
    assert any("resblocks" in name for name in tower)
    config = json.loads((directory / "config.json").read_text())
    vision = config["vision_config"]
    if is_fifth:
        names = "Step5ForConditionalGeneration", "step5_vl"
        decoder: Any = save_published("Step5", directory, hidden_size=size, vocab_size=vocab_size)
        save_file(tower | load_file(file), file)
        text = json.loads((directory / "config.json").read_text())
    else:
        names = "StepVLForConditionalGeneration", "step_robotics"
        decoder = _qwen3(size, vocab_size)
        save_file(tower | {k: x.contiguous() for k, x in decoder.state_dict().items()}, file)
        text = decoder.config.to_dict()
    own = {"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
    vision = {name: vision[other] for name, other in own.items()} | {
        name: vision[name] for name in ("image_size", "patch_size", "mlp_ratio", "hidden_act")
    }
    published: dict[str, Any] = {
        "architectures": [names[0]],
        "model_type": names[1],
        "image_token_id": image_token,
        "projector_bias": False,
        "text_config": text,
        "vision_config": vision | {"use_cls_token": False, "use_ln_post": False},
    }
    (directory / "config.json").write_text(json.dumps(published))

    def encode(payloads: Sequence[ImagePayload]) -> list[Tensor]:
        found: list[Tensor] = whole.get_image_features(
            **reference_inputs("step3p7", payloads)
        ).pooler_output
        return found

    return OwnCodeModel(decoder, encode, image_token)


def _qwen3(size: int, vocab_size: int) -> Any:
    decoder = transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=size,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=2048,
        )
    )
    fill(decoder)
    return decoder
