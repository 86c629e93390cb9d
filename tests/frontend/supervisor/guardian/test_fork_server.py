from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from support.processes.forked import ForkedProcess

pytestmark = pytest.mark.slow

PROGRAM = """
import json, os, signal, sys
open_fds = [int(fd) for fd in os.listdir("/proc/self/fd")]
print(json.dumps({
    "arguments": sys.argv[1:],
    "environment": dict(os.environ),
    "leads its group": os.getpgid(0) == os.getpid(),
    "files": {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in open_fds if os.path.exists(f"/proc/self/fd/{fd}")},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
}))
"""


def test_a_program_gets_its_arguments_environment_and_files_only(tmp_path: Path) -> None:
    file = (tmp_path / "file").open("w")
    env = {"NAME": "a\udcff value", "HOME": "/"}
    process = ForkedProcess(["code", "-q"], env, pass_fds=[file.fileno()])
    with process.stdin:
        process.stdin.write(f"exec({PROGRAM!r})\nraise SystemExit(7)\n")
    lines = process.stdout.read().splitlines()
    assert process.wait() == 7
    seen = json.loads(next(line[line.index("{") :] for line in lines if "{" in line))
    assert seen["arguments"] == ["-q"]
    assert seen["environment"] == env
    assert seen["leads its group"]
    assert seen["files"].pop(str(file.fileno())) == file.name
    assert sorted(seen["files"]) == ["0", "1", "2"]
    assert seen["blocked"] == []
    file.close()


def test_a_program_ends_after_its_threads_and_exit_handlers() -> None:
    process = ForkedProcess(["code", "-q"])
    with process.stdin:
        process.stdin.write(
            "import atexit, threading\n"
            "atexit.register(print, 'a handler')\n"
            "wait = threading.main_thread().join\n"
            "threading.Thread(target=lambda: (wait(), print('a thread'))).start()\n"
        )
    output = process.stdout.read()
    assert output.index("a thread") < output.index("a handler")
    assert process.wait(20) == 0


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("", 0),
        ("raise SystemExit", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit('a message')", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_the_exit_code_is_that_of_the_program(program: str, code: int) -> None:
    process = ForkedProcess(["code", "-q"])
    with process.stdin:
        process.stdin.write(program + "\n")
    assert process.wait(20) == code


STOPPED = """
import os, signal, time
from engine.frontend.supervisor.guardian.fork_server import ForkServer
server = ForkServer.start({})
os.kill(server.pid, signal.SIGSTOP)
start = time.monotonic()
try:
    server.fork(["code"], {}, {})
except TimeoutError:
    print("given up in time", time.monotonic() - start < ForkServer.reply_s / 2)
_, status = os.waitpid(server.pid, 0)
print(os.WTERMSIG(status))
"""


def test_a_stopped_fork_server_is_given_up_soon() -> None:
    process = ForkedProcess(["code", "-q"])
    with process.stdin:
        process.stdin.write(f"exec({STOPPED!r})\n")
    output = process.stdout.read()
    assert "given up in time True" in output and f"\n{signal.SIGKILL:d}\n" in output
    assert process.wait(20) == 0
