"""The DSpark head of DeepSeek-V4, on the layers of transformers."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from support.drafts.draft_heads import randomize
from support.families import SMALL
from support.families.compressed import COMPRESSED
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek

NOISE, BLOCK, RANK, OUTPUTS, NUM_LAYERS = 9, 6, 8, [0, 2, 3], 3
_NAMES = (
    (r"self_attn\.sinks", "attn.attn_sink"),
    (r"self_attn\.([qo])_([ab])_proj", r"attn.w\1_\2"),
    (r"self_attn\.kv_proj", "attn.wkv"),
    (r"self_attn\.q_a_norm", "attn.q_norm"),
    (r"self_attn\.", "attn."),
    (r"input_layernorm", "attn_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"attn_hc\.", "hc_attn_"),
    (r"ffn_hc\.", "hc_ffn_"),
)
"""The names of transformers, and those of published files."""


class DeepseekV4Block:
    """Three layers without entries, which read means of a model's streams. `model` is that model."""

    def __init__(self, model: Any) -> None:
        self._model, self._outputs = model, list[Tensor]()
        kinds = ["sliding_attention"] * NUM_LAYERS, ["moe"] * NUM_LAYERS
        sizes = {"num_hidden_layers": NUM_LAYERS, "layer_types": kinds[0]}
        config = transformers.DeepseekV4Config(
            **model.config.to_dict() | sizes | {"mlp_layer_types": kinds[1]}
        )
        made = deepseek.DeepseekV4Model._from_config(config, attn_implementation="eager")
        self._made = randomize(made)
        size, vocab_size = config.hidden_size, config.vocab_size
        self._projection = torch.randn(size, len(OUTPUTS) * size) * 0.1
        self._norm = randomize(copy.deepcopy(made.norm))
        self._vectors, self._matrix = torch.randn(2, vocab_size, RANK)
        for layer in model.model.layers:
            layer.register_forward_hook(lambda _, __, streams: self._outputs.append(streams[0]))

    def stored(self) -> dict[str, Tensor]:
        """Return the tensors. Those of experts have the names of transformers."""
        found = {
            "mtp.0.main_proj.weight": self._projection,
            "mtp.0.main_norm.weight": self._norm.weight,
            "mtp.2.norm.weight": self._made.norm.weight,
            "mtp.2.markov_head.markov_w1.weight": self._vectors,
            "mtp.2.markov_head.markov_w2.weight": self._matrix,
            "mtp.2.confidence_head.proj.weight": torch.zeros(1, 4),
        }
        for name, tensor in self._made.hc_head.state_dict().items():
            found[f"mtp.2.hc_head_{name.removeprefix('hc_')}"] = tensor
        for name, tensor in self._made.layers.state_dict().items():
            for pattern, replacement in _NAMES:
                name = re.sub(pattern, replacement, name)
            found[f"mtp.{name}"] = tensor
        return {name: tensor.detach().clone() for name, tensor in found.items()}

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Return the drafts after tokens, the last of which the model has not computed."""
        self._outputs.clear()
        self._model(torch.tensor([tokens[:-1]]), use_cache=False)
        means = [self._outputs[layer].mean(1) for layer in OUTPUTS]
        main_TD = self._norm(torch.cat(means, 1) @ self._projection.T)
        ids = torch.tensor([tokens[-1], *[NOISE] * (count - 1)])
        begin, made = len(main_TD), self._made
        streams = self._model.get_input_embeddings()(ids)[None, :, None]
        streams = streams.repeat(1, 1, made.config.hc_mult, 1)
        places = torch.arange(begin + count)
        sees = places >= begin - made.config.sliding_window
        mask = torch.where(sees, 0.0, -torch.inf).expand(1, 1, len(places), -1)
        tables = {"main": made.rotary_emb(streams, places[None], "main")}
        for layer in made.layers:
            post, mixing, x = layer.attn_hc(streams)
            inputs = torch.cat((main_TD[None], layer.input_layernorm(x)), 1)
            attended = layer.self_attn(inputs, tables, places[None], mask)[0][:, begin:]
            streams = _mixed(streams, attended, post, mixing)
            post, mixing, x = layer.ffn_hc(streams)
            fed = layer.mlp(layer.post_attention_layernorm(x), input_ids=ids[None])
            streams = _mixed(streams, fed, post, mixing)
        found = tokens[-1:]
        for hidden_D in made.norm(made.hc_head(streams))[0]:
            biased = self._model.lm_head(hidden_D) + self._matrix @ self._vectors[found[-1]]
            found.append(int(biased.argmax()))
        return found[1:]


def _mixed(streams: Tensor, block: Tensor, post: Tensor, mixing: Tensor) -> Tensor:
    return post[..., None] * block[..., None, :] + mixing.transpose(-1, -2) @ streams


def save_deepseek_v4_block(path: Path) -> tuple[Any, DeepseekV4Block]:
    """Save a random model with its head, and return references for both."""
    torch.manual_seed(0)
    config = transformers.DeepseekV4Config(**SMALL | COMPRESSED)
    model: Any = randomize(
        transformers.DeepseekV4ForCausalLM._from_config(config, attn_implementation="eager")
    )
    model.save_pretrained(path)
    head = DeepseekV4Block(model)
    file = path / "model.safetensors"
    save_file(load_file(file) | head.stored(), file)
    fields: dict[str, Any] = json.loads((path / "config.json").read_text())
    fields |= {
        "dspark_block_size": BLOCK,
        "dspark_noise_token_id": NOISE,
        "dspark_target_layer_ids": OUTPUTS,
    }
    (path / "config.json").write_text(json.dumps(fields))
    return model, head
