"""Tiny random checkpoints with a real tokenizer, as files on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from support.gguf_writer import write_gguf
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
    """Merges by rank, bytes for what it does not know, as Gemma's: no space prefix."""
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
    """A transformers model whose every weight is random, norms and biases included."""
    torch.manual_seed(11)
    special_ids = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    model_config = getattr(transformers, config_class)(
        **config, **special_ids, vocab_size=len(tokenizer)
    )
    model = getattr(transformers, model_class)(model_config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.15)
    return model


def gemma3_gguf(directory: Path) -> tuple[Path, transformers.PreTrainedModel]:
    tokenizer = sentencepiece_tokenizer()
    model = random_model("Gemma3TextConfig", "Gemma3ForCausalLM", GEMMA3, tokenizer)
    return write_gguf(directory / "tiny-gemma3.gguf", model, tokenizer), model


def qwen3_directory(directory: Path) -> tuple[Path, transformers.PreTrainedModel]:
    """Safetensors in several shards, as large checkpoints come."""
    tokenizer = sentencepiece_tokenizer()
    model = random_model("Qwen3Config", "Qwen3ForCausalLM", QWEN3, tokenizer)
    model.save_pretrained(directory, max_shard_size="100KB")
    tokenizer.save_pretrained(directory)
    assert len(list(directory.glob("*.safetensors"))) > 1
    return directory, model
