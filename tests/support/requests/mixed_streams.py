"""Streams of requests with every feature that a crash could affect, read to their end over HTTP."""

from __future__ import annotations

import http.client
import json
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from support.processes.program import wait_until
from support.servers.server import Server

SILENCE_S = 240.0
"""Several recoveries in a row, on a slow machine."""

STORY: dict[str, Any] = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "top_p": 0.9},
    {"logprobs": 2},
    {"n": 2, "temperature": 0.8, "logprobs": 0, "logprob_token_ids": [260, 3]},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"stop": [" the end", "zzz"], "include_stop_str_in_output": True},
    {"min_tokens": 40, "ignore_eos": False, "temperature": 1.0},
    {"prompt_logprobs": 1, "logprobs": 0, "stream": False, "stream_options": None},
    {"structured_outputs": {"regex": "([a-z]{3,9} ){20}[a-z]+"}, "temperature": 1.0},
    {"temperature": 0.9, "dry_multiplier": 0.8, "xtc_probability": 0.5, "dynatemp_range": 0.3},
    {"max_tokens": 20, "bad_words": [" was"], "logit_bias": {"260": -50}},
)

WITHOUT_LOGPROBS: dict[str, Any] = dict.fromkeys(
    ("logprobs", "logprob_token_ids", "prompt_logprobs")
)
"""Fields that replace those of a request whose log-probabilities are not compared."""


def bodies(count: int) -> list[dict[str, Any]]:
    """Return requests of all kinds, each with its own prompt and seed."""
    return [
        {
            "prompt": f"Chapter {number}. Once upon a time there",
            "seed": number,
            "stream": True,
            "stream_options": {"include_usage": True},
            **STORY,
            **KINDS[number % len(KINDS)],
        }
        for number in range(count)
    ]


@dataclass
class Stream:
    """A stream. `answer` is the joined content that the client received; `num_events` counts its events.

    After `max_events` the client disconnects. `port` is the client's port.
    """

    body: dict[str, Any]
    max_events: int = sys.maxsize
    headers: dict[str, str] = field(default_factory=dict)
    num_events: int = 0
    answer: dict[str, Any] = field(default_factory=dict)
    port: int = 0

    def read(self, url: str) -> None:
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=SILENCE_S)
        try:
            headers = {"content-type": "application/json", **self.headers}
            connection.connect()
            self.port = connection.sock.getsockname()[1]
            connection.request("POST", "/v1/completions", json.dumps(self.body), headers)
            self._read(connection.getresponse())
        except (OSError, http.client.HTTPException) as error:
            self.answer["connection"] = repr(error)
        finally:
            connection.close()

    def _read(self, response: http.client.HTTPResponse) -> None:
        self.answer["status"] = response.status
        if response.status != 200:
            self.answer["error"] = json.loads(response.read())["error"]
            return
        if not self.body["stream"]:
            self._take(json.loads(response.read()))
            self.answer["done"] = True
            return
        for line in response:
            if line.startswith(b"data: {"):
                self._take(json.loads(line[6:]))
            elif line.startswith(b"data: [DONE]"):
                self.answer["done"] = True
            if self.num_events >= self.max_events:
                return
        if "done" not in self.answer:
            self.answer["connection"] = "closed before the end"

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.answer["error"] = event["error"]
            return
        for choice in event["choices"]:
            collected = self.answer.setdefault(choice["index"], {"text": "", "logprobs": []})
            collected["text"] += choice["text"]
            if logprobs := choice.get("logprobs"):
                names = ("tokens", "token_logprobs", "top_logprobs")
                collected["logprobs"] += zip(*(logprobs[name] for name in names), strict=True)
            for name in ("finish_reason", "stop_reason", "prompt_logprobs"):
                if choice.get(name) is not None:
                    collected[name] = choice[name]
        if usage := event.get("usage"):
            self.answer["usage"] = usage["prompt_tokens"], usage["completion_tokens"]
        self.num_events += 1


class Streams:
    """Streams that all start at once."""

    def __init__(
        self,
        server: Server,
        requests: list[dict[str, Any]],
        max_events: Sequence[int] = (),
        headers: dict[str, str] | None = None,
    ) -> None:
        limits = max_events or [sys.maxsize] * len(requests)
        self.streams = [Stream(*each, headers or {}) for each in zip(requests, limits, strict=True)]
        self._threads = [
            threading.Thread(target=stream.read, args=(server.url,)) for stream in self.streams
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_events(self) -> int:
        return sum(stream.num_events for stream in self.streams)

    def wait_for_events(self, count: int) -> None:
        """Wait until `count` more events have arrived."""
        goal = self.num_events + count
        wait_until(lambda: self.num_events >= goal, what=f"{count} events of the streams")

    def wait_until_all_run(self) -> None:
        """Wait for an event of each stream. A request whose frontend hangs while parsing it is rejected later."""
        wait_until(lambda: all(each.num_events for each in self.streams), what="all streams run")

    def answers(self) -> list[dict[str, Any]]:
        for thread in self._threads:
            thread.join()
        return [stream.answer for stream in self.streams]


def undisturbed_answers(server: Server, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers without any fault, with which all others are compared."""
    answers = Streams(server, requests).answers()
    assert [answer for answer in answers if "done" not in answer or "error" in answer] == []
    return answers


def differences(answers: list[dict[str, Any]], expected: list[dict[str, Any]]) -> list[str]:
    """Return a line for each part of an answer that is not as expected, with the first place where it differs."""
    found = []
    for number, (answer, wanted) in enumerate(zip(answers, expected, strict=True)):
        for key in answer.keys() | wanted.keys():
            got, want = repr(answer.get(key)), repr(wanted.get(key))
            if got != want:
                pairs = enumerate(zip(got, want, strict=False))
                begin = next((i for i, (a, b) in pairs if a != b), min(len(got), len(want))) - 40
                place = slice(max(0, begin), max(0, begin) + 200)
                found.append(f"request {number}, {key}: {got[place]} instead of {want[place]}")
    return found
