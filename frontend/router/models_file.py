"""The file with the models of a router."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from ...protocol.config import FrontendConfig
from ...protocol.errors import ConfigError
from ..cli.arguments import settings_of
from ..cli.engine_config import make_frontend_config
from ..http.shown_values import echo

DEFAULTS: Final = "defaults"
MODELS: Final = "models"

_OF_ROUTER: Final = frozenset(
    {
        "allow_credentials",
        "allowed_headers",
        "allowed_hosts",
        "allowed_methods",
        "allowed_origins",
        "enable_ssl_refresh",
        "host",
        "middleware",
        "port",
        "root_path",
        "ssl_ca_certs",
        "ssl_cert_reqs",
        "ssl_certfile",
        "ssl_ciphers",
        "ssl_keyfile",
        "ssl_keyfile_password",
        "uds",
    }
)
"""Fields of `FrontendConfig` that describe the connections of clients, which end at the router."""


class RoutedModel(NamedTuple):
    """A model of a router.

    Attributes:
        names: Its names in requests, the first of which is the one of the file.
        adapters: The names of its adapters.
        options: The options of `engine serve` for it, without leading dashes.
    """

    names: tuple[str, ...]
    adapters: tuple[str, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """Its name in the file."""
        return self.names[0]


class RouterConfig(NamedTuple):
    """The models of a router, and its own configuration."""

    models: list[RoutedModel]
    frontend: FrontendConfig


def read_models(path: str, own: dict[str, Any]) -> RouterConfig:
    """Return the models of a YAML file, in its order.

    The file has the models by name (`models`), each with the options of `engine serve` for it. Options in `defaults`
    apply to all models that have no other value, and to the router itself, as do the options `own` of the command line.

    Raises:
        ConfigError: The file cannot be read, or an option is invalid.
    """
    content = _mapping(_read_yaml(path), path)
    if unknown := content.keys() - {DEFAULTS, MODELS}:
        problem = f"must be {MODELS} or {DEFAULTS}"
        raise ConfigError(f"{path}: {echo(min(map(str, unknown)))} {problem}")
    defaults = _mapping(content.get(DEFAULTS) or {}, f"{path}: {DEFAULTS}") | own
    models = _mapping(content.get(MODELS) or {}, f"{path}: {MODELS}")
    if not models:
        raise ConfigError(f"{path}: {MODELS} must name at least one model")
    frontend = make_frontend_config(_settings(defaults, f"{path}: {DEFAULTS}"))
    shared = {name: value for name, value in defaults.items() if not _is_of_router(name, value)}
    routed = [_model(path, str(name), shared, given) for name, given in models.items()]
    taken: set[str] = set()
    for model in routed:
        names = (*model.names, *model.adapters)
        if again := taken.intersection(names):
            raise ConfigError(f"{path}: {MODELS}: {echo(min(again))} is the name of two models")
        taken.update(names)
    return RouterConfig(routed, frontend)


def _read_yaml(path: str) -> Any:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            return yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: invalid YAML: {' '.join(str(error).split())}") from None


def _model(path: str, name: str, shared: Mapping[str, Any], given: Any) -> RoutedModel:
    where = f"{path}: {MODELS}: {name}"
    own = _mapping({} if given is None else given, where)
    for option, value in own.items():
        if _is_of_router(option, value):
            raise ConfigError(f"{where}: {option} must be in {DEFAULTS}: it is of the router")
    # A model without options is its own name on the hub.
    options = {"model": name, **shared, **own}
    settings = _settings(options, where)["model"]
    names = dict.fromkeys((name, *settings.get("served_model_name", ())))
    adapters = tuple(map(_adapter_name, settings.get("lora_modules", ())))
    return RoutedModel(tuple(names), adapters, options)


def _adapter_name(text: str) -> str:
    """Return the name of an adapter: NAME=PATH, or a JSON object."""
    return str(json.loads(text)["name"]) if text.startswith("{") else text.partition("=")[0]


def _is_of_router(name: str, value: Any) -> bool:
    try:
        return bool(_OF_ROUTER & settings_of({name: value})["frontend"].keys())
    except ConfigError:
        # The option needs another one. None of the router's does, except those of TLS, which need each other.
        return name.replace("_", "-").startswith("ssl-")


def _settings(options: Mapping[str, Any], where: str) -> Any:
    try:
        return settings_of(options)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: must be a mapping, got {echo(value)}")
    return value
