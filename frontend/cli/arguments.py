"""The command line of `engine serve`: merge flags, a configuration file and the environment into `Settings`."""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeAlias

import msgspec

from ...protocol.config import (
    CacheConfig,
    DeviceConfig,
    FrontendConfig,
    ParallelConfig,
    RecoveryConfig,
    SchedulerConfig,
)
from ..model_source.options import ModelOptions
from .flags import FLAGS, Flag
from .node_options import NodeOptions
from .peer_flags import IGNORED, ONLY_VALUE, UNSUPPORTED

SECTIONS: dict[str, type[msgspec.Struct]] = {
    "model": ModelOptions,
    "frontend": FrontendConfig,
    "scheduler": SchedulerConfig,
    "cache": CacheConfig,
    "device": DeviceConfig,
    "recovery": RecoveryConfig,
    "parallel": ParallelConfig,
    "node": NodeOptions,
}

API_KEY_VARIABLES = ("ENGINE_API_KEY", "VLLM_API_KEY")
"""Environment variables that may hold the API key, in order of precedence. No other `VLLM_*` variable is read."""

ADMIN_API_KEY_VARIABLE = "ENGINE_ADMIN_API_KEY"

Settings: TypeAlias = dict[str, dict[str, Any]]
"""Section -> field -> value, only for values that the user set."""


def api_keys_of(environ: Mapping[str, str]) -> list[str]:
    """Return the API key from the environment, if it is set."""
    return [environ[name] for name in API_KEY_VARIABLES if environ.get(name)][:1]


def unread_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the names of vLLM's environment variables that are set but have no effect here."""
    return sorted(
        name for name in environ if name.startswith("VLLM_") and name not in API_KEY_VARIABLES
    )


def parse_settings(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings of `engine serve ARGV`.

    Invalid arguments print one line and exit with code 2.
    """
    parser = _make_parser()
    given = _parse(parser, argv)
    positional = given.pop("positional", None)
    if positional is not None:
        if given.get("model.model", positional) != positional:
            parser.error(
                f"two models given: {positional!r} and --model {given['model.model']!r}; give only one"
            )
        given["model.model"] = positional
    if "config" in given:
        given = _parse(parser, list(_file_arguments(parser, given.pop("config")))) | given
    if given.pop("enable_auto_tool_choice", False) and "frontend.tool_call_parser" not in given:
        parser.error("--enable-auto-tool-choice needs --tool-call-parser NAME")
    if "frontend.api_keys" not in given:
        given["frontend.api_keys"] = api_keys_of(environ)
    if "frontend.admin_api_key" not in given and environ.get(ADMIN_API_KEY_VARIABLE):
        given["frontend.admin_api_key"] = environ[ADMIN_API_KEY_VARIABLE]
    if "" in (*given["frontend.api_keys"], given.get("frontend.admin_api_key")):
        parser.error("API keys must not be empty: an empty key would match requests without one")
    if given.get("frontend.admin_api_key") in given["frontend.api_keys"]:
        parser.error("--admin-api-key must differ from every --api-key, because clients have those")
    if ("frontend.ssl_keyfile" in given) != ("frontend.ssl_certfile" in given):
        parser.error("--ssl-keyfile and --ssl-certfile must be given together")
    if given.get("model.skip_tokenizer_init"):
        for name, field in _NEED_TOKENIZER.items():
            if given.get(field):
                parser.error(f"{name} needs the tokenizer that --skip-tokenizer-init leaves out")
    settings: Settings = {section: {} for section in SECTIONS}
    for name, value in given.items():
        section, field = name.split(".")
        settings[section][field] = tuple(value) if isinstance(value, list) else value
    return settings


_NEED_TOKENIZER: Final = {
    "--tokenizer": "model.tokenizer",
    "--chat-template": "frontend.chat_template",
    "--reasoning-parser": "frontend.reasoning_parser",
    "--tool-call-parser": "frontend.tool_call_parser",
    "--enable-tokenizer-info-endpoint": "frontend.enable_tokenizer_info",
}
"""Flags that mean nothing to a server without a tokenizer."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"engine: error: {message}\n")


def _make_parser() -> _Parser:
    parser = _Parser(
        prog="engine serve",
        description="Serve a language model over HTTP with an OpenAI-compatible API.",
        epilog="The names that vLLM, SGLang, TensorRT-LLM and llama.cpp use for the same settings are also accepted.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=38),
        usage="engine serve [MODEL] [flags]",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "positional",
        metavar="MODEL",
        nargs="?",
        help="Directory, .gguf file or ORG/NAME[:QUANT] on the hub (default: SmolLM2-135M-Instruct)",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with flags; command-line flags take precedence"
    )
    parser.add_argument(
        "--enable-auto-tool-choice",
        action="store_true",
        help="Accepted for compatibility; --tool-call-parser, which it requires, already enables it",
    )
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            _add_flag(group, flag)
    return parser


def _add_flag(group: argparse._ArgumentGroup, flag: Flag) -> None:
    names = flag.names.split()
    shown = [names[0], *(name for name in names[1:] if not name.startswith("--"))]
    hidden = [name for name in names[1:] if name.startswith("--")]
    options: dict[str, Any] = {"dest": flag.field}
    if flag.const is not None:
        options |= {"action": "store_const", "const": flag.const}
    elif flag.type is bool:
        options["action"] = argparse.BooleanOptionalAction
    else:
        is_list = isinstance(_default(flag.field), tuple)
        options |= {
            "type": flag.type,
            "choices": flag.choices,
            "metavar": flag.metavar
            or (None if flag.choices else "N" if flag.type is not str else "TEXT"),
            "action": "extend" if is_list else "store",
            "nargs": "+" if flag.many else None,
        }
    group.add_argument(*shown, help=_help(flag), **options)
    for name in hidden:
        group.add_argument(name, help=argparse.SUPPRESS, **options)


def _default(field: str) -> object:
    section, name = field.split(".")
    fields = {f.name: f for f in msgspec.structs.fields(SECTIONS[section])}
    default: object = fields[name].default
    return default


def _help(flag: Flag) -> str:
    if flag.const is not None:
        return flag.help
    shown = flag.default_text or _shown(_default(flag.field))
    return f"{flag.help} (default: {shown})".lstrip() if shown else flag.help


def _shown(default: object) -> str:
    match default:
        case bool():
            return "on" if default else "off"
        case tuple():
            return " ".join(default)
        case float():
            return f"{default:g}"
        case str() | int():
            return str(default)
    return ""


def _parse(parser: _Parser, argv: Sequence[str]) -> dict[str, Any]:
    normalized = list(_checked(parser, argv))
    namespace, unknown = parser.parse_known_args(normalized)
    if unknown:
        _refuse_unknown(parser, unknown[0])
    return vars(namespace)


def _checked(parser: _Parser, argv: Sequence[str]) -> Iterator[str]:
    """Yield `argv` with underscores in flag names replaced by dashes, without the flags that are ignored."""
    arguments = iter(argv)
    for argument in arguments:
        if not argument.startswith("-") or argument == "--":
            yield argument
            continue
        name, equals, value = argument.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if name in IGNORED:
            continue
        if name in UNSUPPORTED:
            parser.error(f"{name} is not supported by this version; remove it")
        if name in ONLY_VALUE:
            value = value if equals else next(arguments, "")
            if value not in ONLY_VALUE[name]:
                offered = " or ".join(ONLY_VALUE[name])
                parser.error(f"{name}: {value!r} is not supported by this version; use {offered}")
            continue
        yield name + equals + value


def _refuse_unknown(parser: _Parser, argument: str) -> NoReturn:
    name = argument.partition("=")[0]
    if not name.startswith("-"):
        parser.error(f"unexpected argument {argument!r}; only one MODEL may be given")
    known = [option for option in parser._option_string_actions if option.startswith("--")]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else "; see engine serve --help"
    parser.error(f"unknown flag {name}{hint}")


def _file_arguments(parser: _Parser, path: str) -> Iterator[str]:
    """Yield the flags of a YAML file as command-line arguments."""
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file) or {}
    except OSError as error:
        parser.error(f"--config {path}: {error.strerror}")
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        parser.error(f"--config {path}: invalid YAML: {' '.join(str(error).split())}")
    if not isinstance(content, dict):
        parser.error(f"--config {path}: must be a mapping of flags to values")
    for key, value in content.items():
        flag = "--" + str(key).replace("_", "-")
        if flag == "--config":
            parser.error(f"--config {path}: a configuration file cannot include another one")
        if value is True:
            yield flag
        elif value is False:
            negative = "--no-" + flag[2:]
            if negative in parser._option_string_actions:
                yield negative
            elif flag not in parser._option_string_actions and flag not in UNSUPPORTED:
                yield flag
        elif isinstance(value, dict):
            yield f"{flag}={json.dumps(value)}"
        elif isinstance(value, list):
            for item in value:
                yield f"{flag}={item}"
        elif value is not None:
            yield f"{flag}={value}"
