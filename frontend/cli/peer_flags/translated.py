"""The flags of other servers that stand for options of Engine with another form of value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from ....protocol.config import ProposerMethod
from ....protocol.errors import ConfigError
from ....protocol.kv_transfer.store import LMCACHE_CONNECTOR


class Translation(NamedTuple):
    """The meaning of a flag of another server.

    Attributes:
        takes_value: False if the flag is a switch.
        translate: Returns Engine's arguments for the flag's value. Raises ValueError for a value without counterpart.
        shown: Engine's arguments as the documentation shows them.
        defaults: Arguments that the flag implies if the command line does not contradict them.
    """

    takes_value: bool
    translate: Callable[[str], list[str]]
    shown: str
    defaults: tuple[str, ...] = ()


def _fixed(*arguments: str) -> Translation:
    """Return the meaning of a switch."""
    return Translation(False, lambda value: list(arguments), " ".join(arguments))


def _entry(flag: str) -> Translation:
    """Return the meaning of a flag that sets the entry `flag`, such as `--speculative-config.model`."""
    return Translation(True, lambda value: [flag, value], f"{flag} …")


def _choice(meanings: Mapping[str, list[str]]) -> Translation:
    """Return the meaning of a flag with few values, each of which has its own arguments."""
    shown = "; ".join(
        f"{value}: {' '.join(arguments) or 'nothing'}" for value, arguments in meanings.items()
    )
    return Translation(True, partial(_chosen, meanings), shown)


def _chosen(meanings: Mapping[str, list[str]], value: str) -> list[str]:
    if value not in meanings:
        raise ValueError(f"must be one of {', '.join(meanings)}, got {value!r}")
    return meanings[value]


def _address(value: str) -> list[str]:
    host, colon, port = value.rpartition(":")
    if not colon or not port.isdecimal():
        raise ValueError(f"must be HOST:PORT, got {value!r}")
    return ["--master-addr", host.strip("[]"), "--master-port", port]


def _tokens_after_the_last(value: str) -> list[str]:
    """Return the number of proposed tokens. SGLang counts the last verified token as well."""
    if not value.isdecimal() or int(value) < 2:
        raise ValueError(f"must be an integer of at least 2, got {value!r}")
    return [_NUM_PROPOSED, str(int(value) - 1)]


def _chunk_size(value: str) -> list[str]:
    """Return the maximum number of tokens of a step. In SGLang, -1 computes each prompt in one step."""
    if value == "-1":
        return ["--no-enable-chunked-prefill"]
    return ["--max-num-batched-tokens", value]


def _max_tokens(value: str) -> list[str]:
    """Return the default limit of output tokens. In llama.cpp, -1 is none, and -2 the end of the context."""
    if value in ("-1", "-2"):
        return []
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"must be an integer of at least 1, or -1 for no limit, got {value!r}")
    return ["--default-max-tokens", value]


def _names(value: str) -> list[str]:
    return ["--served-model-name", *(name.strip() for name in value.split(","))]


def _level(value: str) -> list[str]:
    """Return the log level for a verbosity of llama.cpp: 0 is only output, 4 and more are for debugging."""
    levels = {"0": "critical", "1": "error", "2": "warning", "3": "info"}
    if not value.isdecimal():
        raise ValueError(f"must be an integer of at least 0, got {value!r}")
    return ["--log-level", levels.get(value, "debug")]


def _encoder_outputs(value: str) -> list[str]:
    """Return the directory of vLLM's connector for outputs of encoders. Engine's servers both read and write it."""
    try:
        config = msgspec.json.decode(value, type=_ECTransferConfig)
    except msgspec.MsgspecError as error:
        raise ValueError(
            f"must be a JSON object with ec_connector, {error}, got {value!r}"
        ) from None
    path = config.ec_connector_extra_config.get("shared_storage_path")
    if config.ec_connector not in _SHARED_STORAGE or not isinstance(path, str):
        raise ValueError(
            f"ec_connector must be {' or '.join(_SHARED_STORAGE)}, with a shared_storage_path in "
            f"ec_connector_extra_config, got {value!r}"
        )
    return ["--encoder-disk", path]


class _ECTransferConfig(msgspec.Struct):
    ec_connector: str
    ec_connector_extra_config: dict[str, Any] = {}


_SHARED_STORAGE: Final = ("ECExampleConnector", "ECSharedStorageConnector")

_METHOD: Final = "--speculative-config.method"
_MODEL: Final = "--speculative-config.model"
_NUM_PROPOSED: Final = "--speculative-config.num_speculative_tokens"

_METHODS: Final = {
    "DFLASH": ProposerMethod.DFLASH,
    "DSPARK": ProposerMethod.DFLASH,
    "EAGLE": ProposerMethod.EAGLE,
    "EAGLE3": ProposerMethod.EAGLE3,
    "FROZEN_KV_MTP": ProposerMethod.MTP,
    "NEXTN": ProposerMethod.MTP,
    "NGRAM": ProposerMethod.NGRAM,
    "STANDALONE": ProposerMethod.DRAFT_MODEL,
    "draft-dflash": ProposerMethod.DFLASH,
    "draft-dspark": ProposerMethod.DFLASH,
    "draft-eagle3": ProposerMethod.EAGLE3,
    "draft-mtp": ProposerMethod.MTP,
    "draft-simple": ProposerMethod.DRAFT_MODEL,
    "ngram-cache": ProposerMethod.NGRAM,
    "ngram-map-k": ProposerMethod.NGRAM,
    "ngram-map-k4v": ProposerMethod.NGRAM,
    "ngram-mod": ProposerMethod.NGRAM,
    "ngram-simple": ProposerMethod.NGRAM,
}
"""Name of a method of SGLang (capitals) or llama.cpp -> Engine's method."""

_ALGORITHM: Final = _choice({name: [_METHOD, method.value] for name, method in _METHODS.items()})
_CACHE_TYPE: Final = _choice(
    {
        "f32": ["--kv-cache-dtype", "float32"],
        "f16": ["--kv-cache-dtype", "float16"],
        "bf16": ["--kv-cache-dtype", "bfloat16"],
        "q8_0": ["--kv-cache-dtype", "int8"],
    }
)
_EXPERTS: Final = Translation(
    True,
    lambda value: [] if value == "1" else ["--enable-expert-parallel"],
    "--enable-expert-parallel",
)
_ADDRESS: Final = Translation(True, _address, "--master-addr HOST --master-port PORT")
_MAX_TOKENS: Final = Translation(True, _max_tokens, "--default-max-tokens …")
_NAMES: Final = Translation(True, _names, "--served-model-name …")
_THINKS: Final = ("--reasoning", "on")
_PLAIN_TEXT: Final = ["--reasoning-parser", "none"]

TRANSLATIONS: Final[dict[str, Translation]] = {
    # vLLM
    "--spec-method": _entry(_METHOD),
    "--spec-model": _entry(_MODEL),
    "--spec-tokens": _entry(_NUM_PROPOSED),
    "--ec-transfer-config": Translation(True, _encoder_outputs, "--encoder-disk …"),
    # SGLang
    "--dist-init-addr": _ADDRESS,
    "--nccl-init-addr": _ADDRESS,
    "--ep": _EXPERTS,
    "--ep-size": _EXPERTS,
    "--expert-parallel-size": _EXPERTS,
    "--chunked-prefill-size": Translation(
        True, _chunk_size, "--max-num-batched-tokens …; -1: --no-enable-chunked-prefill"
    ),
    "--disable-overlap-schedule": _fixed("--no-async-scheduling"),
    "--enable-lmcache": _fixed("--kv-transfer-config.kv_connector", LMCACHE_CONNECTOR),
    "--sampling-defaults": _choice(
        {"model": ["--generation-config", "auto"], "openai": ["--generation-config", "vllm"]}
    ),
    "--enable-return-hidden-states": _fixed("--hidden-states.mode", "full"),
    "--return-hidden-states-mode": _entry("--hidden-states.mode"),
    "--speculative-algorithm": _ALGORITHM,
    "--speculative-draft-model": _entry(_MODEL),
    "--speculative-draft-model-path": _entry(_MODEL),
    "--speculative-num-draft-tokens": Translation(
        True, _tokens_after_the_last, f"{_NUM_PROPOSED} N-1"
    ),
    "--speculative-num-steps": _entry(_NUM_PROPOSED),
    # llama.cpp
    "--alias": _NAMES,
    "-a": _NAMES,
    "--cache-type-k": _CACHE_TYPE,
    "--cache-type-v": _CACHE_TYPE,
    "-ctk": _CACHE_TYPE,
    "-ctv": _CACHE_TYPE,
    "--draft": _entry(_NUM_PROPOSED),
    "--draft-max": _entry(_NUM_PROPOSED),
    "--draft-n": _entry(_NUM_PROPOSED),
    "--spec-draft-n-max": _entry(_NUM_PROPOSED),
    "--hf-repo-draft": _entry(_MODEL),
    "--model-draft": _entry(_MODEL),
    "--spec-draft-hf": _entry(_MODEL),
    "--spec-draft-model": _entry(_MODEL),
    "-hfd": _entry(_MODEL),
    "-hfrd": _entry(_MODEL),
    "-md": _entry(_MODEL),
    "--spec-type": _choice(
        {name: [_METHOD, m.value] for name, m in _METHODS.items() if "-" in name}
    ),
    "--log-disable": _fixed("--log-level", "critical"),
    "--log-jsonl": _fixed("--log-format", "json"),
    "--log-verbose": _fixed("--log-level", "debug"),
    "--log-verbosity": Translation(True, _level, "--log-level …"),
    "--verbose": _fixed("--log-level", "debug"),
    "--verbosity": Translation(True, _level, "--log-level …"),
    "-lv": Translation(True, _level, "--log-level …"),
    "-v": _fixed("--log-level", "debug"),
    "--chat-template-file": Translation(
        True,
        lambda value: ["--chat-template", value],
        f"--chat-template … {' '.join(_THINKS)}",
        # llama.cpp defines the variable for every template, and without it some of its files close the reasoning.
        defaults=_THINKS,
    ),
    "--n-predict": _MAX_TOKENS,
    "--predict": _MAX_TOKENS,
    "--no-cache-prompt": _fixed("--no-enable-prefix-caching"),
    "--no-mmproj": _fixed("--mmproj", "none"),
    "--no-mmproj-auto": _fixed("--mmproj", "none"),
    "--pooling": _choice(
        {
            name: ["--pooler-config.pooling_type", name.upper()] if name != "rank" else []
            for name in ("mean", "cls", "last", "rank")
        }
        | {
            "none": [
                "--pooler-config.pooling_type",
                "ALL",
                "--pooler-config.use_activation",
                "false",
            ]
        }
    ),
    "--reasoning-effort": _entry("--default-chat-template-kwargs.reasoning_effort"),
    "--reasoning-format": _choice(
        {"auto": [], "deepseek": [], "deepseek-legacy": [], "none": _PLAIN_TEXT}
    ),
    "--slot-save-path": _entry("--kv-disk"),
    "--tokens-only": _fixed("--skip-tokenizer-init"),
    "--skip-chat-parsing": _fixed("--tool-call-parser", "none", *_PLAIN_TEXT),
}
"""Flag of another server -> its meaning."""


def translate(flag: str, value: str) -> list[str]:
    """Return Engine's arguments for a flag of another server. Raises ConfigError if the value has no counterpart."""
    try:
        return TRANSLATIONS[flag].translate(value)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None
