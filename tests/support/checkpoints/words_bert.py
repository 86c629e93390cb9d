"""A tiny random BERT with a classification head, whose vocabulary is a few words."""

from __future__ import annotations

from pathlib import Path

import tokenizers
import torch
import transformers

WORDS = "the quick brown fox jumps over lazy dog while seven wizards brew tea in old tower good bad"


def bert_directory(path: Path, num_labels: int) -> tuple[Path, transformers.PreTrainedModel]:
    """Write a random BERT with a classification head, whose vocabulary is a few words."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS.split(), *map(chr, range(97, 123))]
    vocab = {name: i for i, name in enumerate(names)}
    vocab |= {f"##{chr(c)}": len(vocab) + i for i, c in enumerate(range(97, 123))}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.decoder = tokenizers.decoders.WordPiece()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
    )
    torch.manual_seed(2)
    config = transformers.BertConfig(
        vocab_size=len(vocab),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        num_labels=num_labels,
    )
    if num_labels > 1:
        config.id2label = dict(enumerate(("good", "bad", "neither")))
    model = transformers.BertForSequenceClassification(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.5)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path, model
