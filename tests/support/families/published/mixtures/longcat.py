"""LongCat-Flash-Lite, a LongCat-Flash that also embeds the n-grams that end with a token."""

from __future__ import annotations

import torch
import transformers
from support.families.published.form import Published
from torch import nn

_LONGEST, _HEADS, _RATIO, _END = 3, 2, 1.5, 7


class _Embedding(nn.Module):
    """The mean of the embeddings of a token and of the n-grams that end with it."""

    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        self.words, (self._vocab_size, size) = words, words.weight.shape
        count = (_LONGEST - 1) * _HEADS
        sizes = [int(_RATIO * self._vocab_size) + 2 * i + 1 for i in range(count)]
        self.embedders = nn.ModuleList(nn.Embedding(rows, size // count) for rows in sizes)
        self.post_projs = nn.ModuleList(
            nn.Linear(size // count, size, bias=False) for _ in range(count)
        )
        for parameter in (*self.embedders.parameters(), *self.post_projs.parameters()):
            nn.init.normal_(parameter, 0, 0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        (tokens,) = ids.tolist()
        return torch.stack([self._mean(tokens[: i + 1]) for i in range(len(tokens))])[None]

    def _mean(self, text: list[int]) -> torch.Tensor:
        ends = [i for i, token in enumerate(text[:-1]) if token == _END]
        text = text[ends[-1] + 1 if ends else 0 :]
        found = [self.words.weight[text[-1]]]
        for i, (table, project) in enumerate(zip(self.embedders, self.post_projs, strict=True)):
            number = 0
            for token in text[-(2 + i // _HEADS) :]:
                number = number * self._vocab_size + token
            found.append(project(table.weight[number % len(table.weight)]))
        return torch.stack(found).mean(0)


def _with_ngrams(reference: transformers.PreTrainedModel) -> None:
    reference.model.embed_tokens = _Embedding(reference.model.embed_tokens)


LONGCAT_NGRAM = Published(
    "longcat",
    {},
    {
        "model_type": "longcat_flash_ngram",
        "ngram_vocab_size_ratio": _RATIO,
        "emb_neighbor_num": _LONGEST,
        "emb_split_num": _HEADS,
        "eos_token_id": _END,
    },
    (
        (r"embed_tokens\.words", "embed_tokens"),
        (r"embed_tokens\.(embedders|post_projs)", r"ngram_embeddings.\1"),
    ),
    prepare=_with_ngrams,
)
