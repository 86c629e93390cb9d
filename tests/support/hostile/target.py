"""A live server under attack with concurrent streams: its limits, routes and fields."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import psutil
from support.hostile import stream_monitor
from support.hostile.check_answer import find_fault
from support.hostile.client import HTTPClient, make_request
from support.servers.server import Server, default_model

MAX_PAUSE_S: Final = 0.5
"""Longest pause of other streams."""

MAX_GROWTH_BYTES: Final = 600 * 2**20
"""Most memory that a batch of attacks may cost one process, of which bodies in flight are a part."""

ENDS_STREAMS: Final = "abort_all"
"""A field that is not attacked, because it ends the streams whose tokens are compared."""

NUM_TRIES: Final = 3
CONTROL_S: Final = 0.5
NUM_THREADS: Final = 4

SERVER_ARGS: Final = [
    "--device",
    "null",
    "--null-step-ms",
    "40",
    "--max-model-len",
    "512",
    "-np",
    "64",
    "--max-logprobs",
    "-1",
    "--timeout-slow-client",
    "5",
    "--tool-call-parser",
    "hermes",
    "--api-server-count",
    "1",
    "--resume-grace",
    "0.05",
    "--served-model-name",
    "smollm2",
    "--enable-lora",
    "--allow-runtime-lora-updating",
]

BASES: Final[dict[str, bytes]] = {
    "instances": b'[{"prompt": "Hi", "max_tokens": 1}]',
    "messages": b'[{"role": "user", "content": "Hi"}]',
    "prompt": b'"Hi"',
    "tokens": b"[1, 2]",
    "max_tokens": b"1",
    "max_output_tokens": b"1",
    "options": b'{"num_predict": 1}',
    "input": b'"Hi"',
    "input_prefix": b'"Hi"',
    "input_suffix": b'"Hi"',
    "query": b'"Hi"',
    "items": b'["Hi"]',
    "questions": b'[{"type": "predicate", "instructions": "Hi?"}]',
    "label_token_ids": b"[1]",
    "documents": b'[{"text": "Hi"}]',
    "texts": b'["Hi"]',
    "parameters": b'{"max_new_tokens": 1}',
    "sampling_params": b'{"max_new_tokens": 1, "max_tokens": 1}',
    "token_ids": b"[1]",
    "reasoning_parser": b'"qwen3"',
    "text_1": b'"Hi"',
    "text_2": b'"Hi"',
    "bytes": b"1",
    "filename": b'"a"',
    "purpose": b'"user_data"',
    "state": b'"Hi"',
    "contents": b'[{"parts": [{"text": "Hi"}]}]',
    "generationConfig": b'{"maxOutputTokens": 1}',
    "generation_config": b'{"max_output_tokens": 1}',
    "generate_response": b'{"choices": [{"token_ids": [1]}]}',
    "generate_responses": b'[{"choices": [{"token_ids": [1]}]}]',
    "init_info": b'{"master_address": "a", "master_port": 1, "world_size": 2}',
    "update_info": b"{}",
    "backend": b'"gloo"',
    "master_address": b'"a"',
    "master_port": b"1",
    "world_size": b"2",
    "names": b"[]",
    "lora_name": b'"a"',
    "dtypes": b"[]",
    "shapes": b"[]",
}
"""Fields that make a body whole, as far as its schema has them."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One request to the route `path`. A refusal must name `field`; `may_succeed` is false for what must be refused."""

    name: str
    request: Callable[[], bytes]
    field: str = ""
    path: str = ""
    may_succeed: bool = True


@dataclass(frozen=True, slots=True)
class Route:
    """`schema` is the name of its body's schema, "" without one; `fields` are the schema's."""

    method: str
    path: str
    schema: str = ""
    fields: tuple[str, ...] = ()

    @property
    def is_batch(self) -> bool:
        """True if the messages are a list of conversations."""
        return self.schema.startswith("Batch")

    def body(self, field: str, value: bytes) -> bytes:
        """Return a body that is valid except for `value` in `field`."""
        members = {name: base for name, base in BASES.items() if name in self.fields}
        if self.path.startswith("/api/") and "model" in self.fields:
            members["model"] = b'"smollm2"'
        if self.is_batch:
            members["messages"] = b"[" + members["messages"] + b"]"
        for other in ("messages", "input"):
            if other in members and "prompt" in members and self.path != "/api/embed":
                # A body may have only one of these two. Keep the one that the attack is on. /api/embed reads only
                # its input, and its schema has the prompt of /api/embeddings. The prompt of a response is a template
                # that does not replace the input.
                is_response = self.path.startswith("/v1/responses")
                del members[other if field == "prompt" and not is_response else "prompt"]
        if "action" in self.fields:
            # The ID of the answer that the action is for.
            members["id"] = b'"answer"'
        if "label_token_ids" not in members:
            # The items of conversations are objects.
            members.pop("items", None)
        if "text_1" in members:
            # The second texts of a score have other names than this one, which is that of a ranking.
            members.pop("documents", None)
        if "documents" in members:
            # A ranking has only one of these two.
            is_given = field == "texts" and value != b"null"
            members.pop("documents" if is_given else "texts", None)
        if "input" in members and self.path != "/v1/responses":
            # A conversation may replace the input of an embedding.
            members.pop("messages", None)
        if "inputs" in self.fields and "texts" not in self.fields:
            # Cohere's bodies, which have other `inputs`, are whole with texts.
            members["inputs"] = b'"Hi"'
        if "inputs" in members and "parameters" in self.fields:
            # TGI's answers fill the context unless the parameters limit them, so the text leaves little of it.
            members["inputs"] = json.dumps("Hi " * 460).encode()
        if "prompt" in self.fields and "inputs" in members:
            # A text to tokenize has one of these names.
            for other in ("prompt", "messages") if field == "inputs" else ("inputs",):
                members.pop(other, None)
        if "state" in members:
            # TypeSafe's questions have names.
            members["questions"] = b'{"q": {"type": "noul", "instructions": "Hi?"}}'
        if self.path.endswith("batchEmbedContents"):
            members["requests"] = b'[{"content": "Hi"}]'
        if "taskType" in self.fields:
            members["content"] = b'"Hi"'
        if "input_ids" in self.fields and field != "input_ids":
            # Of SGLang's bodies only; other schemas have another `text`.
            members["text"] = b'"Hi"'
        if "lora_name" in members:
            members["lora_path"] = b'"a"'
        if self.path == "/adapters":
            members |= {"name": b'"a"', "src": b'"a"'}
        if "truncate_size" in self.fields:
            # The name of a tensor.
            members["name"] = b'"Hi"'
        members[field] = value
        pairs = (json.dumps(name).encode() + b": " + text for name, text in members.items())
        return b"{" + b", ".join(pairs) + b"}"

    def attack(self, field: str, name: str, value: Callable[[], bytes]) -> Attack:
        def request() -> bytes:
            path = self.path.replace("{name}:", "smollm2:")
            return make_request(self.method, path, self.body(field, value()))

        return Attack(f"{self.method} {self.path} {field}: {name}", request, field, self.path)


@dataclass(frozen=True, slots=True)
class Interval:
    """Measurements of the stream monitor, among them the longest pause of a stream."""

    pause_s: float
    num_events: int
    broken: list[str]

    @property
    def is_suspicious(self) -> bool:
        return self.pause_s > MAX_PAUSE_S


class Target:
    def __init__(self, server: Server, watcher: subprocess.Popen[str]) -> None:
        self.server = server
        parts = urlsplit(server.url)
        assert parts.hostname is not None and parts.port is not None
        self.address = parts.hostname, parts.port
        self._monitor = watcher
        self._processes = self._find_processes()
        self.routes = list(_routes(server.get("/openapi.json")[1]))

    @property
    def is_alive(self) -> bool:
        return self.server.process.poll() is None

    @contextmanager
    def client(self) -> Iterator[HTTPClient]:
        client = HTTPClient(self.address)
        try:
            yield client
        finally:
            client.close()

    def find_faults(self, attacks: Sequence[Attack], num_threads: int = 1) -> list[str]:
        """Run the attacks, and return the faults of answers, streams, processes and memory."""
        faults: list[str] = []
        memory = self.begin_memory()
        with self.watching() as intervals, ThreadPoolExecutor(num_threads) as threads:
            for some in threads.map(self._attack_all, _dealt(attacks, num_threads)):
                faults += some
        [interval] = intervals
        names = attacks[0].name if len(attacks) == 1 else f"{attacks[0].name} … {attacks[-1].name}"
        faults += [f"{names}: {fault}" for fault in (*interval.broken, *self._find_deaths())]
        faults += [f"{names}: {fault}" for fault in self.find_growth(memory)]
        return faults + (self._find_pauses(attacks) if interval.is_suspicious else [])

    def _find_pauses(self, attacks: Sequence[Attack]) -> list[str]:
        """Return the faults of the attacks that pause the streams again. Each half of them is examined by itself."""
        if len(attacks) == 1:
            fault = self._find_pause(attacks[0])
            return [fault] if fault else []
        with self.watching() as intervals:
            self._attack_all(attacks)
        if not intervals[0].is_suspicious:
            return []
        middle = len(attacks) // 2
        return self._find_pauses(attacks[:middle]) + self._find_pauses(attacks[middle:])

    def begin_memory(self) -> dict[int, tuple[str, int]]:
        """Reset each process's peak memory to its current memory, and return that."""
        for process in self.server.find_children():
            try:
                Path(f"/proc/{process.pid}/clear_refs").write_text("5")
            except (OSError, psutil.Error):
                continue
        return self._memory_of("VmRSS")

    def find_growth(self, before: dict[int, tuple[str, int]]) -> list[str]:
        grown = []
        for pid, (name, peak) in self._memory_of("VmHWM").items():
            growth = peak - before.get(pid, ("", 0))[1]
            if growth > MAX_GROWTH_BYTES:
                grown.append(f"{name} ({pid}) took {growth / 2**20:.0f} MiB more")
        return grown

    def _attack_all(self, attacks: Sequence[Attack]) -> list[str]:
        found = []
        with self.client() as client:
            for attack in attacks:
                fault = find_fault(
                    client.send(attack.request()),
                    attack.field,
                    path=attack.path,
                    may_succeed=attack.may_succeed,
                )
                if fault:
                    found.append(f"{attack.name}: {fault}")
        return found

    def _find_pause(self, attack: Attack) -> str:
        """Return a fault if the attack alone pauses the streams every time, and longer than no attack does."""
        pauses = []
        for _ in range(NUM_TRIES):
            with self.watching() as intervals:
                self._attack_all([attack])
            with self.watching() as controls:
                time.sleep(CONTROL_S)
            [interval], [control] = intervals, controls
            if not interval.is_suspicious or interval.pause_s < MAX_PAUSE_S + control.pause_s:
                return ""
            pauses.append(interval.pause_s)
        return f"{attack.name}: pauses other streams for {min(pauses):.2f} s"

    @contextmanager
    def watching(self) -> Iterator[list[Interval]]:
        """Monitor the streams in the context; afterwards, the list contains the interval."""
        intervals: list[Interval] = []
        self._ask("begin")
        yield intervals
        intervals.append(Interval(**self._ask("end")))

    def _ask(self, command: str) -> dict[str, Any]:
        assert self._monitor.stdin is not None and self._monitor.stdout is not None
        self._monitor.stdin.write(f"{command}\n")
        self._monitor.stdin.flush()
        answer: dict[str, Any] = json.loads(self._monitor.stdout.readline())
        return answer

    def _find_processes(self) -> dict[str, int]:
        status, answer = self.server.get("/engine/status")
        assert status == 200, answer
        return {process["name"]: process["pid"] for process in answer["processes"]}

    def _find_deaths(self) -> list[str]:
        """Return the processes that have been replaced since the last call, with what the log says about them."""
        self.server.wait_until_whole()
        now = self._find_processes()
        dead = [name for name, pid in self._processes.items() if now.get(name) != pid]
        self._processes = now
        lines = self.server.log.splitlines() if dead else []
        return [f"{name} died: {[line for line in lines if name in line][-5:]}" for name in dead]

    def _memory_of(self, key: str) -> dict[int, tuple[str, int]]:
        """Return the bytes of `VmRSS` or `VmHWM` by process."""
        found = {}
        for process in self.server.find_children():
            try:
                text = Path(f"/proc/{process.pid}/status").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            values = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
            if key in values:
                size = int(values[key].split()[0]) * 1024
                found[process.pid] = values["Name"].strip(), size
        return found


def _dealt(attacks: Sequence[Attack], num_hands: int) -> list[Sequence[Attack]]:
    return [attacks[first::num_hands] for first in range(num_hands)]


def _routes(document: dict[str, Any]) -> Iterator[Route]:
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            # Forms have tests of their own.
            if "application/json" not in operation.get("requestBody", {}).get("content", {}):
                yield Route(method.upper(), path)
                continue
            body = operation["requestBody"]["content"]["application/json"]["schema"]
            for choice in body.get("anyOf", [body]):
                schema = choice["$ref"].rpartition("/")[2]
                fields = (name for name in schemas[schema]["properties"] if name != ENDS_STREAMS)
                yield Route(method.upper(), path, schema, tuple(fields))


@contextmanager
def open_target(*args: str) -> Iterator[Target]:
    """Run a server of the null device with a stream monitor, and check that its log has no traceback."""
    with Server(default_model(), *SERVER_ARGS, *args) as server:
        parts = urlsplit(server.url)
        with subprocess.Popen(
            [
                sys.executable,
                stream_monitor.__file__,
                str(parts.hostname),
                str(parts.port),
                str(server.process.pid),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as watcher:
            try:
                yield Target(server, watcher)
            finally:
                watcher.kill()
        code = server.stop()
    assert code == 0, server.log
    assert "Traceback" not in server.log, server.log[server.log.index("Traceback") :][:5000]
