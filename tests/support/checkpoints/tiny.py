"""Tiny random checkpoints with a real tokenizer, as files on disk."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from support.gguf.writer import write_gguf
from tokenizers import Tokenizer, decoders, models, normalizers, trainers

TEXT = "the quick brown fox jumps over the lazy dog while seven wizards brew tea in the old tower"

GEMMA3 = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 16,
    "max_position_embeddings": 512,
}
DECODER_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
"""The sizes of the text decoders of multimodal models."""
QWEN3 = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


def sentencepiece_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer like Gemma's: merges by rank, bytes for unknown characters, no space prefix."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<eos>", "<bos>", "<unk>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    learnt = Tokenizer.from_str(tokenizer.to_str())
    vocab = learnt.get_vocab(with_added_tokens=True)
    for token in byte_tokens:
        vocab.setdefault(token, len(vocab))
    merges = [tuple(m) for m in json.loads(learnt.to_str())["model"]["merges"]]
    tokenizer.model = models.BPE(
        vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        pad_token="<pad>",
    )


def random_model(
    config_class: str, model_class: str, config: dict[str, Any], tokenizer: Any
) -> transformers.PreTrainedModel:
    """Return a transformers model with random weights, norms and biases included."""
    torch.manual_seed(11)
    special_ids = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    # A config keeps its values and changes some of them.
    model_config = getattr(transformers, config_class)(
        **copy.deepcopy(config), **special_ids, vocab_size=len(tokenizer)
    )
    model = getattr(transformers, model_class)(model_config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                buffer.random_(model_config.n_routed_experts)
    return model


def gemma3_gguf(directory: Path) -> tuple[Path, transformers.PreTrainedModel]:
    tokenizer = sentencepiece_tokenizer()
    model = random_model("Gemma3TextConfig", "Gemma3ForCausalLM", GEMMA3, tokenizer)
    return write_gguf(directory / "tiny-gemma3.gguf", model, tokenizer), model


def qwen3_directory(directory: Path) -> tuple[Path, transformers.PreTrainedModel]:
    """Write safetensors in several shards, like those of large checkpoints."""
    tokenizer = sentencepiece_tokenizer()
    model = random_model("Qwen3Config", "Qwen3ForCausalLM", QWEN3, tokenizer)
    model.save_pretrained(directory, max_shard_size="100KB")
    tokenizer.save_pretrained(directory)
    assert len(list(directory.glob("*.safetensors"))) > 1
    return directory, model


def mixture_directory(directory: Path) -> tuple[Path, transformers.PreTrainedModel]:
    """A mixture of experts."""
    tokenizer = sentencepiece_tokenizer()
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    model = random_model("Qwen3MoeConfig", "Qwen3MoeForCausalLM", QWEN3 | experts, tokenizer)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory, model


RECURRENT = {
    "delta net": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 16,
        },
    ),
    "mamba": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "mamba_n_heads": 8,
            "mamba_d_state": 16,
            "attention_multiplier": 0.25,
        },
    ),
    "mamba-1": (
        "JambaConfig",
        "JambaForCausalLM",
        {
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 12,
            "mamba_dt_rank": 7,
        },
    ),
    "kimi delta attention": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_key_value_heads": 4,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "linear_num_heads": 2,
            "linear_head_dim": 32,
            "tie_word_embeddings": False,
        },
    ),
    "rg-lru": (
        "RecurrentGemmaConfig",
        "RecurrentGemmaForCausalLM",
        {"attention_window_size": 24, "lru_width": 96},
    ),
    "convolution": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {"layer_types": ["conv", "conv", "full_attention"], "block_multiple_of": 16},
    ),
}
"""Models with recurrent layers, by the kind of these."""


SHARED_KEYS = {
    "gemma 3n": (
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "sliding_window": 24,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 300,
            "intermediate_size": [96] * 6,
            "activation_sparsity_pattern": [0.5, *[0.0] * 5],
            "laurel_rank": 6,
        },
    ),
}
"""Models whose last layers read the keys of others, and whose layers have inputs of their own."""


COMPRESSED = {
    "compressed": (
        "DeepseekV4Config",
        "DeepseekV4ForCausalLM",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "q_lora_rank": 20,
            "partial_rotary_factor": 0.25,
            "o_groups": 2,
            "o_lora_rank": 12,
            "sliding_window": 10,
            "layer_types": [
                "sliding_attention",
                *["heavily_compressed_attention", "compressed_sparse_attention"],
                "compressed_sparse_attention",
            ],
            "compress_rates": {
                "compressed_sparse_attention": 4,
                "heavily_compressed_attention": 24,
            },
            "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "hc_mult": 2,
            "index_topk": 8,
            "index_head_dim": 8,
            "index_n_heads": 16,
            "tie_word_embeddings": False,
        },
    ),
}
"""A model whose layers attend to entries that summarize several tokens."""

NGRAMS = {
    "n-grams": (
        "Qwen4ExpTextConfig",
        "Qwen4ExpForCausalLM",
        RECURRENT["delta net"][2]
        | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "hc_count": 2,
            "hc_lowrank": 16,
            "ple_layer_ids": [2],
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 50,
            "split_ngram_parts": 2,
            "indexer_n_heads": 16,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 24,
            "indexer_compress_ratio": 4,
        },
    ),
}
"""A model with embeddings of n-grams, and with sparse attention."""


PASSES = {
    "passes": (
        "Inkling2LoopTextConfig",
        "Inkling2LoopForCausalLM",
        {
            "num_hidden_layers": 6,
            "layer_types": ["hybrid", "hybrid_sliding", "hybrid"] * 2,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 16,
            "sliding_window_size": 24,
            "rel_extent": 30,
            "d_rel": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_layers_per_attn_res_block": 2,
            "loop_layer_index_start": 2,
            "loop_layer_index_end": 4,
            "loop_gate_rank": 32,
            "unpadded_vocab_size": 361,
            "tie_word_embeddings": False,
        },
    ),
}
"""A model with layers that are computed several times, and states of layers with fewer and with more keys."""

TABLES = RECURRENT | SHARED_KEYS | COMPRESSED | NGRAMS | PASSES


def layers_directory(
    directory: Path, kind: str = "delta net"
) -> tuple[Path, transformers.PreTrainedModel]:
    """Write a model whose layers are not all alike: one of the tables above."""
    tokenizer = sentencepiece_tokenizer()
    config_class, model_class, differences = TABLES[kind]
    model = random_model(config_class, model_class, QWEN3 | differences, tokenizer)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory, model
