import ast
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from engine.frontend.chat import FORMATS, reasoning_parser
from engine.frontend.cli.arguments import Settings, parse_settings
from engine.frontend.cli.options import FLAGS, OPTIONS
from engine.protocol.config import PrefixHash

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
ENGINE = [sys.executable, "-P", "-m", "engine.frontend.cli.main"]


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ENGINE, *args], capture_output=True, text=True, timeout=60, env={**os.environ, **env}
    )


def parse(*argv: str, **environ: str) -> Settings:
    return parse_settings(argv, environ)


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        parse(*argv)
    assert stopped.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1, line
    return line


@pytest.mark.parametrize(
    ("command", "heavy"),
    [
        (["--help"], "msgspec zmq numpy asyncio rich"),
        (
            ["serve", "--help"],
            "torch numpy transformers tokenizers jinja2 uvicorn asyncio rich aiohttp typing_extensions",
        ),
    ],
)
def test_help_imports_no_heavy_modules(command: list[str], heavy: str) -> None:
    """Assert which modules help does not import, because times differ between machines."""
    program = (
        "import sys\nfrom engine.frontend.cli.main import main\n"
        f"try: main({command})\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    ran = subprocess.run(
        [sys.executable, "-P", "-c", program], check=True, capture_output=True, text=True
    )
    assert ran.stdout.startswith("usage: engine")
    assert not set(heavy.split()) & set(ran.stderr.split())


def test_an_application_that_imports_engine_can_use_all_of_uvicorn() -> None:
    """Engine itself imports neither uvicorn's command line nor what configures logging."""
    program = (
        "import sys\nfrom engine import LLM\nfrom engine.frontend.http import server\n"
        "assert not {'click', 'socketserver'} & sys.modules.keys()\n"
        "import uvicorn\nassert callable(uvicorn.run)\nassert uvicorn.__version__\n"
        "import logging.config\nlogging.config.dictConfig({'version': 1})\n"
        "uvicorn.Config(server, log_config=uvicorn.config.LOGGING_CONFIG)"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True)


def test_version_is_printed_and_unknown_command_suggests_a_known_one() -> None:
    import engine

    assert run("--version").stdout == f"engine {engine.__version__}\n"
    assert run().returncode == 2
    wrong = run("sevre")
    assert wrong.returncode == 2
    assert "sevre" in wrong.stderr
    assert "serve" in wrong.stderr


def test_help_lists_every_flag_once() -> None:
    text = run("serve", "--help").stdout
    for option in OPTIONS:
        assert re.findall(rf"^  {option.flag}\b(?!-)", text, re.MULTILINE) == [f"  {option.flag}"]


def test_every_tool_and_reasoning_parser_exists() -> None:
    choices = {"auto", "none"}
    assert {*FLAGS["--tool-call-parser"].choices} == FORMATS.keys() | choices
    for name in {*FLAGS["--reasoning-parser"].choices} - choices:
        assert reasoning_parser(name)("")


def test_every_flag_sets_a_field_that_is_read() -> None:
    """Each field that a flag sets is read outside of the files that declare and set it."""
    writers = {*(ROOT / "protocol/config").iterdir(), ROOT / "frontend/cli/arguments.py"}
    read = set()
    for part in ("protocol", "core", "workers", "frontend"):
        for path in (ROOT / part).rglob("*.py"):
            if path not in writers:
                for node in ast.walk(ast.parse(path.read_text())):
                    if isinstance(node, ast.Attribute):
                        read.add(node.attr)
    # A property that is read reads fields.
    for path in (ROOT / "protocol/config").iterdir():
        for node in ast.walk(ast.parse(path.read_text())) if path.suffix == ".py" else ():
            if isinstance(node, ast.FunctionDef) and node.name in read:
                read |= {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
    read |= {"workers_per_core", "distributed_executor_backend"}
    fields = {option.field for option in OPTIONS if option.section != "launch"}
    assert fields <= read, f"nothing reads {sorted(fields - read)}"


def test_settings_contain_only_given_flags() -> None:
    assert all(fields == {} for fields in parse().values())


def test_model_may_be_positional_or_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse("org/name")["model"] == {"model": "org/name"}
    assert parse("--port", "1", "org/name", "--seed", "2")["model"]["model"] == "org/name"
    for flag in ("--model", "--model-path", "-m"):
        assert parse(flag, "org/name")["model"] == {"model": "org/name"}
    assert "two models" in refusal(capsys, "a", "--model", "b")
    assert "'b'" in refusal(capsys, "a", "b")


@pytest.mark.parametrize(
    ("argv", "section", "field", "value"),
    [
        (["--max-model-len", "32k"], "model", "max_model_len", 32_000),
        (["--max-model-len=32K"], "model", "max_model_len", 32_768),
        (["--max_model_len", "25.6k"], "model", "max_model_len", 25_600),
        (["--max-model-len", "auto"], "model", "max_model_len", None),
        (["--max-model-len", "-1"], "model", "max_model_len", None),
        (["-c", "4096"], "model", "ctx_size", 4096),
        (["--context-length", "4096"], "model", "max_model_len", 4096),
        (["--dtype", "half"], "model", "dtype", "float16"),
        (["--hf-overrides", '{"a": {"b": 1}}'], "model", "hf_overrides", {"a": {"b": 1}}),
        (["--served-model-name", "a", "b"], "model", "served_model_name", ("a", "b")),
        (["--alias", "a, b"], "model", "served_model_name", ("a", "b")),
        (["-a", "a", "b"], "model", "served_model_name", ("a", "b")),
        (["--slot-save-path", "a"], "cache", "disk_path", "a"),
        (["--kv-cache-memory-bytes", "4GiB"], "cache", "kv_cache_memory_bytes", 4 << 30),
        (["--kv-cache-memory-bytes", "4GB"], "cache", "kv_cache_memory_bytes", 4 * 10**9),
        (["--mem-fraction-static", "0.5"], "cache", "gpu_memory_utilization", 0.5),
        (["--no-enable-prefix-caching"], "cache", "enable_prefix_caching", False),
        (["--disable-radix-cache"], "cache", "enable_prefix_caching", False),
        (["--prefix-hash", "xxh3"], "cache", "prefix_hash", PrefixHash.XXH3),
        (["--prefix-caching-hash-algo", "xxhash"], "cache", "prefix_hash", PrefixHash.XXH3),
        (["--prefix-caching-hash-algo", "sha256"], "cache", "prefix_hash", PrefixHash.SHA256),
        (["--max-running-requests", "8"], "scheduler", "max_num_seqs", 8),
        (["-np", "8"], "scheduler", "max_num_seqs", 8),
        (["--chunked-prefill-size", "64"], "scheduler", "max_num_batched_tokens", 64),
        (["--max_num_tokens", "64"], "scheduler", "max_num_batched_tokens", 64),
        (["--api-key", "a", "b"], "frontend", "api_keys", ("a", "b")),
        (["--api-key", "a", "--api-key", "b"], "frontend", "api_keys", ("a", "b")),
        (["--allowed-origins", '["a://b", "*"]'], "frontend", "allowed_origins", ("a://b", "*")),
        (["--allowed-hosts", "[::1]", "b"], "frontend", "allowed_hosts", ("[::1]", "b")),
        (["--uvicorn-log-level", "debug"], "frontend", "log_level", "debug"),
        (["--api-server-count", "3"], "parallel", "api_server_count", 3),
        (["-hf", "org/name:Q4_K_M"], "model", "model", "org/name:Q4_K_M"),
        (["--hf-repo", "a/b:Q8_0", "--hf-file=c.gguf"], "model", "model", "a/b:c.gguf"),
        (["-hff", "c.gguf", "--port", "1", "-hf", "a/b"], "model", "model", "a/b:c.gguf"),
        (["--seed", "-1"], "model", "seed", 0),
        (["--random-seed", "7"], "model", "seed", 7),
        (["-b", "64"], "scheduler", "max_num_batched_tokens", 64),
    ],
)
def test_flags_accept_the_spellings_of_other_servers(
    argv: list[str], section: str, field: str, value: object
) -> None:
    assert parse(*argv)[section][field] == value


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--port", "70000"], ["--port", "70000", "65535"]),
        (["--port", "http"], ["--port", "'http'", "integer"]),
        (["--block-size", "0"], ["--block-size", "between 1 and 65536", "got 0"]),
        (["--gpu-memory-utilization", "1.5"], ["--gpu-memory-utilization", "1.5", "between"]),
        (["--mem-fraction-static", "nan"], ["--mem-fraction-static", "finite"]),
        (["--max-model-len", "many"], ["--max-model-len", "'many'"]),
        (["--max-model-len", "0"], ["--max-model-len", "at least 1"]),
        (["--max-num-seqs", "1.5"], ["--max-num-seqs", "'1.5'"]),
        (["--kv-cache-memory-bytes", "1.0001k"], ["--kv-cache-memory-bytes", "whole number"]),
        (["--dtype", "int3"], ["--dtype", "'int3'", "bfloat16"]),
        (["--temp", "hot"], ["--temp", "number", "'hot'"]),
        (["--top-p", '"x"'], ["--top-p", "x"]),
        (["--device", "tpu"], ["--device", "'tpu'", "cuda"]),
        (["--hf-overrides", "{"], ["--hf-overrides", "JSON object"]),
        (["--hf-overrides", "[1]"], ["--hf-overrides", "JSON object", "[1]"]),
        (["--port"], ["--port", "expected one argument"]),
        (["--max-num-sequences", "3"], ["--max-num-sequences", "did you mean --max-num-seqs?"]),
        (["--xyzzy"], ["--xyzzy", "engine serve --help"]),
        (["-xyz", "draft.gguf"], ["unknown flag -xyz; see engine serve --help"]),
        (["--max-total-tokens", "9"], ["another server", "use --num-gpu-blocks-override N"]),
        (["--reverse_prompt=x"], ["--reverse-prompt", "set it in requests"]),
        (["--uno-lora-path", "a"], ["--uno-lora-path", "remove it"]),
        (["--moe-backend"], ["--moe-backend needs a value"]),
        (["--moe-backend", "--port", "1"], ["--moe-backend needs a value"]),
        (["--decode-context-parallel-size", "2"], ["must be 1", "got '2'"]),
        (["--speculative-algorithm", "X"], ["--speculative-algorithm", "EAGLE3", "'X'"]),
        (["--dist-init-addr", "host"], ["--dist-init-addr", "HOST:PORT", "'host'"]),
        (["--media-io-kwargs", '{"image": {"a": 1}}'], ["--media-io-kwargs", "image"]),
        (
            ["--media-io-kwargs", '{"video": {"fps": 2, "num_frames": 4}}'],
            ["num_frames and fps", "use one"],
        ),
        (
            ["--enable-auto-tool-choice", "--tool-call-parser=none"],
            ["needs a tool-call parser", "--tool-call-parser is none"],
        ),
        (
            ["--skip-tokenizer-init", "--reasoning-parser", "qwen3"],
            ["--reasoning-parser needs a tokenizer", "--skip-tokenizer-init"],
        ),
        (["--enable-abc"], ["unknown flag --enable-abc"]),
        (["--speculative_config={}"], ["--speculative-config", "num_speculative_tokens"]),
        (
            ["--speculative-config", '{"num_speculative_tokens": 65}'],
            ["--speculative-config", "num_speculative_tokens", "<= 64", "65"],
        ),
        (
            ["--speculative-config", '{"num_speculative_tokens": 4, "prompt_lookup_min": 0}'],
            ["--speculative-config", "prompt_lookup_min", ">= 1", "0"],
        ),
        (
            [
                "--speculative-config",
                '{"method": "medusa", "model": "m", "draft_tensor_parallel_size": 1}',
            ],
            ["method 'medusa' is not supported", "use one of ngram, suffix, draft_model, eagle"],
        ),
        (
            ["--speculative-config", '{"method": "draft_model", "num_speculative_tokens": 4}'],
            [
                "methods 'draft_model', 'eagle', 'eagle3' and 'dflash' need the field model",
                "tokenizer",
            ],
        ),
        (["--speculative-config", '{"num_speculative_tokens": 4, "k": 1}'], ["unknown field `k`"]),
        (
            ["--speculative-config", '{"num_speculative_tokens": 4, "revision": "a"}'],
            ["revision needs the field model"],
        ),
        (
            [
                "--speculative-config",
                '{"num_speculative_tokens": 4, "rejection_sample_method": "fly"}',
            ],
            ["rejection_sample_method", '"standard" or "block"', '"fly"', "remove the field"],
        ),
        (["-tp", "0"], ["-tp", "between 1 and 1024", "got 0"]),
        (["--data-parallel-size=0"], ["--data-parallel-size", "between 1 and 256", "got 0"]),
        (["--logprobs-mode=processed_logprobs"], ["--logprobs-mode", "must be raw_logprobs"]),
        (["--kv-offloading-size", "-1"], ["--kv-offloading-size", "at least 0", "got -1"]),
        (["--load-format", "npcache"], ["--load-format", "npcache", "dummy"]),
        (
            ["--tokenizer-mode", "slow"],
            ["--tokenizer-mode must be auto or hf or mistral", "got 'slow'"],
        ),
        (["--allowed-origins", "a.example", "m"], ["--allowed-origins", "'a.example'", "https://"]),
        (["--ssl-keyfile", __file__], ["--ssl-certfile", "together"]),
        (["--ssl-cert-reqs", "required"], ["--ssl-cert-reqs", "--ssl-ca-certs"]),
        (["--ssl-keyfile", "/no/such"], ["--ssl-keyfile", "/no/such"]),
        (["--api-key-file", "/no/such"], ["--api-key-file", "/no/such"]),
        (["--config", "/no/such.yaml"], ["--config /no/such.yaml", "No such file"]),
    ],
)
def test_invalid_arguments_print_one_line_with_flag_value_and_limit(
    capsys: pytest.CaptureFixture[str], argv: list[str], parts: list[str]
) -> None:
    line = refusal(capsys, *argv)
    assert all(part in line for part in parts), line


def test_no_op_flags_of_other_servers_are_accepted() -> None:
    same = [
        "--tokenizer-mode",
        "auto",
        "--runner=generate",
        "--task",
        "auto",
    ]
    same += ["--kv_offloading_backend", "native", "--logprobs-mode", "raw_logprobs"]
    same += ["-ngl", "99", "--n-gpu-layers=all", "--jinja", "-fa", "off", "--metrics"]
    same += ["--config-format=mistral", "--guided-decoding-backend", "auto"]
    assert parse(*same) == parse()


def test_api_keys_from_file_and_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n")
    assert parse("--api-key-file", str(file))["frontend"]["api_keys"] == ("one", "two")
    both = {"ENGINE_API_KEY": "ours", "VLLM_API_KEY": "theirs"}
    assert parse(**both)["frontend"]["api_keys"] == ("ours",)
    assert parse(VLLM_API_KEY="theirs")["frontend"]["api_keys"] == ("theirs",)
    assert parse("--api-key", "said", **both)["frontend"]["api_keys"] == ("said",)


def test_command_line_overrides_configuration_file(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(
        "model: org/name\nport: 1234\nmax_model_len: 32k\nserved-model-name: [a, b]\n"
        "enable-prefix-caching: false\nstrict: true\nhf-overrides: {rope_theta: 1.0}\n"
        "disable-log-stats: false\nuds: null\n"
    )
    settings = parse("--config", str(file), "--port", "99")
    assert settings["model"] == {
        "model": "org/name",
        "max_model_len": 32_000,
        "served_model_name": ("a", "b"),
        "hf_overrides": {"rope_theta": 1.0},
    }
    assert settings["frontend"] == {"port": 99, "strict": True}
    assert settings["cache"] == {"enable_prefix_caching": False}
    with_positional = parse("--config", str(file), "other/name")
    assert with_positional["model"]["model"] == "other/name"


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("prot: 1", "unknown option prot; did you mean port?"),
        ("prot: false", "did you mean port?"),
        ("port: 70000", "engine.yaml: port: must be between 0 and 65535, got 70000"),
        ("- a", "mapping"),
        ("a: [", "invalid YAML"),
        ("config: other.yaml", "cannot include another one"),
        ("enable-abc: true", "unknown option enable-abc"),
        (
            "max_total_tokens: 9",
            "engine.yaml: max_total_tokens is a flag of another server; use --num-gpu",
        ),
        ("port: [1, 2]", "port: must be a single value"),
        ("tokenizer-mode: slow", "tokenizer-mode must be auto or hf or mistral, got 'slow'"),
    ],
)
def test_invalid_configuration_file_is_rejected(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, part: str
) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(content)
    assert part in refusal(capsys, "--config", str(file))


def test_closed_standard_streams_are_opened_on_dev_null(tmp_path: Path) -> None:
    program = """
import os, sys
from engine.frontend.cli.main import main
main(["keygen", "--out", sys.argv[1]])
for descriptor in range(3):
    assert os.path.samestat(os.fstat(descriptor), os.stat(os.devnull)), descriptor
    assert os.get_inheritable(descriptor)
print("something", file=sys.stderr, flush=True)
"""
    closing = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    key = tmp_path / "key"
    command = [*closing, sys.executable, "-P", "-c", program, str(key)]
    assert subprocess.run(command, timeout=60).returncode == 0
    assert key.exists()


def test_port_in_use_prints_one_line() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = run("serve", "--port", str(port))
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("engine: error: cannot listen on 127.0.0.1")
    assert str(port) in last
    assert "--port" in last


@pytest.mark.parametrize(("limit", "flags"), [(12, ""), (63, ""), (64, "-dp 2")])
def test_too_low_limit_on_open_files_prints_one_line(limit: int, flags: str) -> None:
    command = f'ulimit -n {limit}; exec "$@" --port 0 {flags}'
    arguments = ["sh", "-c", command, "sh", *ENGINE, "serve"]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith(f"engine: error: the limit on open files (ulimit -n) is {limit}, but")


def test_ignored_variables_are_reported_with_the_closest_option(tmp_path: Path) -> None:
    env = {
        "VLLM_PORT": "1",
        "VLLM_API_KEY": "k",
        "ENGINE_MAX_MODEL_LENGTH": "8",
        "ENGINE_PORT": "0",
    }
    result = run("serve", "./no-such-model", XDG_RUNTIME_DIR=str(tmp_path), **env)
    [line] = [line for line in result.stderr.splitlines() if "ignored" in line]
    assert line.endswith(
        "ignored environment variables: ENGINE_MAX_MODEL_LENGTH (did you mean ENGINE_MAX_MODEL_LEN?), VLLM_PORT"
    )


def test_unknown_model_prints_one_line(tmp_path: Path) -> None:
    result = run("serve", "./no-such-model", "--port", "0", XDG_RUNTIME_DIR=str(tmp_path))
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("engine: error: the model './no-such-model' does not exist")
    assert not list(tmp_path.iterdir())
