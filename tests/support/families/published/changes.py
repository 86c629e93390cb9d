"""Differences between files of families without a class in transformers and those of models with equal mathematics."""

from __future__ import annotations

import copy
import functools
import re
from typing import Any

import torch
import transformers

Tensors = dict[str, torch.Tensor]


def unchanged(tensors: Tensors) -> Tensors:
    return tensors


def with_grouped_rows(tensors: Tensors) -> Tensors:
    """Put the rows of two key/value heads, each with those of its three query heads, into one matrix."""
    changed = {}
    for name, weight in tensors.items():
        if ".q_proj." in name:
            parts = (tensors[name.replace(".q_", f".{x}_")].unflatten(0, (2, -1)) for x in "qkv")
            name, weight = name.replace(".q_proj.", ".wqkv."), torch.cat([*parts], 1).flatten(0, 1)
        if not re.search(r"\.[kv]_proj\.", name):
            changed[name] = weight
    return changed


def with_image_mlps(tensors: Tensors) -> Tensors:
    """Do as `with_grouped_rows`, and add the MLPs that only read tokens of images."""
    others = {
        name.replace(".mlp.", ".feed_forward_ve."): torch.zeros_like(weight)
        for name, weight in tensors.items()
        if ".mlp." in name
    }
    return with_grouped_rows(tensors) | others


def with_fused_qkv(tensors: Tensors) -> Tensors:
    """Put queries, keys and values into one matrix, in this order."""
    changed = {}
    for name, weight in tensors.items():
        if ".q_proj." in name:
            parts = [tensors[name.replace(".q_", f".{x}_")] for x in "qkv"]
            name, weight = name.replace(".q_proj.", ".qkv_proj."), torch.cat(parts)
        if not re.search(r"\.[kv]_proj\.", name):
            changed[name] = weight
    return changed


def with_alibi(reference: transformers.PreTrainedModel) -> None:
    """Make a Llama with six heads use ALiBi instead of rotations, and rows of unit length in its head."""
    with_slopes(reference, power=1.0)
    head = reference.lm_head.weight.data
    head.copy_(torch.nn.functional.normalize(head))


def with_slopes(reference: transformers.PreTrainedModel, power: float) -> None:
    """Subtract a power of the distance to a key from scores, times the head's slope, instead of rotating."""
    reference.model.rotary_emb.inv_freq.zero_()
    slopes = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])

    def add_mask(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        positions = torch.arange(args[0].shape[1])
        distances = positions[:, None] - positions
        mask = -slopes[:, None, None] * distances.abs() ** power
        mask.masked_fill_(distances < 0, torch.finfo(torch.float32).min)
        return args, kwargs | {"attention_mask": mask[None]}

    reference.register_forward_pre_hook(add_mask, with_kwargs=True)


def with_ternary_weights(reference: transformers.PreTrainedModel) -> None:
    """Round the matrices of all layers to -1, 0 or 1, times a number that is exact in float16."""
    for name, weight in reference.named_parameters():
        if name.endswith("_proj.weight"):
            weight.data = (weight / weight.abs().mean()).round().clamp(-1, 1) / 8


def before_rounding(tensors: Tensors) -> Tensors:
    """Return ternary matrices as larger ones, whose mean magnitudes are those of their nonzero elements before."""
    return {
        name: x / (x != 0).float().mean() if name.endswith("_proj.weight") else x
        for name, x in tensors.items()
    }


def with_layer_norms(reference: transformers.PreTrainedModel) -> None:
    """Give a Llama layer norms with biases instead of RMS norms."""
    for name, module in list(reference.named_modules()):
        if name.endswith("norm"):
            norm = torch.nn.LayerNorm(module.weight.numel(), 1e-5)
            for parameter in norm.parameters():
                torch.nn.init.normal_(parameter, 0.8, 0.3)
            reference.set_submodule(name, norm)


def with_grouped_norms(reference: transformers.PreTrainedModel) -> None:
    """Let the norms of a Llama divide each third of a hidden state by its own root mean square."""

    def norm(module: torch.nn.Module, args: tuple[torch.Tensor], _output: Any) -> torch.Tensor:
        thirds = args[0].unflatten(-1, (3, -1))
        normed = torch.nn.functional.rms_norm(thirds, thirds.shape[-1:], eps=1e-6)
        return normed.flatten(-2) * module.weight

    for name, module in reference.named_modules():
        if name.endswith("norm"):
            module.register_forward_hook(norm)


def with_output_norms(reference: transformers.PreTrainedModel) -> None:
    """Give the attention and the MLP of each layer norms of their outputs."""

    def norm(norm: torch.nn.Module, output: Any) -> Any:
        return (norm(output[0]), *output[1:]) if isinstance(output, tuple) else norm(output)

    for layer in reference.model.layers:
        for name, module in (("output", layer.self_attn), ("post_mlp", layer.mlp)):
            added = copy.deepcopy(layer.input_layernorm)
            torch.nn.init.normal_(added.weight, 0.8, 0.3)
            layer.add_module(f"{name}_layernorm", added)
            module.register_forward_hook(lambda _module, _args, output, n=added: norm(n, output))


def as_domyn_edge(reference: transformers.PreTrainedModel) -> None:
    """Let the layers of a Qwen3 without windows have heads of 24 elements and no rotations."""

    def unrotated(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        shape = (*kwargs["hidden_states"].shape[:2], 24)
        return args, kwargs | {"position_embeddings": (torch.ones(shape), torch.zeros(shape))}

    own = copy.deepcopy(reference.config)
    own.head_dim = 24
    for index, layer in enumerate(reference.model.layers):
        if layer.self_attn.sliding_window is None:
            layer.self_attn = type(layer.self_attn)(own, index)
            for parameter in layer.self_attn.parameters():
                torch.nn.init.normal_(parameter, 0, 0.2)
            layer.self_attn.register_forward_pre_hook(unrotated, with_kwargs=True)
        torch.nn.init.ones_(layer.self_attn.q_norm.weight)
    with_output_norms(reference)


def with_chunks(reference: transformers.PreTrainedModel) -> None:
    """Let the layers of a Gemma 3 with windows attend to two chunks of five tokens instead."""

    def masked(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        positions = torch.arange(kwargs["hidden_states"].shape[1])
        chunks = positions[:, None] // 5 - positions // 5
        hidden = (chunks > 1) | (positions[:, None] < positions)
        mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
        return args, kwargs | {"attention_mask": mask[None, None]}

    for layer in reference.model.layers:
        if layer.self_attn.sliding_window is not None:
            layer.self_attn.register_forward_pre_hook(masked, with_kwargs=True)


def without_query_norms(tensors: Tensors) -> Tensors:
    return {name: weight for name, weight in tensors.items() if "q_norm" not in name}


def with_three_passes(reference: transformers.PreTrainedModel) -> None:
    """Make a model compute its layers and its final norm three times."""

    def repeat(model: Any, _args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if kwargs.get("inputs_embeds") is None:
            for _ in range(2):
                output = model(inputs_embeds=output.last_hidden_state, use_cache=False)
        return output

    reference.model.register_forward_hook(repeat, with_kwargs=True)


def with_means_of_states(reference: transformers.PreTrainedModel) -> None:
    """Make the layers of a Llama keep their inputs, and read means of these, as `bskcn_1` to `bskcn_4` say."""
    kept: dict[str, torch.Tensor] = {}
    steps = {1: (("1",), ""), 2: (("1", "2"), ""), 3: ((), "1"), 4: (("1",), "2"), 5: ((), "1")}

    def read(_layer: Any, args: tuple[Any, ...], *, names: Any, mixed: str) -> Any:
        x = args[0]
        kept.update(dict.fromkeys(names, x))
        return (x if not mixed else 0.8 * kept[mixed] + (1 - 0.8) * x, *args[1:])

    for index, (names, mixed) in steps.items():
        hook = functools.partial(read, names=names, mixed=mixed)
        reference.model.layers[index].register_forward_pre_hook(hook)


def with_rotated_halves(tensors: Tensors) -> Tensors:
    """Store the rows of queries and keys of six and two heads so that the halves of a head are rotated together."""
    changed = {"model.early_exit_gate.weight": torch.zeros(1, 48)}
    for name, weight in tensors.items():
        if match := re.search(r"\.([qk])_proj\.", name):
            heads = weight.unflatten(0, (6 if match[1] == "q" else 2, -1, 2))
            weight = heads.transpose(1, 2).flatten(0, 2)
        changed[name] = weight
    return changed


def with_longer_head(tensors: Tensors) -> Tensors:
    return with_fused_qkv(tensors) | {"lm_head.weight": 3 * tensors["lm_head.weight"]}


BLOCKS = [
    {"attention": {"n_heads_in_group": group}, "ffn": {"ffn_mult": factor}}
    for group, factor in ((3, 7.9), (None, 15.9), (3, None), (None, None), (6, 15.9))
]


def without_unused_blocks(tensors: Tensors) -> Tensors:
    """Leave out what `BLOCKS` do not have, and what `disable_blocks` made ineffective."""
    unused = r"layers\.([13]\.(self_attn|input_layernorm)|[23]\.(mlp|post_attention_layernorm))\."
    changed = {name: x for name, x in tensors.items() if not re.search(unused, name)}
    for name, weight in changed.items():
        if "layers.0.mlp." in name:
            changed[name] = weight[:, :256] if "down" in name else weight[:256]
        if re.search(r"layers\.4\.self_attn\.[kv]_proj\.", name):
            changed[name] = weight[:8]
    return changed


def disable_blocks(reference: transformers.PreTrainedModel) -> None:
    """Make a Llama compute what the smaller layers of `BLOCKS` do."""
    layers = reference.model.layers
    with torch.no_grad():
        for index in (1, 3):
            layers[index].self_attn.o_proj.weight.zero_()
        for index in (2, 3):
            layers[index].mlp.down_proj.weight.zero_()
        layers[0].mlp.down_proj.weight[:, 256:] = 0
        for module in (layers[4].self_attn.k_proj, layers[4].self_attn.v_proj):
            module.weight[8:] = module.weight[:8]


_TALKER = {"talker.model.embed_tokens.weight": torch.zeros(3, 4)}


def with_talker(tensors: Tensors) -> Tensors:
    return {f"thinker.{name}": weight for name, weight in tensors.items()} | _TALKER


def with_adapters(tensors: Tensors) -> Tensors:
    names = ("layers.0.self_attn.qkv_proj.lora_A.speech.weight", "embed_tokens_extend.x.bias")
    return tensors | {f"model.{name}": torch.zeros(2) for name in names}


def axes(*sections: int) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}


def with_tower(tensors: Tensors) -> Tensors:
    return tensors | {"vision_model.embeddings.weight": torch.zeros(3, 4)}


def with_ling_matrices(tensors: Tensors) -> Tensors:
    """Store queries, keys and values in one matrix, and all other matrices apart."""
    stored = {}
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        fused = ("gate_proj", "up_proj") if "input_linear" in name else ("down_proj",)
        prefix = module.rpartition(".")[0]
        if ".q_proj." in name:
            parts = [tensors[name.replace(".q_", f".{x}_")] for x in "qkv"]
            stored[name.replace(".q_proj.", ".qkv_proj.")] = torch.cat(parts)
        elif weight.ndim == 3:
            for i, each in enumerate(weight):
                for part, rows in zip(fused, each.chunk(len(fused)), strict=True):
                    stored[f"{prefix}.experts.{i}.{part}.weight"] = rows
        elif "_linear" in name:
            for part, rows in zip(fused, weight.chunk(len(fused)), strict=True):
                stored[f"{prefix}.{part}.weight"] = rows
        elif not re.search(r"\.[kv]_proj\.", name):
            stored[name] = weight
    return stored


def with_next_token_layer(tensors: Tensors) -> Tensors:
    """Store each expert by itself, and add a layer for multi-token prediction."""
    stored = {"model.mtp.layers.0.eh_proj.weight": torch.zeros(3, 4)}
    for name, weight in tensors.items():
        if not re.search(r"experts\.(gate_up|down)_proj$", name):
            stored[name] = weight
            continue
        for i, each in enumerate(weight):
            parts = (
                dict(zip(("w1", "w3"), each.chunk(2), strict=True))
                if "up" in name
                else {"w2": each}
            )
            prefix = name.rpartition(".")[0]
            stored |= {f"{prefix}.{i}.{part}.weight": x for part, x in parts.items()}
    return stored


def with_experts_of_several_sizes(reference: transformers.PreTrainedModel) -> None:
    """Make the experts of a Nemotron-H's last layer narrower, and let each of its tokens choose two."""
    mixer = reference.model.layers[-1].mixer
    mixer.gate.top_k = 2
    experts = mixer.experts
    experts.up_proj = torch.nn.Parameter(experts.up_proj.data[:, :16].contiguous())
    experts.down_proj = torch.nn.Parameter(experts.down_proj.data[..., :16].contiguous())
