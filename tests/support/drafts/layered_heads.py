"""Models with several layers for multi-token prediction, and a reference that computes all layers for all tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers
from engine.protocol.config import ProposerMethod, SpeculativeConfig
from safetensors.torch import load_file, save_file
from support.checkpoints.tiny import QWEN3, sentencepiece_tokenizer
from support.drafts.draft_heads import Fusion, add_tensors, randomize
from support.drafts.models_with_heads import Head, run_layer
from support.drafts.prediction_layers import (
    Names,
    glm5_mtp,
    hunyuan3_mtp,
    minimax3_mtp,
    step3_mtp,
    write_prediction_layer,
)
from support.families.indexers import WITH_INDEXERS
from support.families.recurrent import GROUPED_KEYS
from torch import Tensor, nn
from transformers.models.llama import modeling_llama as llama


class _Layer(NamedTuple):
    """The computation of a layer, and its output projection."""

    run: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    project: Callable[[Tensor], Tensor]


def _with_layers(
    path: Path,
    make: Callable[[Path], Head],
    number: str,
    following: Callable[[int], str],
    count: int,
) -> Head:
    """Write a model with `count` layers, made by one function with different random numbers.

    `number` matches the beginning of the first layer's names, which `following` returns for later layers.
    """
    head = make(path)
    layers = [_Layer(head.run, head.logits or head.model.lm_head)]
    for index in range(1, count):
        torch.manual_seed(20 + index)
        other = make(path / f"layer{index}")
        stored = load_file(other.path / "model.safetensors")
        add_tensors(
            path,
            {
                re.sub(f"^{number}", following(index), name): tensor
                for name, tensor in stored.items()
                if re.match(number, name)
            },
        )
        layers.append(_Layer(other.run, other.logits or head.model.lm_head))
    config = json.loads((path / "config.json").read_text())
    config |= {"num_nextn_predict_layers": count}
    (path / "config.json").write_text(json.dumps(config))
    return head._replace(
        drafts=lambda tokens: _drafts(head.model, layers, tokens, 3), logits=None, token_ids=None
    )


@torch.no_grad()
def _drafts(model: Any, layers: list[_Layer], tokens: list[int], count: int) -> list[int]:
    """Return the drafts after all tokens, the last of which the model has not computed."""
    embed = model.get_input_embeddings()
    hidden_TD = model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
    drafts: list[int] = []
    read_TD = hidden_TD
    for index in range(count):
        number = min(index, len(layers) - 1)
        if index > number:
            # The last layer goes on after its last position, from its own output there.
            hidden_TD = torch.cat((read_TD, hidden_TD[-1:]))
        read_TD = hidden_TD
        embedded_TD = embed(torch.tensor([*tokens, *drafts][1 + number :]))
        chosen_TD, hidden_TD = layers[number].run(embedded_TD, read_TD)
        drafts.append(int(layers[number].project(chosen_TD[-1]).argmax()))
    return drafts


def step3_layers(path: Path) -> Head:
    """Three layers of Step 3.5, each with an output projection of its own."""
    start = r"model\.layers\.5\."
    return _with_layers(path, step3_mtp, start, lambda index: f"model.layers.{5 + index}.", 3)


def hunyuan3_layers(path: Path) -> Head:
    """Two layers of Hunyuan 3, the second of which computes two drafts."""
    start = r"model\.layers\.3\."
    return _with_layers(path, hunyuan3_mtp, start, lambda index: f"model.layers.{3 + index}.", 2)


def glm5_layers(path: Path) -> Head:
    """Three layers of GLM-5, which choose keys."""
    start = r"model\.layers\.3\."
    return _with_layers(path, glm5_mtp, start, lambda index: f"model.layers.{3 + index}.", 3)


def minimax3_layers(path: Path) -> Head:
    """Three layers of MiniMax-M3, which read hidden states before their final norms."""
    start = r"model\.mtp\.layers\.0\."
    return _with_layers(path, minimax3_mtp, start, lambda index: f"model.mtp.layers.{index}.", 3)


class _OneStream(nn.Module):
    """A layer of Hy4 without hyper-connections."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, **inputs: Any) -> Tensor:
        layer = self.layer
        x = x + layer.self_attn(hidden_states=layer.input_layernorm(x), **inputs)[0]
        return x + layer.mlp(layer.post_attention_layernorm(x))


def hy4_mtp(path: Path) -> Head:
    """The layer of Hy4, which has one residual stream and chooses keys, in a model with three streams."""
    start = "model.mtp_layers.0."
    names = Names(
        *(start + part for part in ("enorm", "hnorm", "eh_proj", "final_layernorm")),
        {r"model\.layers\.2\.(?!.*hc)": start},
    )
    _, fields = WITH_INDEXERS["hy4"]
    return write_prediction_layer(
        path,
        "HYV4",
        fields | {"tie_word_embeddings": False},
        names,
        lambda donor, x: run_layer(_OneStream(donor.model.layers[2]), donor.model.rotary_emb, x),
    )


def hy4_layers(path: Path) -> Head:
    """Two layers of Hy4."""
    start = r"model\.mtp_layers\.0\."
    return _with_layers(path, hy4_mtp, start, lambda index: f"model.mtp_layers.{index}.", 2)


def glm5_next_mtp(path: Path) -> Head:
    """The layer of GLM-5.3-Flash, which has one residual stream, in a model with recurrent layers and three streams."""
    model, donor = (_glm5_next_text(path / name) for name in (".", "donor"))
    start, config, size = "model.layers.4.", model.config, model.config.hidden_size
    fusion = Fusion(size, has_norms=True)
    norm = llama.LlamaRMSNorm(size, config.rms_norm_eps)
    for module in (fusion, norm):
        randomize(module)
    for module in (fusion.embedding_norm, fusion.hidden_norm):
        module.variance_epsilon = config.rms_norm_eps
    tensors = {
        re.sub(r"^.*layers\.3\.", start, name): tensor
        for name, tensor in load_file(donor.path / "model.safetensors").items()
        if re.match(r"^.*layers\.3\.(?!.*hc)", name)
    }
    tensors |= {
        f"{start}enorm.weight": fusion.embedding_norm.weight.detach(),
        f"{start}hnorm.weight": fusion.hidden_norm.weight.detach(),
        f"{start}eh_proj.weight": fusion.projection.weight.detach(),
        f"{start}shared_head.norm.weight": norm.weight.detach(),
    }
    add_tensors(path, tensors)
    layer = _OneStream(donor.model.layers[3])

    def run(embedded_TD: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        fused_TD = fusion(embedded_TD, hidden_TD, has_hidden_first=False)
        mask = torch.ones((1, len(fused_TD)), dtype=torch.bool)
        out = norm(layer(fused_TD[None], attention_mask=mask, position_embeddings=None)[0])
        return out, out

    speculative = SpeculativeConfig(3, ProposerMethod.MTP)
    return Head(model, path, speculative, run, has_states=True, block_size=96)


def _glm5_next_text(path: Path) -> Any:
    """Write the text of a GLM-5.3-Flash. Return its modules and its path."""
    tokenizer = sentencepiece_tokenizer()
    fields = QWEN3 | GROUPED_KEYS | {"num_key_value_heads": 4, "vocab_size": len(tokenizer)}
    fields |= {"tie_word_embeddings": False, "num_nextn_predict_layers": 1, "pad_token_id": 0}
    config = transformers.Glm5NextConfig(text_config=fields, vision_config={"depth": 1})
    whole = transformers.Glm5NextForConditionalGeneration(config).float()
    randomize(whole)
    path.mkdir(exist_ok=True)
    whole.save_pretrained(path)
    tokenizer.save_pretrained(path)
    tensors = {
        name.replace("language_model.", ""): tensor
        for name, tensor in load_file(path / "model.safetensors").items()
        if "visual" not in name
    }
    save_file(tensors, path / "model.safetensors")
    written = whole.config.text_config.to_dict()
    written |= {"architectures": ["Glm5NextForCausalLM"], "model_type": "glm5_next_text"}
    (path / "config.json").write_text(json.dumps(written))
    return SimpleNamespace(
        config=whole.config.text_config,
        model=whole.model.language_model,
        lm_head=whole.lm_head,
        get_input_embeddings=whole.get_input_embeddings,
        generate=whole.generate,
        path=path,
    )


LAYERED_HEADS = [
    glm5_next_mtp,
    hy4_layers,
    step3_layers,
    hunyuan3_layers,
    glm5_layers,
    minimax3_layers,
]
