"""DSpark heads for MiniMax-M3 and Muse Glimmer, with reference implementations on the layers of transformers."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import save_file
from support.drafts.draft_heads import dflash_hidden_states, randomize, write_dflash
from support.drafts.dspark_heads import SIZE, write_markov_head
from support.drafts.eagle_heads import LATENT
from support.drafts.models_with_heads import NUM_DRAFTS, Head, dflash_head, write_model
from support.families.experts import WITH_EXPERTS
from support.families.published import save_published
from torch import Tensor
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as minimax
from transformers.models.muse_glimmer import modeling_muse_glimmer as muse

MASK, INPUTS, WINDOW = 5, [0, 2], 12


def _minimax3(path: Path) -> Any:
    """Write a MiniMax-M3 with 6 layers, two of which choose blocks of keys."""
    _, fields = WITH_EXPERTS["minimax-m3"]
    kinds = [*["full_attention"] * 2, *["minimax_m3_sparse"] * 2, *["full_attention"] * 2]
    fields = fields | {
        "num_hidden_layers": 6,
        "layer_types": kinds,
        "mlp_layer_types": [*["dense"] * 4, *["sparse"] * 2],
        "tie_word_embeddings": False,
    }
    return write_model(path, "MiniMaxM3VLTextConfig", "MiniMaxM3VLForCausalLM", fields)


class _Block(NamedTuple):
    """The modules of a head outside its layers, and the function that completes a layer after its attention."""

    model: Any
    made: Any
    projection: Tensor
    norm: Callable[[Tensor], Tensor]
    embed: Callable[[Tensor], Tensor]
    finish: Callable[[Any, Tensor, Tensor], Tensor]
    window: int | None = None

    def states(self, tokens: list[int]) -> Tensor:
        """Return the outputs of the last token and of mask tokens. A window does not hide tokens of the block."""
        ids = torch.tensor([tokens[:-1]])
        states = self.model.model(ids, output_hidden_states=True).hidden_states
        context_TE = torch.cat([states[layer + 1][0] for layer in INPUTS], -1)
        context_TD = self.norm(context_TE @ self.projection.T)
        x_TD = self.embed(torch.tensor([tokens[-1], *[MASK] * (NUM_DRAFTS - 1)]))
        begin, places = len(context_TD), torch.arange(len(context_TD) + len(x_TD))
        sees = torch.ones(len(places), len(places), dtype=torch.bool)
        if self.window is not None:
            sees = (places > places[:, None] - self.window) | (places >= begin)
        mask = torch.where(sees, 0.0, -torch.inf)[None, None]
        tables = self.made.rotary_emb(x_TD[None], places[None])
        for layer in self.made.layers:
            inputs_TD = torch.cat((context_TD, layer.input_layernorm(x_TD)))
            attended_TD = layer.self_attn(inputs_TD[None], tables, mask)[0][0, begin:]
            x_TD = self.finish(layer, x_TD, attended_TD)
        return self.made.norm(x_TD)


def _add_mlp(layer: Any, x_TD: Tensor, attended_TD: Tensor) -> Tensor:
    x_TD = x_TD + attended_TD
    return x_TD + layer.mlp(layer.post_attention_layernorm(x_TD))


def _in_order(
    states: Callable[[list[int]], Tensor],
    logits: Callable[[Tensor], Tensor],
    bias: Callable[[Tensor, int, bool], Tensor],
) -> Callable[[list[int]], list[int]]:
    """Return a function that chooses each draft with the bias of the one before it."""

    @torch.no_grad()
    def drafts(tokens: list[int]) -> list[int]:
        found = tokens[-1:]
        for index, hidden_D in enumerate(states(tokens)):
            scores = logits(hidden_D) + bias(hidden_D, found[-1], index == 0)
            found.append(int(scores.argmax()))
        return found[1:]

    return drafts


def _write(
    directory: Path, architecture: str, config: dict[str, Any], tensors: dict[str, Tensor]
) -> Callable[[Tensor, int, bool], Tensor]:
    """Write a head with a Markov head. Return the bias of its logits."""
    directory.mkdir()
    file = directory / "config.json"
    file.write_text(json.dumps(config))
    copies = {name: each.detach().clone() for name, each in tensors.items()}
    save_file(copies, directory / "model.safetensors")
    vocab_size = config.get("text_config", config)["vocab_size"]
    bias = write_markov_head(directory, "vanilla", vocab_size, vocab_size)
    file.write_text(json.dumps(config | {"architectures": [architecture]}))
    return bias


def dspark_on_minimax3(path: Path) -> Head:
    """A DSpark head as published for MiniMax-M3, with layers of Qwen3 that have windows."""
    model, directory = _minimax3(path), path / "head"
    made = write_dflash(directory, ["sliding_attention"] * 3)
    bias = write_markov_head(directory, "vanilla", *[model.config.vocab_size] * 2)
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["dflash_config"] |= {
        "block_size": config.pop("block_size"),
        "swa_window_size": config.pop("sliding_window"),
        "use_swa": True,
    }
    file.write_text(json.dumps(config))

    def states(tokens: list[int]) -> Tensor:
        return dflash_hidden_states(model, made, tokens, NUM_DRAFTS, from_last=True)

    return dflash_head(model, path, _in_order(states, model.lm_head, bias))


def dspark_of_minimax3(path: Path) -> Head:
    """A DSpark head as published for MiniMax-M3.1, with layers of MiniMax-M3 that have windows."""
    model = _minimax3(path)
    sizes = model.config.to_dict() | {"num_hidden_layers": 3}
    kinds = {"layer_types": ["full_attention"] * 3, "mlp_layer_types": ["dense"] * 3}
    made = randomize(
        minimax.MiniMaxM3VLTextModel._from_config(
            transformers.MiniMaxM3VLTextConfig(**sizes | kinds), attn_implementation="eager"
        )
    )
    norm = randomize(copy.deepcopy(made.norm))
    projection = torch.randn(SIZE, 2 * SIZE) * 0.1
    start, layers = "language_model.model.dspark.", made.layers.state_dict()
    tensors = {
        start + re.sub(r"^(\d+)", r"layers.\1.decoder_layer", name): each
        for name, each in layers.items()
    }
    tensors |= {
        f"{start}fc.weight": projection,
        f"{start}hidden_norm.weight": norm.weight,
        f"{start}final_norm.weight": made.norm.weight,
    }
    text = sizes | {
        "layer_types": ["sliding_attention"] * 3,
        "sliding_window": WINDOW,
        "moe_layer_freq": [0] * 3,
        "mlp_layer_types": None,
        "dspark_block_size": 8,
        "dspark_noise_token_id": MASK,
        "dspark_target_layer_ids": INPUTS,
    }
    config = {"text_config": text}
    bias = _write(path / "head", "DSparkMiniMaxDraftModel", config, tensors)

    embed = model.get_input_embeddings()
    block = _Block(model, made, projection, norm, embed, _add_mlp, WINDOW)
    return dflash_head(model, path, _in_order(block.states, model.lm_head, bias))


def dspark_of_muse(path: Path) -> Head:
    """A DSpark head with layers of Muse Glimmer, and an embedding and an output projection of its own."""
    model = write_model(path, "Qwen3Config", "Qwen3ForCausalLM", {"num_hidden_layers": 6})
    text = transformers.MuseGlimmerTextConfig(
        **model.config.to_dict()
        | {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention"] * 3,
            "layer_rope_theta": [1e4] * 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "post_norm_eps": 0.01,
            "sliding_window": 2048,
            "final_logit_softcapping": 4.0,
            "output_multiplier": 0.4,
        }
    )
    made = randomize(muse.MuseGlimmerTextModel._from_config(text, attn_implementation="eager"))
    norm = muse.MuseGlimmerRMSNorm(SIZE, eps=text.rms_norm_eps)
    norm.weight.data.uniform_(0.5, 1.5)
    projection, matrix = torch.randn(SIZE, 2 * SIZE) * 0.1, torch.randn(text.vocab_size, SIZE)
    own = {"fc.weight": projection, "hidden_norm.weight": norm.weight, "lm_head.weight": matrix}
    fields = {"block_size": 8, "mask_token_id": MASK, "target_layer_ids": INPUTS}
    tensors = made.state_dict() | own
    bias = _write(path / "head", "MuseGlimmerDSparkModel", text.to_dict() | fields, tensors)

    def embed(ids_T: Tensor) -> Tensor:
        return made.embed_tokens.weight[ids_T]

    def finish(layer: Any, x_TD: Tensor, attended_TD: Tensor) -> Tensor:
        x_TD = x_TD + layer.post_attention_layernorm(attended_TD)
        fed_TD = layer.mlp(layer.pre_feedforward_layernorm(x_TD))
        return x_TD + layer.post_feedforward_layernorm(fed_TD)

    def logits(hidden_D: Tensor) -> Tensor:
        return 4 * torch.tanh(0.4 * (matrix @ hidden_D) / 4)

    block = _Block(model, made, projection, norm, embed, finish)
    return dflash_head(model, path, _in_order(block.states, logits, bias))


def dspark_of_kimi_k3(path: Path) -> Head:
    """A DSpark head of Kimi K3, with latent attention, that reads sums of the outputs of layers."""
    model: Any = save_published("KimiK3", path)
    size = model.config.hidden_size
    fields = LATENT | {
        "hidden_size": size,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "vocab_size": model.config.vocab_size,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }
    text = transformers.DeepseekV3Config(**fields | {"first_k_dense_replace": 3})
    made = randomize(deepseek.DeepseekV3Model._from_config(text, attn_implementation="eager"))
    norm = randomize(copy.deepcopy(made.norm))
    projection = torch.randn(size, 2 * size) * 0.1
    tensors = {f"layers.{name}": each for name, each in made.layers.state_dict().items()}
    tensors |= {
        "context_proj.weight": projection,
        "context_norm.weight": norm.weight,
        "final_norm.weight": made.norm.weight,
        "embed_tokens.weight": model.model.embed_tokens.weight,
    }
    own = {"block_size": 8, "mask_token_id": MASK, "target_layer_ids": INPUTS}
    bias = _write(path / "head", "K3DSparkModel", fields | own, tensors)
    embed = model.get_input_embeddings()
    block = _Block(model, made, projection, norm, embed, _add_mlp)
    head = dflash_head(model, path, _in_order(block.states, model.lm_head, bias))
    return head._replace(has_states=True, block_size=96)


DSPARK_FAMILIES = [dspark_on_minimax3, dspark_of_minimax3, dspark_of_muse, dspark_of_kimi_k3]
