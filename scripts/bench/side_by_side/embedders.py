"""The embedders that the benchmark `embeddings` compares: Engine over HTTP and in process, and its peers."""

from __future__ import annotations

import http.client
import json
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import urlsplit

import psutil
import transformers
from engine import LLM
from gguf import PoolingType
from support.gguf.bert import write_bert
from support.servers.server import Server

from .child import Child, Skipped
from .clients import free_port, run_clients

BACKENDS: Final = {
    "torch": "sentence-transformers, torch",
    "onnx": "sentence-transformers, ONNX Runtime",
    "openvino": "sentence-transformers, OpenVINO",
    "openvino-f32": "sentence-transformers, OpenVINO in float32",
}

Vectors = list[list[float]]


class Embedder(Protocol):
    """A program that embeds texts."""

    name: str

    def embed(self, batches: list[list[str]], clients: int) -> float:
        """Embed texts for `clients` clients. Return the seconds that it took."""

    def vectors(self, texts: list[str]) -> Vectors:
        """Return the vectors of texts."""

    def cpu_seconds(self) -> float:
        """Return its CPU time so far, not counting the clients of a server."""

    def close(self) -> None:
        """Stop its processes."""


class HTTPEmbedder:
    """A server with the route `/v1/embeddings`. Each client sends one text after the other."""

    def __init__(self, name: str, url: str, pid: int) -> None:
        self.name = name
        self._url = urlsplit(url)
        self._process = psutil.Process(pid)

    def embed(self, batches: list[list[str]], clients: int) -> float:
        texts = [text for batch in batches for text in batch]

        def send(share: list[str]) -> None:
            connection = self._connect()
            for text in share:
                _post(connection, text)
            connection.close()

        seconds, _ = run_clients(send, [texts[i::clients] for i in range(clients)])
        return seconds

    def vectors(self, texts: list[str]) -> Vectors:
        answers = [json.loads(_post(self._connect(), text)) for text in texts]
        return [answer["data"][0]["embedding"] for answer in answers]

    def cpu_seconds(self) -> float:
        return _cpu_seconds([self._process, *self._process.children(recursive=True)])

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(str(self._url.hostname), self._url.port)

    def close(self) -> None:
        """Do nothing; subclasses stop their server."""


def _post(connection: http.client.HTTPConnection, text: str) -> bytes:
    body = json.dumps({"model": "minilm", "input": text})
    connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    if response.status != 200:
        raise Skipped(answer.decode())
    return answer


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes if process.is_running())


class EngineServer(HTTPEmbedder):
    """Engine's server."""

    def __init__(self, name: str, model: Path, dtype: str) -> None:
        self._server = Server(str(model), "--served-model-name", "minilm", "--dtype", dtype)
        super().__init__(name, self._server.url, self._server.process.pid)

    def close(self) -> None:
        """Stop the server."""
        self._server.stop()


class EngineInProcess:
    """`LLM.embed`, which gets one text per client in each call."""

    def __init__(self, name: str, model: Path, dtype: str) -> None:
        self.name = name
        own = psutil.Process()
        before = set(own.children(recursive=True))
        self._llm = LLM(str(model), dtype=dtype)
        # Texts are tokenized in this process, which does little else at that time.
        self._processes = [own, *set(own.children(recursive=True)) - before]

    def embed(self, batches: list[list[str]], clients: int) -> float:
        start = time.perf_counter()
        for batch in batches:
            self._llm.embed(batch)
        return time.perf_counter() - start

    def vectors(self, texts: list[str]) -> Vectors:
        return [output.outputs.embedding for output in self._llm.embed(texts)]

    def cpu_seconds(self) -> float:
        return _cpu_seconds(self._processes)

    def close(self) -> None:
        """Stop the processes."""
        self._llm.close()


class LlamaServer(HTTPEmbedder):
    """The server of llama.cpp, with float32 weights."""

    def __init__(self, name: str, model: Path, peers: Path, directory: Path) -> None:
        binary = peers / "llama-server"
        if not binary.is_file():
            raise Skipped(f"{binary} is missing")
        tokenizer = transformers.AutoTokenizer.from_pretrained(model)
        bert = transformers.AutoModel.from_pretrained(model).float()
        file = write_bert(directory / "minilm.gguf", bert, tokenizer, PoolingType.MEAN)
        port = free_port()
        sizes = ("-np", "32", "-c", "16384", "-b", "16384", "-ub", "16384")
        command = (str(binary), "-m", str(file), "--embedding", "--port", str(port), *sizes)
        self._server = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        super().__init__(name, f"http://127.0.0.1:{port}", self._server.pid)
        deadline = time.monotonic() + 60
        while True:
            try:
                self.vectors(["warm up"])
                return
            except (OSError, Skipped, http.client.HTTPException) as error:
                if time.monotonic() > deadline or self._server.poll() is not None:
                    self.close()
                    raise Skipped(f"llama-server did not start: {error}") from error
                time.sleep(0.2)

    def close(self) -> None:
        """Stop the server."""
        self._server.terminate()
        self._server.wait()


class SentenceTransformers:
    """sentence-transformers in a separate process, which gets one text per client in each call."""

    def __init__(self, name: str, model: Path, backend: str, peers: Path) -> None:
        self.name = name
        python = peers / "sentence-transformers" / "bin" / "python"
        self._child = Child(python, "sentence_child.py", model, backend)
        self._process = psutil.Process(self._child.pid)
        self.close = self._child.close

    def embed(self, batches: list[list[str]], clients: int) -> float:
        seconds: float = self._child.ask({"batches": batches, "has_vectors": False})["seconds"]
        return seconds

    def vectors(self, texts: list[str]) -> Vectors:
        vectors: Vectors = self._child.ask({"batches": [texts], "has_vectors": True})["vectors"]
        return vectors

    def cpu_seconds(self) -> float:
        return _cpu_seconds([self._process])


def starts(
    model: Path, peers: Path, directory: Path, dtypes: list[str]
) -> dict[str, Callable[[str], Embedder]]:
    """Return, for each name, a function that starts the embedder, or raises `Skipped`."""
    found: dict[str, Callable[[str], Embedder]] = {}
    for dtype in dtypes:
        found[f"engine, HTTP, {dtype}"] = partial(EngineServer, model=model, dtype=dtype)
        found[f"engine, LLM.embed, {dtype}"] = partial(EngineInProcess, model=model, dtype=dtype)
    for backend, name in BACKENDS.items():
        found[name] = partial(SentenceTransformers, model=model, backend=backend, peers=peers)
    found["llama-server, HTTP"] = partial(
        LlamaServer, model=model, peers=peers, directory=directory
    )
    return found
