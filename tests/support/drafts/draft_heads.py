"""Random drafting heads, as modules and as files."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

GEMMA4 = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
    "sliding_window": 10,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


class Fusion(nn.Module):
    """The product that begins a head, and the norms before it."""

    def __init__(self, size: int, *, has_norms: bool, has_bias: bool = False) -> None:
        super().__init__()
        self.embedding_norm = llama.LlamaRMSNorm(size, 1e-6) if has_norms else nn.Identity()
        self.hidden_norm = llama.LlamaRMSNorm(size, 1e-6) if has_norms else nn.Identity()
        self.projection = nn.Linear(2 * size, size, bias=has_bias)

    def forward(self, embedded_TD: Tensor, hidden_TD: Tensor, *, has_hidden_first: bool) -> Tensor:
        parts = [self.embedding_norm(embedded_TD), self.hidden_norm(hidden_TD)]
        return self.projection(torch.cat(parts[::-1] if has_hidden_first else parts, -1))


def randomize(module: nn.Module) -> nn.Module:
    for name, parameter in module.named_parameters():
        is_norm = "norm" in name
        nn.init.normal_(parameter, float(is_norm), 0.1 if is_norm else 0.2)
    return module.eval()


def write_eagle_head(
    directory: Path, config: transformers.LlamaConfig
) -> tuple[llama.LlamaDecoderLayer, Fusion]:
    """Write an EAGLE head as published for Llama 3: `fc`, and a layer without input norm. Return its modules."""
    layer = llama.LlamaDecoderLayer(config, 0)
    layer.input_layernorm = nn.Identity()
    fusion = Fusion(config.hidden_size, has_norms=False, has_bias=True)
    for module in (layer, fusion):
        randomize(module)
    one_layer = transformers.LlamaConfig(**config.to_dict() | {"num_hidden_layers": 1})
    one_layer.architectures = ["LlamaForCausalLM"]
    one_layer.save_pretrained(directory)
    tensors = {f"layers.0.{name}": tensor for name, tensor in layer.state_dict().items()}
    tensors |= {f"fc.{name}": tensor for name, tensor in fusion.projection.state_dict().items()}
    tensors["embed_tokens.weight"] = torch.zeros(config.vocab_size, config.hidden_size)
    save_file(tensors, directory / "model.safetensors")
    return layer, fusion


def add_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Add tensors to a checkpoint of one file."""
    file = path / "model.safetensors"
    save_file({name: t.contiguous() for name, t in {**load_file(file), **tensors}.items()}, file)


def add_qwen3_5_layer(
    path: Path, config: transformers.PretrainedConfig
) -> tuple[nn.Module, Fusion, nn.Module]:
    """Add the layer for multi-token prediction to a checkpoint of Qwen3.5. Return the layer, its begin and its norm.

    Norms are stored as weight - 1.
    """
    size = config.hidden_size
    layer = qwen3_5.Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))
    fusion = Fusion(size, has_norms=True)
    norm = llama.LlamaRMSNorm(size, config.rms_norm_eps)
    for module in (layer, fusion, norm):
        randomize(module)
    tensors = {f"mtp.layers.0.{name}": tensor for name, tensor in layer.state_dict().items()}
    tensors |= {
        "mtp.fc.weight": fusion.projection.weight.detach(),
        "mtp.pre_fc_norm_embedding.weight": fusion.embedding_norm.weight.detach() - 1,
        "mtp.pre_fc_norm_hidden.weight": fusion.hidden_norm.weight.detach() - 1,
        "mtp.norm.weight": norm.weight.detach() - 1,
    }
    add_tensors(path, tensors)
    return layer, fusion, norm


class Eagle3:
    """The computation of an EAGLE-3 head (arXiv 2503.01840), of weights by their published names.

    `config` has the fields of a Llama config. With `norms_residual` the layer adds its output to the normed hidden
    state.
    """

    def __init__(
        self,
        config: dict[str, Any],
        target: transformers.PretrainedConfig,
        *,
        num_states: int = 3,
        norms_residual: bool = False,
    ) -> None:
        self.config, self.norms_residual = config, norms_residual
        size, inner = config["hidden_size"], config["intermediate_size"]
        heads = config["num_attention_heads"] * config["head_dim"]
        kv_heads = config["num_key_value_heads"] * config["head_dim"]
        drafts = config["draft_vocab_size"]
        shapes = {
            "fc.weight": (size, num_states * target.hidden_size),
            "midlayer.self_attn.q_proj.weight": (heads, 2 * size),
            "midlayer.self_attn.k_proj.weight": (kv_heads, 2 * size),
            "midlayer.self_attn.v_proj.weight": (kv_heads, 2 * size),
            "midlayer.self_attn.o_proj.weight": (size, heads),
            "midlayer.mlp.gate_proj.weight": (inner, size),
            "midlayer.mlp.up_proj.weight": (inner, size),
            "midlayer.mlp.down_proj.weight": (size, inner),
            "lm_head.weight": (drafts, size),
        }
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        self.weights = {name: 0.2 * torch.randn(shape) for name, shape in shapes.items()}
        for name in (*(f"midlayer.{norm}" for norm in norms), "norm"):
            self.weights[f"{name}.weight"] = 1 + 0.1 * torch.randn(size)
        chosen = torch.randperm(target.vocab_size)[:drafts].sort().values
        self.token_ids: Tensor = chosen
        self.mapping = {
            "d2t": chosen - torch.arange(drafts),
            "t2d": torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, chosen, True),
        }

    def project(self, states_TE: Tensor) -> Tensor:
        """Return the hidden states that the head reads of the model's, which are side by side."""
        return states_TE @ self.weights["fc.weight"].T

    def run(self, embedded_TD: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden states after the final norm and before it."""
        embedded_TD = self._norm("midlayer.input_layernorm", embedded_TD)
        normed_TD = self._norm("midlayer.hidden_norm", hidden_TD)
        stream_TD = normed_TD if self.norms_residual else hidden_TD
        stream_TD = stream_TD + self.attend(torch.cat((embedded_TD, normed_TD), 1))
        x_TD = self._norm("midlayer.post_attention_layernorm", stream_TD)
        gate, up, down = (
            self.weights[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        stream_TD = stream_TD + (nn.functional.silu(x_TD @ gate.T) * (x_TD @ up.T)) @ down.T
        return self._norm("norm", stream_TD), stream_TD

    def logits(self, normed_TD: Tensor) -> Tensor:
        """Return the logits of `token_ids`."""
        return normed_TD @ self.weights["lm_head.weight"].T

    def _norm(self, name: str, x_TD: Tensor) -> Tensor:
        variance = x_TD.pow(2).mean(1, keepdim=True)
        return (
            self.weights[f"{name}.weight"] * x_TD * (variance + self.config["rms_norm_eps"]).rsqrt()
        )

    def norm_head(self, name: str, x_THD: Tensor) -> Tensor:
        """Return queries, keys or values (q, k, v) after their norm."""
        return x_THD

    def attend(self, x_TE: Tensor) -> Tensor:
        """Return the output of attention."""
        count, size = len(x_TE), self.config["head_dim"]
        query_THD, key_THD, value_THD = (
            self.norm_head(
                name,
                (x_TE @ self.weights[f"midlayer.self_attn.{name}_proj.weight"].T).view(
                    count, -1, size
                ),
            )
            for name in "qkv"
        )
        exponents = torch.arange(0, size, 2) / size
        angles_TD = torch.arange(count)[:, None] * self.config["rope_theta"] ** -exponents
        cos_T1D, sin_T1D = (
            torch.cat((each, each), 1)[:, None] for each in (angles_TD.cos(), angles_TD.sin())
        )

        def rotate(x_THD: Tensor) -> Tensor:
            first, second = x_THD.chunk(2, 2)
            return x_THD * cos_T1D + torch.cat((-second, first), 2) * sin_T1D

        group = query_THD.shape[1] // key_THD.shape[1]
        keys = rotate(key_THD).repeat_interleave(group, 1)
        scores_HTU = torch.einsum("thd,uhd->htu", rotate(query_THD), keys) * size**-0.5
        scores_HTU += torch.full((count, count), float("-inf")).triu(1)
        values = value_THD.repeat_interleave(group, 1)
        mixed_THD = torch.einsum("htu,uhd->thd", scores_HTU.softmax(-1), values)
        return mixed_THD.flatten(1) @ self.weights["midlayer.self_attn.o_proj.weight"].T


EAGLE3_LAYER: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def write_eagle3_head(
    directory: Path, target: transformers.PretrainedConfig, draft_vocab_size: int, **fields: Any
) -> Eagle3:
    """Write an EAGLE-3 head as published by its authors, without an embedding. Return its computation."""
    directory.mkdir(exist_ok=True)
    config = {**EAGLE3_LAYER, "draft_vocab_size": draft_vocab_size}
    head = Eagle3(config, target)
    written = {
        **config,
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": target.vocab_size,
        **fields,
    }
    (directory / "config.json").write_text(json.dumps(written))
    save_file(head.weights | head.mapping, directory / "model.safetensors")
    return head


def write_speculators_head(
    directory: Path, target: transformers.PretrainedConfig, layers: tuple[int, ...]
) -> tuple[Eagle3, Tensor]:
    """Write an EAGLE-3 head in the format of the library speculators. Return its computation and its embedding."""
    directory.mkdir(exist_ok=True)
    layer = {**EAGLE3_LAYER, "hidden_size": 32, "vocab_size": target.vocab_size}
    config = {**layer, "draft_vocab_size": 150}
    head = Eagle3(config, target, num_states=len(layers), norms_residual=True)
    written = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 150,
        "target_hidden_size": target.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "transformer_layer_config": layer,
    }
    (directory / "config.json").write_text(json.dumps(written))
    embedding_VD = torch.randn(target.vocab_size, layer["hidden_size"])
    tensors = {name.replace("midlayer.", "layers.0."): x for name, x in head.weights.items()}
    tensors |= head.mapping | {"embed_tokens.weight": embedding_VD}
    save_file(tensors, directory / "model.safetensors")
    return head, embedding_VD


def write_assistant(
    directory: Path,
    target: transformers.PretrainedConfig,
    fields: dict[str, Any],
    kind: str = "Gemma4",
    *,
    has_clusters: bool = False,
) -> transformers.PreTrainedModel:
    """Write an assistant with a smaller hidden size for a Gemma 4, which was made from `fields`. Return it."""
    text = getattr(transformers, f"{kind}TextConfig")(
        **{
            **fields,
            "vocab_size": target.vocab_size,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 2 * target.num_attention_heads,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "num_kv_shared_layers": 3,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "use_double_wide_mlp": False,
            "enable_moe_block": False,
        }
    )
    num_clusters = next(n for n in range(8, 64) if target.vocab_size % n == 0)
    config = getattr(transformers, f"{kind}AssistantConfig")(
        text_config=text,
        backbone_hidden_size=target.hidden_size,
        use_ordered_embeddings=has_clusters,
        num_centroids=num_clusters,
        centroid_intermediate_top_k=3,
    )
    assistant = getattr(transformers, f"{kind}AssistantForCausalLM")(config)
    randomize(assistant)
    for layer in assistant.model.layers:
        layer.layer_scalar.fill_(0.7)
    if has_clusters:
        ordering = assistant.masked_embedding.token_ordering
        ordering.copy_(torch.randperm(len(ordering)))
    assistant.save_pretrained(directory)
    return assistant


@torch.no_grad()
def assistant_drafts(
    model: transformers.PreTrainedModel,
    assistant: transformers.PreTrainedModel,
    tokens: list[int],
    count: int,
) -> list[int]:
    """Return the drafts of an assistant of Gemma 4 after all tokens, the last of which the model has not computed."""
    outputs = model.model(
        torch.tensor([tokens[:-1]]), output_hidden_states=True, return_shared_kv_states=True
    )
    window = model.config.sliding_window
    shared = dict(outputs.shared_kv_states)
    # Layers with a window may have dropped keys before it.
    shared["sliding_attention"] = tuple(
        each[:, :, -window:] for each in shared["sliding_attention"]
    )
    hidden = outputs.last_hidden_state[:, -1:]
    drafts: list[int] = []
    for _ in range(count):
        embedded = model.get_input_embeddings()(torch.tensor([[[*tokens, *drafts][-1]]]))
        outputs = assistant(
            inputs_embeds=torch.cat((embedded, hidden), -1),
            position_ids=torch.tensor([[len(tokens) - 1]]),
            shared_kv_states=shared,
        )
        drafts.append(int(outputs.logits[0, 0].argmax()))
        hidden = outputs.last_hidden_state
    return drafts


DFLASH: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 12,
    "max_position_embeddings": 512,
    "block_size": 8,
    "mask_token_id": 5,
    "target_layer_ids": [0, 2],
}


def write_dflash(
    directory: Path, layer_types: list[str], *, has_published_names: bool = True
) -> transformers.PreTrainedModel:
    """Write a DFlash head with the names of its authors, or with those of transformers. Return its modules."""
    config = transformers.MuseGlimmerAssistantConfig(**DFLASH, layer_types=layer_types)
    head = randomize(transformers.MuseGlimmerAssistantModel(config))
    head.save_pretrained(directory)
    if not has_published_names:
        return head
    fields = json.loads((directory / "config.json").read_text())
    fields |= {"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}
    names = ("mask_token_id", "target_layer_ids")
    fields["dflash_config"] = {name: fields.pop(name) for name in names}
    (directory / "config.json").write_text(json.dumps(fields))
    file = directory / "model.safetensors"
    names = {
        "encoder.fc.weight": "fc.weight",
        "encoder.output_norm_enc.weight": "hidden_norm.weight",
    }
    save_file({names.get(name, name): each for name, each in load_file(file).items()}, file)
    return head


def add_dflash_vocabulary(directory: Path, target: transformers.PretrainedConfig) -> Tensor:
    """Turn a DFlash head into the layout of Speculators with an output projection for some tokens. Return their ids."""
    file, config_file = directory / "model.safetensors", directory / "config.json"
    config = json.loads(config_file.read_text())
    own = config.pop("dflash_config")
    count = 120
    chosen = torch.randperm(target.vocab_size)[:count].sort().values
    fields = {
        "architectures": ["DFlashSpeculator"],
        "transformer_layer_config": config | {"vocab_size": target.vocab_size},
        "aux_hidden_state_layer_ids": [1 + layer for layer in own["target_layer_ids"]],
        "mask_token_id": own["mask_token_id"],
        "block_size": config["block_size"],
        "draft_vocab_size": count,
    }
    config_file.write_text(json.dumps(fields))
    added = {
        "lm_head.weight": torch.randn(count, target.hidden_size),
        "d2t": chosen - torch.arange(count),
        "t2d": torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, chosen, True),
    }
    save_file(load_file(file) | added, file)
    return chosen


@torch.no_grad()
def dflash_hidden_states(
    model: transformers.PreTrainedModel,
    head: transformers.PreTrainedModel,
    tokens: list[int],
    count: int,
    *,
    from_last: bool = False,
    causal_kinds: Collection[str] = (),
) -> torch.Tensor:
    """Return the hidden states of a DFlash head for `count` drafts after all tokens, [count, D].

    The first draft is predicted by a mask token, or by the last token if `from_last`. Attention is causal in layers of
    `causal_kinds`.
    """
    config, num_masks = head.config, count - from_last
    states = model.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    block = torch.tensor([[tokens[-1], *[config.mask_token_id] * num_masks]])
    begin, end = len(tokens) - 1, len(tokens) + num_masks
    keys, queries = torch.arange(end), torch.arange(begin, end)[:, None]
    sees = {
        "full_attention": torch.ones(num_masks + 1, end, dtype=torch.bool),
        "sliding_attention": (keys > queries - config.sliding_window) | (keys >= begin),
    }
    for kind in causal_kinds:
        sees[kind] &= keys <= queries
    masks = {kind: torch.where(seen, 0.0, -torch.inf)[None, None] for kind, seen in sees.items()}
    outputs = head(
        noise_embeds=model.get_input_embeddings()(block),
        context_hidden_states=torch.cat([states[i + 1] for i in config.target_layer_ids], -1),
        attention_mask=masks,
    )
    return outputs.last_hidden_state[0, num_masks + 1 - count :]
