"""Translate a GGUF file's metadata into a Hugging Face ``config.json``.

GGUF has its own names for hyper-parameters, and omits parameters that are constants of an architecture. Numbers are
returned as the shortest decimal with the same float32 value, which is what the model's author wrote (1e-05, not
9.999999747378752e-06).
"""

from typing import Any, Final

import numpy as np

from ...errors import CheckpointError
from ..gguf import GGUFFile
from .compressed import COMPRESSED
from .deepseek import DEEPSEEK
from .dense import DENSE
from .encoders import ENCODERS
from .fields import GGUFFields, ModelFields, Translate
from .gemma import GEMMA
from .mixtures import MIXTURES
from .parts import rope_scaling
from .recurrent import RECURRENT
from .rwkv import RWKV
from .score_heads import score_head

ARCHITECTURES: Final[dict[str, Translate]] = {
    **COMPRESSED,
    **DEEPSEEK,
    **DENSE,
    **ENCODERS,
    **GEMMA,
    **MIXTURES,
    **RECURRENT,
    **RWKV,
}

# Architectures whose metadata lists the sizes of each layer.
_VARIED = (*RECURRENT, "deci", "gemma3n", "gemma4", "mimo2", "openelm")
# GGUF's token types. Only tokens that are not ordinary text can end a generation.
_CONTROL, _USER_DEFINED = 3, 4
_END_OF_GENERATION_TEXTS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<turn|>",
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

    ``linear_has_split_projections`` and ``linear_has_tiled_heads`` say how the tensors of gated delta nets differ from
    those of a Hugging Face checkpoint.

    Raises:
        CheckpointError: The architecture is not supported, or a key is missing.
    """
    architecture = gguf.metadata.get("general.architecture")
    complete = ARCHITECTURES.get(str(architecture))
    if complete is None:
        raise CheckpointError(
            gguf.path,
            f"the architecture {architecture!r} is not supported; "
            f"supported are {', '.join(sorted(ARCHITECTURES))}",
        )
    fields = ModelFields(gguf, str(architecture))
    return _common_config(fields) | complete(fields) | score_head(fields)


def _common_config(fields: ModelFields) -> dict[str, Any]:
    # Layers of different kinds have different sizes.
    size = fields.largest if fields.prefix[:-1] in _VARIED else fields.integer
    name = "expert_feed_forward_length"
    expert_size = fields.with_largest(name).optional_integer(name)
    # Some files have a head, but no embedding, which is the same matrix.
    names = ("token_embd.weight", "output.weight")
    embedding, head = (fields.gguf.tensors.get(name) for name in names)
    is_tied = embedding is None or head is None
    embedding = embedding or head
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(fields.gguf.path, "there is no matrix 'token_embd.weight'")
    return {
        "vocab_size": embedding.shape[0],
        "hidden_size": fields.integer("embedding_length"),
        "intermediate_size": fields.integer("ssm.inner_size")
        if fields.is_purely_recurrent
        else size("feed_forward_length", expert_size),
        "num_hidden_layers": fields.num_layers,
        "num_attention_heads": fields.num_heads,
        "num_key_value_heads": fields.num_heads
        if fields.is_purely_recurrent
        else size("attention.head_count_kv", fields.num_heads),
        "head_dim": fields.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number(
            "attention.layer_norm_rms_epsilon",
            fields.optional_number("attention.layer_norm_epsilon"),
        ),
        "rope_theta": fields.positive("rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(fields),
        "attention_bias": fields.has_tensor_of_a_layer("attn_q.bias"),
        "mlp_bias": fields.has_tensor_of_a_layer("ffn_up.bias"),
        "tie_word_embeddings": is_tied,
        **_special_token_ids(fields),
    }


def _special_token_ids(fields: ModelFields) -> dict[str, Any]:
    metadata = fields.gguf.metadata
    tokenizer = GGUFFields(metadata, fields.path, "tokenizer.ggml.")
    eos = [i for key in ("eos", "eot", "eom") for i in tokenizer.token_ids(f"{key}_token_id")]
    tokens, types = "tokenizer.ggml.tokens", metadata.get("tokenizer.ggml.token_type")
    num_tokens = metadata.count_strings(tokens)
    if num_tokens and isinstance(types, np.ndarray):
        types = types[:num_tokens]
        special = np.flatnonzero((types == _CONTROL) | (types == _USER_DEFINED)).tolist()
        texts = metadata.select_strings(tokens, special)
        eos += [
            i for i, text in zip(special, texts, strict=True) if text in _END_OF_GENERATION_TEXTS
        ]
    eos = list(dict.fromkeys(eos))
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }
