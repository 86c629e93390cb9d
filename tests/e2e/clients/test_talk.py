"""`engine chat` and `engine complete` with a real server, as a person and as a program use them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from support.media.image_requests import picture
from support.processes.program import wait_until
from support.processes.terminal import Terminal
from support.servers.server import COMMAND, DEVICE, Server
from support.vision.checkpoints import vision_directory


def run(server: Server, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments, "--url", server.url],
        input=given,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_chat_command_works_on_a_terminal(server: Server, tmp_path: Path) -> None:
    """Messages, commands, Ctrl-C during an answer and at the prompt, the history of the next chat, and the end."""
    env = {"ENGINE_CACHE": str(tmp_path / "cache"), "ENGINE_API_KEY": "", "OPENAI_API_KEY": ""}
    command = [*COMMAND, "chat", "--url", server.url, "--temperature", "0"]
    saved = tmp_path / "chat.json"
    with Terminal(command, env) as terminal:
        terminal.wait_for(r"smollm2 at .*/help[^>]*>>> ")
        since = terminal.type("What is the capital of France?\n")
        terminal.wait_for(r"Paris(.|\n)*\d+ tokens, first after (.|\n)*>>> ", since)
        since = terminal.type("/retry\n")
        terminal.wait_for(r"Paris(.|\n)*\d+ tokens, first after (.|\n)*>>> ", since)
        since = terminal.type("Write a very long story about a dragon.\n")
        terminal.wait_for(r"story about a dragon.\n(.|\n)*\w+ \w+ \w+", since)
        since = terminal.type("\x03")
        terminal.wait_for(r"stopped(.|\n)*>>> ", since)
        wait_until(lambda: server.metric("engine:num_requests_running") == 0, 60, "it was aborted")
        since = terminal.type("\x03")
        terminal.wait_for(r"ends the chat(.|\n)*>>> ", since)
        since = terminal.type("/system You are brief.\n")
        terminal.wait_for(r"applies[^>]*>>> ", since)
        since = terminal.type("/nonsense\n")
        terminal.wait_for(r"error: unknown command /nonsense(.|\n)*>>> ", since)
        since = terminal.type(f"/save {saved}\n")
        terminal.wait_for(r"saved \d messages(.|\n)*>>> ", since)
        terminal.type("\x04")
        assert terminal.wait() == 0
    messages = json.loads(saved.read_text())
    roles = [message["role"] for message in messages]
    assert roles[:4] == ["system", "user", "assistant", "user"]
    assert "Paris" in messages[2]["content"]
    with Terminal([*command, "--load", str(saved)], env) as terminal:
        terminal.wait_for(">>> ")
        # The fourth last line of the first chat.
        since = terminal.type("\x1b[A" * 4)
        terminal.wait_for("Write a very long story", since)
        terminal.type("\x15/quit\n")
        assert terminal.wait() == 0


def test_chat_and_complete_commands_work_in_a_pipe(server: Server) -> None:
    answered = run(
        server, "chat", "--temperature", "0", given="What is the capital of France?\n/retry\n"
    )
    assert answered.returncode == 0, answered.stderr
    assert answered.stdout.count("Paris") >= 2
    assert ">>>" not in answered.stdout and "\x1b" not in answered.stdout
    quick = run(server, "chat", "-q", "What is the capital of France?", "--temperature", "0")
    assert "Paris" in quick.stdout
    greedy = ("--temperature", "0", "--max-tokens", "8")
    text = run(server, "complete", "The capital of France is", *greedy).stdout
    assert "Paris" in text
    assert run(server, "complete", *greedy, given="The capital of France is").stdout == text
    answer = json.loads(
        run(server, "complete", "The capital of France is", *greedy, "--json").stdout
    )
    assert answer["choices"][0]["text"] + "\n" == text
    assert answer["usage"]["completion_tokens"] == 8


def test_chat_starts_a_server_that_reads_images_and_stops_it(tmp_path: Path) -> None:
    model, _ = vision_directory(tmp_path / "model", "idefics3")
    picture(6, 100, 70).save(tmp_path / "cat.png")
    flags = ("--dtype", "float32", "--device", DEVICE, "--max-tokens", "12", "--temperature", "0")
    done = subprocess.run(
        [*COMMAND, "chat", str(model), *flags],
        input=f"/image {tmp_path / 'cat.png'}\nfox\n/clear\nfox\n",
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    with_image, without, end = done.stdout.split("\n")
    assert with_image != without and not end
    assert "stopped" in done.stderr


def test_failures_are_one_line(server: Server) -> None:
    failed = run(server, "chat", "--model", "absent", "-q", "hello")
    assert failed.returncode == 1
    assert failed.stderr.startswith("engine: error: ") and failed.stderr.count("\n") == 1
    assert "absent" in failed.stderr
    failed = run(server, "complete", given="")
    assert (failed.returncode, failed.stderr.count("\n")) == (1, 1)
    assert "prompt is empty" in failed.stderr
