"""Measure a draft model that agrees with its model in a given share of the tokens, compared with no drafts.

    scripts/bench/run draft_model [--agreement 0.8] [--num-tokens N] [-c 1 4 16 32] [--rounds 3] [--tokens 128]

Both models are written for this benchmark. Their matrices have the sizes, and so the cost, of Llama models with 195
million and 15 million parameters. But their layers add nothing: the next token is a permutation of the last one. For
the tokens on which the models disagree, the draft model has another permutation. So the agreement is known, and no text
repeats.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from drafts import NO_DRAFTS, measure_requests
from support.servers.server import Server
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

MODEL: Final = "drafts"
VOCAB_SIZE: Final = 8192
TARGET: Final = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16}
DRAFT: Final = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4}


def write_model(directory: Path, sizes: dict[str, int], following: torch.Tensor, seed: int) -> Path:
    """Write a model that generates token `following[i]` after token i."""
    torch.manual_seed(seed)
    width, vocab_size = sizes["hidden_size"], len(following)
    heads = width // 64
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        bos_token_id=0,
        eos_token_id=0,
        **sizes,
    )
    model = transformers.LlamaForCausalLM(config)
    embedding = torch.randn(vocab_size, width)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight[following] = embedding / width**0.5
    model.bfloat16().save_pretrained(directory)
    vocabulary = {f"w{token}": token for token in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def permutations(agreement: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two permutations: one cycle through all tokens, and one that equals it for a share of the tokens."""
    generator = torch.Generator().manual_seed(seed)
    cycle = torch.randperm(VOCAB_SIZE, generator=generator)
    following = torch.empty(VOCAB_SIZE, dtype=torch.long)
    following[cycle] = cycle.roll(-1)
    others = torch.randperm(VOCAB_SIZE, generator=generator)[: round(VOCAB_SIZE * (1 - agreement))]
    drafted = following.clone()
    drafted[others] = following[others.roll(1)]
    return following, drafted


def make_requests(count: int, num_tokens: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        {
            "model": MODEL,
            "prompt": [rng.randrange(1, VOCAB_SIZE) for _ in range(64)],
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }
        for _ in range(count)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--agreement", type=float, default=0.8)
    parser.add_argument("--num-tokens", type=int, default=5, help="maximum drafts per step")
    parser.add_argument("-c", "--concurrency", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    given = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as directory:
        following, drafted = permutations(given.agreement, 1)
        target = write_model(Path(directory, "target"), TARGET, following, 2)
        draft = write_model(Path(directory, "draft"), DRAFT, drafted, 3)
        named = [str(target), "--served-model-name", MODEL, "--no-enable-prefix-caching"]
        speculative = {"model": str(draft), "num_speculative_tokens": given.num_tokens}
        how = ["--speculative-config", json.dumps(speculative)]
        with Server(*named, *how) as drafting, Server(*named, *NO_DRAFTS) as plain:
            for concurrency in given.concurrency:
                requests = [
                    make_requests(max(4, 2 * concurrency), given.tokens, number)
                    for number in range(given.rounds)
                ]
                result = measure_requests(drafting, plain, requests, concurrency)
                result = {"agreement": given.agreement, "concurrency": concurrency, **result}
                print(json.dumps(result), flush=True)
                results.append(result)
    return int(any(result["different_answers"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
