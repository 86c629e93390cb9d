"""Every option does the same as a flag, an environment variable and a key of a configuration file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from engine.frontend.cli.arguments import (
    OTHER_VARIABLES,
    Settings,
    parse_settings,
    settings_of,
    unread_variables,
)
from engine.frontend.cli.options import FLAGS, OPTIONS, SECTIONS, Option
from engine.protocol.errors import ConfigError

ROOT = Path(__file__).parents[3]
INVALID = "no such value"

each_option = pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.flag)


def parse(*argv: str, **environ: str) -> Settings:
    return parse_settings(argv, environ)


def file_of(directory: Path, **content: Any) -> str:
    path = directory / "engine.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def error_of(capsys: pytest.CaptureFixture[str], *argv: str, **environ: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        parse(*argv, **environ)
    assert stopped.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("engine: error: ") and line.count("\n") == 1, line
    return line


def value_of(option: Option, file: str) -> Any:
    """Return a value that differs from the default, as a file may have it."""
    by_parser: dict[str, Any] = {
        "denoising_file": {"threshold": 0.5},
        "dotted_name": "a.B",
        "dotted_names": ["a.B", "a.c"],
        "mcp_servers": {"a": "http://localhost:1"},
        "media_io": {"video": {"fps": 2.0}},
        "hidden_states": {"layers": [1, 2]},
        "idle_time": 2.5,
        "kv_events": {"topic": "t"},
        "origins": ["https://a.example", "localhost", "*"],
        "otlp_endpoint": "http://localhost:4318/v1/traces",
        "kv_transfer": {"kv_connector": "a", "kv_role": "kv_both"},
        "per_replica": 2.5,
        "replica_roles": ["prefill", "decode"],
        "speculative": {"num_speculative_tokens": 3},
        "weight_transfer": {"backend": "gloo", "timeout_s": 2.0},
    }
    if option.spec.parse:
        return by_parser.get(option.spec.parse, file)
    if option.choices:
        value = next(str(name) for name in reversed(option.choices) if name != option.default)
        return [value] if option.is_list else value
    if option.type is bool:
        return option.spec.value is not None or not option.default
    if option.is_list:
        return ["one", "two"]
    if option.type in (int, float):
        return option.type((option.low or 0) + 1 if option.high is None else option.high)
    return {"a": 1} if option.type is not str else "some text"


def texts_of(value: Any) -> list[str]:
    if isinstance(value, list):
        return value
    return [value if isinstance(value, str) else msgspec.json.encode(value).decode()]


def arguments_of(option: Option, value: Any) -> list[str]:
    if value is False:
        return option.negative_flags[:1]
    return [option.flag] if value is True else [option.flag, *texts_of(value)]


def variable_of(option: Option, value: Any) -> dict[str, str]:
    text = msgspec.json.encode(value).decode() if isinstance(value, list) else texts_of(value)[0]
    return {option.variables[0]: text}


def companions(option: Option, file: str) -> list[str]:
    """Return the flags that this option needs, or those of a different value."""
    return {
        "--ssl-keyfile": ["--ssl-certfile", file],
        "--ssl-certfile": ["--ssl-keyfile", file],
        "--ssl-ca-certs": ["--ssl-keyfile", file, "--ssl-certfile", file],
        "--ssl-cert-reqs": [
            *("--ssl-keyfile", file),
            *("--ssl-certfile", file),
            *("--ssl-ca-certs", file),
        ],
        "--enable-auto-tool-choice": ["--tool-call-parser", "hermes"],
    }.get(option.flag, [])


@each_option
def test_flag_variable_and_file_set_the_same_value(option: Option, tmp_path: Path) -> None:
    (tmp_path / "one").write_text("key")
    file = str(tmp_path / "one")
    if option.key == "launch.config":
        file = file_of(tmp_path, port=1)
        assert parse("--config", file) == parse(ENGINE_CONFIG=file) | {"launch": {"config": file}}
        assert parse(ENGINE_CONFIG=file)["frontend"] == {"port": 1}
        return
    value, others = value_of(option, file), companions(option, file)
    if option.is_list and option.spec.parse:
        value = texts_of(value)[0]
    by_flag = parse(*arguments_of(option, value), *others)
    by_variable = parse(*others, **variable_of(option, value))
    in_file = file_of(tmp_path, **{option.flag[2:].replace("-", "_"): value})
    by_file = parse("--config", in_file, *others)
    assert by_file["launch"].pop("config") == in_file
    assert option.spec.value is not None or by_flag[option.section][option.field] != option.default
    assert by_flag == by_variable == by_file
    # It is a value of the field, as a process decodes it.
    sections = {name: SECTIONS[name](**fields) for name, fields in by_flag.items()}
    for section in sections.values():
        encoded = msgspec.to_builtins(section, enc_hook=float)
        assert msgspec.convert(encoded, type(section)) == section


@pytest.mark.parametrize(
    "option", [option for option in OPTIONS if option.type is int], ids=lambda option: option.flag
)
def test_flag_overrides_variable_and_variable_overrides_file(
    option: Option, tmp_path: Path
) -> None:
    low, middle, high = (int(option.low or 0) + n for n in (1, 2, 3))
    arguments = ["--config", file_of(tmp_path, **{option.flag[2:]: low})]

    def value(*argv: str, **environ: str) -> Any:
        return parse(*arguments, *argv, **environ)[option.section][option.field]

    variable = {option.variables[0]: str(middle)}
    assert value() == low
    assert value(**variable) == middle
    assert value(option.flag, str(high), **variable) == high
    assert option.field not in parse()[option.section]


def has_invalid_value(option: Option) -> bool:
    return bool(option.choices or option.spec.parse) or not (option.type is str or option.is_list)


@pytest.mark.parametrize(
    "option", filter(has_invalid_value, OPTIONS), ids=lambda option: option.flag
)
def test_error_names_flag_variable_or_file_key_and_value(
    option: Option, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = option.flag[2:].replace("-", "_")
    file = file_of(tmp_path, **{key: INVALID})
    lines = [
        (error_of(capsys, **{option.variables[0]: INVALID}), option.variables[0]),
        (error_of(capsys, "--config", file), f"--config {file}: {key}"),
    ]
    if option.type is not bool:
        lines.append((error_of(capsys, option.flag, INVALID), option.flag))
    for line, where in lines:
        assert f"error: {where}: " in line and INVALID in line, line


@pytest.mark.parametrize(
    "option",
    [option for option in OPTIONS if None not in (option.low, option.high)],
    ids=lambda option: option.flag,
)
def test_number_outside_its_limits_is_rejected_with_the_limits(
    option: Option, capsys: pytest.CaptureFixture[str]
) -> None:
    assert option.high is not None
    value = str(option.high + 1)
    for line in (
        error_of(capsys, option.flag, value),
        error_of(capsys, **{option.variables[0]: value}),
    ):
        assert f"between {option.low} and {option.high}, got {value}" in line
    # A process that decodes it rejects it as well.
    wrong = SECTIONS[option.section](**{option.field: option.high + 1})
    with pytest.raises(msgspec.ValidationError, match=option.field):
        msgspec.convert(msgspec.to_builtins(wrong), type(wrong))


@each_option
def test_alias_names_the_same_option(option: Option) -> None:
    for alias in option.aliases:
        assert FLAGS[alias] is FLAGS[option.flag] is option


def test_every_synonym_stands_for_a_valid_value() -> None:
    options = [option for option in OPTIONS if option.choices and option.spec.synonyms]
    assert {"tool_call_parser", "reasoning_parser"} <= {option.field for option in options}
    for option in options:
        for given, meant in option.spec.synonyms.items():
            assert option.parse(given) == option.parse(meant), option.flag


def test_names_are_unique_and_help_is_short() -> None:
    names = [n for o in OPTIONS for n in (o.flag, *o.aliases, *o.negative_flags, *o.variables)]
    assert len(names) == len(set(names))
    assert [o.flag for o in OPTIONS if len(o.spec.help.split()) > 12] == []


def test_list_in_a_variable_is_one_item_or_json() -> None:
    assert parse(ENGINE_API_KEY="a,b c")["frontend"]["api_keys"] == ("a,b c",)
    assert parse(ENGINE_API_KEY='["a", "b"]')["frontend"]["api_keys"] == ("a", "b")
    assert parse(ENGINE_API_KEY="")["frontend"] == {}


@pytest.mark.parametrize(("text", "value"), [("true", True), ("0", False), ("Off", False)])
def test_environment_variable_sets_a_boolean_option(text: str, value: bool) -> None:
    assert parse(ENGINE_STRICT=text)["frontend"]["strict"] is value
    assert parse(ENGINE_DISABLE_LOG_STATS=text)["frontend"] == (
        {"log_stats": False} if value else {}
    )


def test_service_links_of_kubernetes_are_ignored() -> None:
    links = {
        "ENGINE_PORT": "tcp://10.0.0.1:80",
        "ENGINE_PORT_80_TCP": "tcp://10.0.0.1:80",
        "ENGINE_PORT_80_TCP_ADDR": "10.0.0.1",
        "ENGINE_PORT_80_TCP_PORT": "80",
        "ENGINE_PORT_80_TCP_PROTO": "tcp",
        "ENGINE_SERVICE_HOST": "10.0.0.1",
        "ENGINE_SERVICE_PORT": "80",
        "ENGINE_SERVICE_PORT_HTTP": "80",
    }
    assert parse(**links) == parse()
    assert unread_variables(links) == []


def test_variables_that_the_code_reads_are_not_reported() -> None:
    source = "".join(
        path.read_text()
        for folder in ("frontend", "core", "workers", "protocol", "scripts", "tests", "examples")
        for path in (ROOT / folder).rglob("*.py")
    )
    read = set(re.findall(r'environ(?:\.get\(|\[)"(ENGINE_\w+)"', source))
    assert read - {name for option in OPTIONS for name in option.variables} == OTHER_VARIABLES
    assert unread_variables(dict.fromkeys(read, "1")) == []


def test_collector_may_be_named_by_the_variables_of_opentelemetry() -> None:
    every, traces = "http://a:4317", "http://b:4317"
    shared = {"OTEL_EXPORTER_OTLP_ENDPOINT": every}
    assert parse(**shared)["frontend"] == {"otlp_traces_endpoint": every}
    both = shared | {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": traces}
    assert parse(**both)["frontend"] == {"otlp_traces_endpoint": traces}


def test_python_keywords_set_options() -> None:
    keywords = {"max_model_len": "32k", "strict": False, "hf_overrides": {"a": 1}, "uds": None}
    # Scripts for vLLM also pass options that they do not use.
    off = {"logits_processors": None, "enable_return_routed_experts": False, "task": "score"}
    settings = settings_of(keywords | off)
    pooling = {"pooling_type": "MEAN"}
    given = settings_of({"override_pooler_config": pooling, "task": None})
    assert given["model"] == {"pooler_config": pooling}
    assert settings["model"] == {"max_model_len": 32_000, "hf_overrides": {"a": 1}}
    assert settings["frontend"] == {"strict": False}
    with pytest.raises(ConfigError, match=r"^port: must be between 0 and 65535, got 70000$"):
        settings_of({"port": 70000})
    with pytest.raises(ConfigError, match=r"^logits_processors is a flag of another server"):
        settings_of({"logits_processors": ["a.B"]})


@pytest.mark.parametrize(
    ("argv", "section", "field", "value"),
    [
        (
            ["--temp", "0.7", "--override-generation-config", '{"top_k": 20}', "--min-p", "0.1"],
            "model",
            "override_generation_config",
            {"temperature": 0.7, "top_k": 20, "min_p": 0.1},
        ),
        (["--n-predict", "9"], "frontend", "default_max_tokens", 9),
        (["--chunked-prefill-size", "-1"], "scheduler", "enable_chunked_prefill", False),
        (["--chat-template-file", "a.jinja"], "frontend", "chat_template", "a.jinja"),
        (
            ["--chat-template-file", "a.jinja"],
            "frontend",
            "default_chat_template_kwargs",
            {"enable_thinking": True},
        ),
        (
            ["--reasoning", "off", "--chat-template-file", "a.jinja"],
            "frontend",
            "default_chat_template_kwargs",
            {"enable_thinking": False},
        ),
        (
            ["--chat-template-kwargs", '{"a": 1}', "--reasoning", "off"],
            "frontend",
            "default_chat_template_kwargs",
            {"a": 1, "enable_thinking": False},
        ),
        (["--reasoning", "auto"], "frontend", "default_chat_template_kwargs", {}),
    ],
)
def test_flags_of_llama_cpp_set_options_and_entries_of_objects(
    argv: list[str], section: str, field: str, value: object
) -> None:
    assert parse_settings(argv, {})[section][field] == value


DRAFT = {"method": "eagle3", "model": "d", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("line", "section", "values"),
    [
        (
            "vllm-style --moe-backend triton --cudagraph-capture-sizes 1 2 4 --enable-dbo --no-enable-eplb "
            "-O3 -cc.mode 3 --compilation_config.cudagraph_mode FULL --attention-backend=FLASHINFER --port 7",
            "frontend",
            {"port": 7},
        ),
        ("m --allowed-methods [\"GET\"] --cors-headers a b", "frontend", {
            "allowed_methods": ("GET",), "allowed_headers": ("a", "b")
        }),
        ("--dist-init-addr [::1]:50 m", "parallel", {"master_addr": "::1", "master_port": 50}),
        ("--ep-size 4 m --expert-parallel-size 1", "parallel", {"enable_expert_parallel": True}),
        ("-ctk q8_0 -ctv q8_0 --no-cache-prompt", "cache", {
            "kv_cache_dtype": "int8", "enable_prefix_caching": False
        }),
        ("--sampling-defaults openai -s -1", "model", {"generation_config": "vllm", "seed": 0}),
        (
            'm --ec-transfer-config {"ec_connector":"ECExampleConnector","ec_role":"ec_both",'
            '"ec_connector_extra_config":{"shared_storage_path":"/outputs"}}',
            "cache", {"encoder_disk_path": "/outputs"},
        ),
        ("--pooling cls", "model", {"pooler_config": {"pooling_type": "CLS"}}),
        (
            "--pooling none",
            "model",
            {"pooler_config": {"pooling_type": "ALL", "use_activation": False}},
        ),
        ("--presence-penalty 0.5", "model", {"override_generation_config": {"presence_penalty": 0.5}}),
        ("--tool-call-parser step3p5 --reasoning-parser step3", "frontend", {
            "tool_call_parser": "qwen3_coder", "reasoning_parser": "deepseek_r1"
        }),
        ("--tokens-only", "model", {"skip_tokenizer_init": True}),
        ("-v --skip-chat-parsing", "frontend", {
            "log_level": "debug", "tool_call_parser": "none", "reasoning_parser": "none"
        }),
    ],
)  # fmt: skip
def test_command_lines_of_other_servers(line: str, section: str, values: dict[str, object]) -> None:
    assert parse_settings(line.split(), {})[section] == values


@pytest.mark.parametrize(
    "line",
    [
        "--spec-method eagle3 --spec-model d --spec-tokens 3",
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path d --speculative-num-steps 3",
        "--speculative-algorithm EAGLE3 --speculative-draft-model d --speculative-num-draft-tokens 4 "
        "--speculative-eagle-topk 1",
        "--spec-type draft-eagle3 -md d --draft-max 3 --draft-min 1",
        "-sc.method eagle3 --speculative-config.model=d --spec-tokens=3",
    ],
)
def test_other_servers_flags_of_speculative_decoding(line: str, tmp_path: Path) -> None:
    config = parse_settings(line.split(), {})["scheduler"]["speculative"]
    assert {name: getattr(config, name) for name in DRAFT} == DRAFT
    keys = ["spec_method", "spec-model", "spec_tokens", "moe_backend", "enable_dbo"]
    file = file_of(tmp_path, **dict(zip(keys, ["eagle3", "d", 3, "x", True], strict=True)))
    assert parse("--config", file)["scheduler"]["speculative"] == config


@pytest.mark.parametrize("command", ["serve", "complete", "status"])
def test_argument_that_is_not_text_is_refused(command: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "engine.frontend.cli.main", command, b"caf\xe9"],
        capture_output=True,
        timeout=60,
    )
    assert ran.returncode == 2 and ran.stderr.count(b"\n") == 1
    assert ran.stderr.startswith(rb"engine: error: the argument b'caf\xe9' is not text in utf-8")


def test_variable_that_is_not_text_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    line = error_of(capsys, ENGINE_API_KEY=os.fsdecode(b"caf\xe9"))
    assert line.startswith("engine: error: ENGINE_API_KEY: must be text in UTF-8")


def test_a_flag_sets_an_entry_of_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--hf_overrides.a.b", "1", "--hf-overrides.a.c_d=x", "--hf-overrides.e+", "[2]")
    expected = {"a": {"b": 1, "c_d": "x"}, "e": [[2]]}
    assert parse(*flags)["model"]["hf_overrides"] == expected
    for wrong, problem in (
        (("--hf-overrides.a",), "--hf-overrides.a needs a value"),
        (("--hf-overrides.a", "1", "--hf-overrides.a.b", "1"), "a is 1 already"),
        (("--port.a", "1"), "--port: must be an integer"),
    ):
        assert problem in error_of(capsys, *wrong)
