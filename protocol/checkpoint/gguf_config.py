"""Translates a GGUF file's metadata into a Hugging Face ``config.json``.

GGUF has its own names for hyper-parameters and omits those that are constants of an architecture. Numbers are returned
as the shortest decimal with the same float32, which is what the model's author wrote (1e-05, not
9.999999747378752e-06).
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import CheckpointError
from .config_fields import ConfigFields
from .gguf import GGMLQuantizationType, GGUFFile

# Token types of GGUF. Only tokens that are not ordinary text can end a generation.
_CONTROL, _USER_DEFINED = 3, 4
_END_OF_GENERATION_TEXTS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<EOT>",
    "[EOT]",
    "[EOS]",
)


def gguf_to_hf_config(gguf: GGUFFile) -> dict[str, Any]:
    """Return the config, in the flat field names of Hugging Face configs.

    Rotary settings are ``rope_theta``, ``rope_scaling`` (a dict or None), ``partial_rotary_factor`` and, for Gemma 3's
    sliding layers, ``rope_local_base_freq``. The frequency divisors that converters compute for Llama 3 scaling are
    returned exactly, as ``rope_type`` "longrope" with equal short and long factors and an attention factor of 1.
    ``eos_token_id`` holds every token that ends a turn, the file's own first: an int if there is one, else a list.

    Raises:
        CheckpointError: The architecture is not supported, or a key is missing.
    """
    architecture = gguf.metadata.get("general.architecture")
    complete = _ARCHITECTURES.get(str(architecture))
    if complete is None:
        raise CheckpointError(
            gguf.path,
            f"the architecture {architecture!r} is not supported; "
            f"supported are {', '.join(sorted(_ARCHITECTURES))}",
        )
    fields = _ModelFields(gguf, str(architecture))
    if fields.optional_integer("expert_count"):
        raise CheckpointError(gguf.path, "mixture-of-experts models are not supported")
    return _common_config(fields) | complete(fields)


class GGUFFields(ConfigFields):
    """The keys of a GGUF file's metadata that begin with `prefix`."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value. A list of equal numbers, one for each layer, becomes that number."""
        value = self.config.get(self.prefix + name)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if isinstance(value, float):
            with np.errstate(over="ignore"):
                value = float(str(np.float32(value)))
        return default if value is None else value

    def optional_integer(self, name: str) -> int | None:
        """Return an integer, or None if the key is absent or 0."""
        return self.integer(name, 0, minimum=0) or None

    def optional_positive(self, name: str) -> float | None:
        """Return a number, or None if the key is absent or 0."""
        return self.number(name, 0) or None


class _ModelFields(GGUFFields):
    """The metadata keys of one architecture, and the tensors."""

    def __init__(self, gguf: GGUFFile, architecture: str) -> None:
        super().__init__(gguf.metadata, gguf.path, f"{architecture}.")
        self.gguf = gguf

    def has_tensor(self, name: str) -> bool:
        return name in self.gguf.tensors

    def floats(self, tensor_name: str) -> list[float]:
        tensor = self.gguf.tensors.get(tensor_name)
        if tensor is None or tensor.ggml_type is not GGMLQuantizationType.F32:
            raise CheckpointError(self.gguf.path, f"there is no F32 tensor {tensor_name!r}")
        return [float(str(x)) for x in self.gguf.data(tensor).view("<f4")]

    @property
    def num_layers(self) -> int:
        return self.layer_count("block_count")

    @property
    def num_heads(self) -> int:
        return self.integer("attention.head_count")

    @property
    def head_dim(self) -> int:
        head_dim = self.integer(
            "attention.key_length", self.integer("embedding_length") // self.num_heads
        )
        if head_dim == 0:
            raise CheckpointError(
                self.gguf.path,
                f"the embedding is narrower than the number of heads, {self.num_heads}",
            )
        return head_dim


def _common_config(fields: _ModelFields) -> dict[str, Any]:
    embedding = fields.gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(fields.gguf.path, "there is no matrix 'token_embd.weight'")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": fields.integer("embedding_length"),
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.num_layers,
        "num_attention_heads": fields.num_heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", fields.num_heads),
        "head_dim": fields.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.positive("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(fields),
        "attention_bias": fields.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": fields.has_tensor("blk.0.ffn_up.bias"),
        "tie_word_embeddings": not fields.has_tensor("output.weight"),
        **_special_token_ids(fields),
    }


def _rope_scaling(fields: _ModelFields) -> dict[str, Any] | None:
    original_length = fields.integer(
        "rope.scaling.original_context_length", fields.integer("context_length")
    )
    if fields.has_tensor("rope_freqs.weight"):
        divisors = fields.floats("rope_freqs.weight")
        return {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": original_length,
        }
    if fields.has_tensor("rope_factors_long.weight"):
        return {
            "rope_type": "longrope",
            "short_factor": fields.floats("rope_factors_short.weight"),
            "long_factor": fields.floats("rope_factors_long.weight"),
            "attention_factor": fields.positive("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": original_length,
        }
    factor = fields.number("rope.scaling.factor", 1.0)
    kind = fields.text("rope.scaling.type", "none")
    if kind == "linear" and factor not in (0.0, 1.0):
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original_length,
        }
        for name, key in (
            ("attention_factor", "yarn_attn_factor"),
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
        ):
            if (value := fields.optional_positive(f"rope.scaling.{key}")) is not None:
                scaling[name] = value
        return scaling
    if kind not in ("none", "linear"):
        raise CheckpointError(
            fields.gguf.path, f"the rope scaling type {kind!r} is not supported in GGUF files"
        )
    return None


def _special_token_ids(fields: _ModelFields) -> dict[str, Any]:
    metadata = fields.gguf.metadata
    tokenizer = GGUFFields(metadata, fields.path, "tokenizer.ggml.")
    eos = [i for key in ("eos", "eot", "eom") for i in tokenizer.token_ids(f"{key}_token_id")]
    tokens, types = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if isinstance(tokens, list) and isinstance(types, np.ndarray):
        special = np.flatnonzero(np.isin(types[: len(tokens)], (_CONTROL, _USER_DEFINED))).tolist()
        eos += [i for i in special if tokens[i] in _END_OF_GENERATION_TEXTS]
    eos = list(dict.fromkeys(eos))
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _layer_types(fields: _ModelFields, default_period: int) -> list[str]:
    """Return the attention type of each layer: full for every ``period``-th layer, sliding for the others."""
    key = "attention.sliding_window_pattern"
    pattern = fields.config.get(fields.prefix + key)
    if isinstance(pattern, np.ndarray):
        sliding = pattern.astype(bool).tolist()
    else:
        period = fields.integer(key, default_period)
        sliding = [bool((i + 1) % period) for i in range(fields.num_layers)]
    return ["sliding_attention" if x else "full_attention" for x in sliding]


def _llama(fields: _ModelFields) -> dict[str, Any]:
    if window := fields.optional_integer("attention.sliding_window"):
        return {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": window,
        }
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def _qwen2(fields: _ModelFields) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _qwen3(fields: _ModelFields) -> dict[str, Any]:
    return _qwen2(fields) | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def _gemma(fields: _ModelFields, num_layers_27b: int) -> dict[str, Any]:
    # The 27B models scale attention by hidden_size / num_heads, the others by the query head's width. The metadata
    # does not say which.
    is_27b = fields.num_layers == num_layers_27b
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": (
            fields.integer("embedding_length") // fields.num_heads if is_27b else fields.head_dim
        ),
        "final_logit_softcapping": fields.optional_positive("final_logit_softcapping"),
    }


def _gemma2(fields: _ModelFields) -> dict[str, Any]:
    return _gemma(fields, num_layers_27b=46) | {
        "model_type": "gemma2",
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0) or None,
        "sliding_window": fields.integer("attention.sliding_window", 4096),
        "layer_types": _layer_types(fields, default_period=2),
    }


def _gemma3(fields: _ModelFields) -> dict[str, Any]:
    window = fields.optional_integer("attention.sliding_window")
    return _gemma(fields, num_layers_27b=62) | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": window,
        "layer_types": _layer_types(fields, default_period=6 if window else 1),
        "rope_theta": fields.positive("rope.freq_base", 1_000_000.0),
        "rope_local_base_freq": fields.positive("rope.freq_base_swa", 10_000.0),
    }


def _phi3(fields: _ModelFields) -> dict[str, Any]:
    rotary_dim = fields.integer("rope.dimension_count", fields.head_dim)
    return {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "partial_rotary_factor": rotary_dim / fields.head_dim,
        "original_max_position_embeddings": fields.integer(
            "rope.scaling.original_context_length", fields.integer("context_length")
        ),
        "sliding_window": fields.optional_integer("attention.sliding_window"),
    }


def _smollm3(fields: _ModelFields) -> dict[str, Any]:
    return {
        "model_type": "smollm3",
        "architectures": ["SmolLM3ForCausalLM"],
        "no_rope_layers": [int((i + 1) % 4 != 0) for i in range(fields.num_layers)],
        "no_rope_layer_interval": 4,
    }


def _olmo2(fields: _ModelFields) -> dict[str, Any]:
    if fields.optional_integer("attention.sliding_window"):
        raise CheckpointError(
            fields.gguf.path, "OLMo 3 models (olmo2 with sliding windows) are not supported"
        )
    return {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}


def _granite(fields: _ModelFields) -> dict[str, Any]:
    return {
        "model_type": "granite",
        "architectures": ["GraniteForCausalLM"],
        "attention_multiplier": fields.positive("attention.scale", fields.head_dim**-0.5),
        "embedding_multiplier": fields.positive("embedding_scale", 1.0),
        "residual_multiplier": fields.positive("residual_scale", 1.0),
        "logits_scaling": fields.positive("logit_scale", 1.0),
    }


_ARCHITECTURES: dict[str, Callable[[_ModelFields], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "smollm3": _smollm3,
    "olmo2": _olmo2,
    "granite": _granite,
}
