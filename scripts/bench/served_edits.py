"""Measure the gain of drafts for edits of source code, on servers whose model writes known edits.

    scripts/bench/run served_edits [--count 4] [--rounds 3] [SERVER FLAGS]

A small model cannot edit code, so this benchmark writes one that does, with `draft_model`'s layers, which cost as much
as others and add nothing: the next token depends on the last one alone. The edits are `rename` and `local` of
`draft_edits`. Each token of a text before its edit gets a number of its own, which it keeps after the edit, and each
new token another. So the answer to a prompt is its edited copy. Tokens that occur once are found without doubt, but
names that the edit has changed already do not help with their next occurrences, as they would in real code.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from difflib import SequenceMatcher
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from draft_edits import KINDS
from draft_model import MODEL, TARGET, write_model
from drafts import NO_DRAFTS, measure_requests
from engine.frontend.model_source.config import resolve_model
from engine.frontend.model_source.options import ModelOptions
from engine.frontend.supervisor.console import Console
from engine.frontend.tokenizer.load import load_tokenizer
from support.servers.server import Server, default_model

MEASURED: Final = ("rename", "local")


class Edits:
    """Edits with numbered tokens. `following` has the token after each one in the answers."""

    def __init__(self) -> None:
        path = resolve_model(ModelOptions(model=default_model()), Console()).config.tokenizer_path
        self._tokenizer = load_tokenizer(path)
        self._num_used = 1
        self.following: dict[int, int] = {}

    def request(self, old: str, new: str) -> dict[str, Any]:
        """Return a request whose prompt is the old text, and whose answer is the new one."""
        before, after = (list(self._tokenizer.encode(text)) for text in (old, new))
        prompt = self._new(len(before))
        answer = self._new(1)
        matcher = SequenceMatcher(None, before, after, autojunk=False)
        for kind, start, stop, first, last in matcher.get_opcodes():
            answer += prompt[start:stop] if kind == "equal" else self._new(last - first)
        self.following |= dict(pairwise(answer))
        return {
            "model": MODEL,
            "prompt": [*prompt, answer[0]],
            "max_tokens": len(answer) - 1,
            "ignore_eos": True,
            "temperature": 0,
        }

    def known_answer(self, request: dict[str, Any]) -> str:
        """Return the text of the answer to a request."""
        tokens = [request["prompt"][-1]]
        for _ in range(request["max_tokens"]):
            tokens.append(self.following[tokens[-1]])
        return "".join(f"w{token}" for token in tokens[1:])

    def permutation(self) -> torch.Tensor:
        """Return the token after each one. Tokens that no answer goes on from precede those that no answer reaches."""
        size = -(-self._num_used // 64) * 64
        sources = [token for token in range(size) if token not in self.following]
        reached = set(self.following.values())
        targets = [token for token in range(size) if token not in reached]
        both = self.following | dict(zip(sources, targets, strict=True))
        return torch.tensor([both[token] for token in range(size)])

    def _new(self, count: int) -> list[int]:
        self._num_used += count
        return list(range(self._num_used - count, self._num_used))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=4, help="edits of each kind in a round")
    parser.add_argument("--rounds", type=int, default=3)
    given, flags = parser.parse_known_args()
    edits, rounds = Edits(), {}
    for kind in MEASURED:
        rng = random.Random(kind)
        rounds[kind] = [
            [edits.request(*KINDS[kind](rng)) for _ in range(given.count)]
            for _ in range(given.rounds)
        ]
    num_different = 0
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory, "model"), TARGET, edits.permutation(), 2)
        named = [str(model), "--served-model-name", MODEL, "--no-enable-prefix-caching", *flags]
        with Server(*named) as drafting, Server(*named, *NO_DRAFTS) as plain:
            for kind, requests in rounds.items():
                result = {"kind": kind, **measure_requests(drafting, plain, requests, 1)}
                print(json.dumps(result), flush=True)
                num_different += result["different_answers"]
                _, written = plain.post("/v1/completions", requests[-1][-1])
                assert written["choices"][0]["text"] == edits.known_answer(requests[-1][-1])
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main())
