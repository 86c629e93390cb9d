"""Parse the settings of `engine serve`.

A flag overrides an environment variable, which overrides a configuration file.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

from ...protocol.errors import ConfigError
from .options import FLAGS, OPTIONS, SECTIONS, Option, flag_of
from .peer_flags.command_line import peer_arguments, without_peer_flags

V = TypeVar("V")

Settings: TypeAlias = dict[str, dict[str, Any]]
"""Section -> field -> value, only for values that the user set."""

OTHER_VARIABLES: Final = {
    "ENGINE_CACHE",
    "ENGINE_DOCS_MERMAID",
    "ENGINE_HOSTILE_FULL",
    "ENGINE_REQUIRE_NATIVE",
    "ENGINE_URL",
}
"""Variables with the prefix of Engine's options that configure something else, such as caches, the build or tests."""

_SHORT_WORD: Final = re.compile("-[a-z]{2,}")
"""A flag of several letters with one dash. The values of short flags are separate arguments."""

_SERVICE_LINK: Final = re.compile(
    r".*_SERVICE_HOST=.*|.*_SERVICE_PORT(_\w+)?=\d+|.*_PORT(_\d+_\w+)?=(tcp|udp|sctp)://.*"
    r"|.*_PORT_\d+_(TCP|UDP|SCTP)_(PROTO|PORT|ADDR)=.*"
)
"""Variables that Kubernetes sets in every pod for each Service.

They look like options if a Service is named `engine`.
"""

_NEED_TOKENIZER: Final = (
    "model.tokenizer",
    "frontend.chat_template",
    "frontend.reasoning_parser",
    "frontend.tool_call_parser",
    "frontend.enable_tokenizer_info",
)
"""The options that have no effect without a tokenizer."""


def parse_settings(
    argv: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    *,
    earlier: Iterable[Sequence[str]] = (),
) -> Settings:
    """Return the settings of `engine serve ARGV`.

    Invalid settings print one line and exit with code 2.

    Args:
        argv: The arguments of the command line.
        environ: The environment variables.
        earlier: Arguments of earlier command lines (see `engine upgrade`). Each list overrides the lists before it, and
            `argv` overrides all of them.
    """
    parser = make_parser()
    try:
        given: dict[str, Any] = {}
        for each in (*earlier, argv):
            given |= _from_flags(parser, each)
        options = [option for option in OPTIONS if option.key not in given]
        variables = _from_environment(environ, options)
        file = (variables | given).get("launch.config")
        return _checked(({} if file is None else _from_file(file)) | variables | given)
    except ConfigError as error:
        parser.error(str(error))


def settings_of(keywords: Mapping[str, object]) -> Settings:
    """Return the settings for options that are given as keyword arguments. Raises ConfigError if they are invalid."""
    return _checked(_from_mapping(keywords))


def read_variables(key: str, environ: Mapping[str, str]) -> Any:
    """Return the value that environment variables give to the field `key`; None if they give none."""
    options = [option for option in OPTIONS if option.key == key]
    return _from_environment(environ, options).get(key)


def unread_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the variables with Engine's or vLLM's prefix that have no effect, with the most similar known name."""
    known = {name for option in OPTIONS for name in option.variables}
    unread = []
    for name, value in sorted(environ.items()):
        if name in known | OTHER_VARIABLES or _SERVICE_LINK.fullmatch(f"{name}={value}"):
            continue
        if name.startswith("VLLM_"):
            unread.append(name)
        elif name.startswith("ENGINE_"):
            unread.append(name + _closest(name, known, " (did you mean {}?)"))
    return unread


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `engine serve`. It stores only the options that are given."""
    parser = _Parser(
        prog="engine serve",
        description="Serve a language model over HTTP with an OpenAI-compatible API.",
        epilog=(
            "Each option can also be set by an environment variable (ENGINE_MAX_MODEL_LEN for "
            "--max-model-len) or in the --config file (max_model_len: 4096). The names that vLLM, SGLang, "
            "TensorRT-LLM and llama.cpp use for the same settings are also accepted."
        ),
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=38),
        usage="engine serve [MODEL] [flags]",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("positional", metavar="MODEL", nargs="?", help="Same as --model")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in OPTIONS:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        _add_option(groups[option.group], option)
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"engine: error: {message}\n")


class _Store(argparse.Action):
    """Stores the value of an option in the namespace, under the option's key."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        assert option_string is not None
        is_switch = self.nargs == 0
        FLAGS[option_string].store(vars(namespace), option_string, True if is_switch else values)


def _add_option(group: argparse._ArgumentGroup, option: Option) -> None:
    settings: dict[str, Any] = {"dest": option.key, "action": _Store}
    if option.type is bool:
        settings["nargs"] = 0
    else:
        settings["metavar"] = option.metavar
        settings["nargs"] = "+" if option.is_list and not option.spec.parse else None
    names = [option.flag, *option.aliases, *option.negative_flags]
    hidden = [name for name in option.aliases if name.startswith("--")]
    hidden += option.negative_flags[1:]
    shown = [name for name in names if name not in hidden]
    default = f" (default: {option.default_text})" if option.default_text else ""
    group.add_argument(*shown, help=(option.spec.help + default).replace("%", "%%"), **settings)
    for name in hidden:
        group.add_argument(name, help=argparse.SUPPRESS, **settings)


def _from_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    arguments = list(without_peer_flags(argv))
    namespace, unknown = parser.parse_known_args(list(_normalized(_with_objects(arguments))))
    if unknown and not unknown[0].startswith("-"):
        raise ConfigError(f"unexpected argument {unknown[0]!r}; only one MODEL may be given")
    if unknown:
        raise _unknown("flag", unknown[0].partition("=")[0])
    given = vars(namespace)
    model = given.pop("positional", None)
    if model is not None and given.setdefault("model.model", model) != model:
        raise ConfigError(
            f"two models given: {model!r} and --model {given['model.model']!r}; give only one"
        )
    return given


def _with_objects(argv: Sequence[str]) -> Iterator[str]:
    """Yield `argv` with flags for entries of an object, as in vLLM, replaced by a flag for the whole object.

    `--speculative-config.method ngram` sets an entry, and further dots set entries of objects in it. Values are JSON or
    texts. A key that ends in `+` appends to a list.
    """
    objects: dict[str, Any] = {}
    arguments = iter(argv)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        flag, *path = name.replace("_", "-").split(".")
        if not (path and flag in FLAGS):
            yield argument
            continue
        if not equals and (value := next(arguments, "--")).startswith("--"):
            raise ConfigError(f"{name} needs a value")
        if flag not in FLAGS[flag].spec.entries:
            flag = FLAGS[flag].flag
        entries = objects.setdefault(flag, {})
        *parents, last = name.split(".")[1:]
        for key in parents:
            entries = _entry(name, entries, key, {})
        if last.endswith("+"):
            _entry(name, entries, last[:-1], []).append(_json_or_text(value))
        else:
            entries[last] = _json_or_text(value)
    for flag, entries in objects.items():
        yield from (flag, json.dumps(entries))


def _entry(flag: str, entries: dict[str, Any], key: str, new: V) -> V:
    """Return the object or list under `key`, by default `new`."""
    found = entries.setdefault(key, new)
    if type(found) is not type(new):
        raise ConfigError(f"{flag}: {key} is {json.dumps(found)} already")
    return found


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _normalized(argv: Iterable[str]) -> Iterator[str]:
    """Yield `argv` with underscores in flags replaced by dashes."""
    for argument in argv:
        name, equals, value = argument.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if _SHORT_WORD.fullmatch(name) and name not in FLAGS:
            # argparse would read llama.cpp's -md FILE as -m d.
            raise _unknown("flag", name)
        if name.startswith("-"):
            yield name + equals + value
        else:
            yield argument


def _from_environment(environ: Mapping[str, str], options: Iterable[Option]) -> dict[str, Any]:
    """Return the values of the variables of `options`. Empty variables count as not set."""
    values: dict[str, Any] = {}
    for option in options:
        for name in option.variables:
            text = environ.get(name)
            if text and not _SERVICE_LINK.fullmatch(f"{name}={text}"):
                option.store(values, option.flag, text, name)
                break
    return values


def _from_file(path: str) -> dict[str, Any]:
    import yaml

    where = f"--config {path}"
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file) or {}
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: invalid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: must be a mapping of options to values")
    given = _from_mapping(content, f"{where}: ")
    if "launch.config" in given:
        raise ConfigError(f"{where}: config: a configuration file cannot include another one")
    return given


def _from_mapping(mapping: Mapping[str, object], where: str = "") -> dict[str, Any]:
    """Return the values of a mapping from option names, without leading dashes, to values."""
    given: dict[str, Any] = {}
    translated: list[str] = []
    for key, value in mapping.items():
        flag = "--" + str(key).replace("_", "-")
        if flag in FLAGS:
            FLAGS[flag].store(given, flag, value, f"{where}{key}")
        elif (arguments := peer_arguments(str(key), value, f"{where}{key}")) is not None:
            translated += arguments
        else:
            raise _unknown("option", str(key), where)
    return _from_flags(make_parser(), translated) | given if translated else given


def _unknown(kind: str, name: str, where: str = "") -> ConfigError:
    flags = [flag for flag in FLAGS if flag.startswith("--")]
    names = flags if kind == "flag" else [flag[2:].replace("-", "_") for flag in flags]
    hint = _closest(name, names, "; did you mean {}?") or "; see engine serve --help"
    return ConfigError(f"{where}unknown {kind} {name}{hint}")


def _closest(name: str, names: Iterable[str], hint: str) -> str:
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    return hint.format(close[0]) if close else ""


def _checked(given: dict[str, Any]) -> Settings:
    """Return the settings by section. Raises ConfigError if settings contradict each other."""
    if (
        given.get("frontend.enable_auto_tool_choice")
        and given.get("frontend.tool_call_parser") == "none"
    ):
        raise ConfigError(
            "--enable-auto-tool-choice needs a tool-call parser, but --tool-call-parser is "
            "none; remove one of the two flags"
        )
    keys = given.get("frontend.api_keys", ())
    admin_key = given.get("frontend.admin_api_key")
    if "" in (*keys, admin_key):
        raise ConfigError(
            "API keys must not be empty, because an empty key would match requests "
            "without a key; remove the empty one"
        )
    if admin_key in keys:
        raise ConfigError(
            "--admin-api-key must differ from every --api-key, because clients know the "
            "API keys; choose another key"
        )
    if ("frontend.ssl_keyfile" in given) != ("frontend.ssl_certfile" in given):
        raise ConfigError(
            "--ssl-keyfile and --ssl-certfile must be given together; add the missing one"
        )
    for option, needed in (("ssl_ca_certs", "ssl_certfile"), ("ssl_cert_reqs", "ssl_ca_certs")):
        if f"frontend.{option}" in given and f"frontend.{needed}" not in given:
            flags = flag_of(f"frontend.{option}"), flag_of(f"frontend.{needed}")
            raise ConfigError(f"{flags[0]} has no effect without {flags[1]}; add it")
    if given.get("model.skip_tokenizer_init"):
        for key in _NEED_TOKENIZER:
            if given.get(key) not in (None, "auto", "none", False):
                raise ConfigError(
                    f"{flag_of(key)} needs a tokenizer, which --skip-tokenizer-init "
                    "disables; remove one of the two flags"
                )
    settings: Settings = {section: {} for section in SECTIONS}
    for key, value in given.items():
        section, field = key.split(".")
        settings[section][field] = value
    return settings
