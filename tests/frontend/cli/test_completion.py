from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from engine.frontend.cli.commands import COMMANDS
from engine.frontend.cli.completion.shells import SCRIPTS
from engine.frontend.cli.completion.tree import Node, read_commands

pytestmark = pytest.mark.slow

COMPLETE = """\
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
_engine
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def tree() -> Node:
    return read_commands()


def test_tree_has_every_command_and_the_flags_that_apply(tree: Node) -> None:
    by_words = {node.words: node for node in tree.walk()}
    assert {words[0] for words in by_words if words} == set(COMMANDS)

    def flags(*words: str) -> set[str]:
        return {name for flag in by_words[words].flags for name in flag.names}

    assert {"--max-model-len", "--port"} <= flags("serve")
    assert {"--system", "--max-model-len"} <= flags("chat")
    assert {"--request-rate", "--max-model-len"} <= flags("bench", "serve")
    assert "--max-model-len" not in flags("status")
    assert "--yes" in flags("models", "rm")
    assert by_words["completion",].words_of_arguments == ("bash", "zsh", "fish")


def test_bash_completes_commands_flags_and_values(tree: Node, tmp_path: Path) -> None:
    script = tmp_path / "engine.bash"
    script.write_text(SCRIPTS["bash"](tree))

    def complete(*words: str) -> list[str]:
        command = ["bash", "-c", COMPLETE, "bash", str(script), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert not done.stderr
        return [line for line in done.stdout.splitlines() if line]

    assert complete("engine", "ch") == ["chat"]
    assert set(complete("engine", "")) == set(COMMANDS)
    assert complete("engine", "bench", "l") == ["latency"]
    assert complete("engine", "bench", "serve", "--request-r") == ["--request-rate"]
    assert complete("engine", "bench", "serve", "--dataset-name", "r") == ["random"]
    assert complete("engine", "serve", "model", "--max-model") == ["--max-model-len"]
    assert "bfloat16" in complete("engine", "serve", "--dtype", "")
    assert complete("engine", "completion", "f") == ["fish"]


@pytest.mark.parametrize(("shell", "flag"), [("bash", "-n"), ("zsh", "-n"), ("fish", "-n")])
def test_scripts_have_valid_syntax(tree: Node, tmp_path: Path, shell: str, flag: str) -> None:
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(SCRIPTS[shell](tree))
    subprocess.run([program, flag, str(script)], check=True, capture_output=True)
