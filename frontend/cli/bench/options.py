"""The arguments that the subcommands of `engine bench` share, and the workload that they describe."""

from __future__ import annotations

import argparse
import enum
import math
from collections.abc import Sequence
from typing import Any, Final, get_type_hints

import msgspec

from ....protocol.errors import ConfigError
from ..parsers import add_option, add_switch
from .datasets import DatasetName, DatasetOptions, Session, check_file, make_sessions


class Backend(enum.StrEnum):
    """The endpoint that receives the requests: completions or chat completions."""

    COMPLETIONS = "openai"
    CHAT = "openai-chat"


_DEFAULT_PERCENTILES: Final = "99"


def add_dataset_arguments(parser: argparse.ArgumentParser) -> None:
    """Add an argument for each field of DatasetOptions."""
    group = parser.add_argument_group("dataset", "Lengths are in tokens.")
    hints = get_type_hints(DatasetOptions, include_extras=True)
    for field in msgspec.structs.fields(DatasetOptions):
        (summary,) = (text for text in hints[field.name].__metadata__ if isinstance(text, str))
        is_choice = isinstance(field.default, DatasetName)
        default = "" if field.default is None else f" (default: {field.default})"
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            default=argparse.SUPPRESS,
            choices=list(DatasetName) if is_choice else None,
            metavar=None if is_choice else "FILE" if field.name.endswith("_path") else "N",
            help=summary + default,
        )


def dataset_options(parsed: argparse.Namespace, **defaults: object) -> DatasetOptions:
    """Return the options of the dataset.

    Args:
        parsed: The parsed arguments.
        defaults: Defaults for fields of DatasetOptions.

    Raises:
        ConfigError: A value is invalid.
    """
    names = [field.name for field in msgspec.structs.fields(DatasetOptions)]
    given = {name: getattr(parsed, name) for name in names if hasattr(parsed, name)}
    try:
        return msgspec.convert({**defaults, **given}, DatasetOptions, strict=False)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$.")
        name = path.rstrip("`")
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(f"{flag} {given.get(name)}: {problem[:1].lower()}{problem[1:]}") from None


def add_request_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that control how requests are sent."""
    group = parser.add_argument_group("requests")
    about = "Endpoint: completions or chat completions (default: openai; openai-chat with agent)"
    add_option(group, "--backend", about, parse=Backend, choices=list(Backend))
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help=(
            "Ignore end-of-sequence tokens; not all servers support this (default: on without --dataset-path)"
        ),
    )
    add_option(group, "--temperature", "Sampling temperature", "T", float, 0.0)


def add_result_arguments(parser: argparse.ArgumentParser, *, has_plot: bool = True) -> None:
    """Add the arguments for the output of results."""
    group = parser.add_argument_group("results")
    add_switch(group, "--json", "Print one JSON object per result instead of text")
    add_option(group, "--result-filename", "Also write the JSON to this file", "FILE")
    if has_plot:
        add_option(group, "--plot", "Plot the results in this SVG file", "FILE")


def add_figure_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select the computed figures."""
    group = parser.add_argument_group("figures")
    about = (
        "Count the requests that meet all of these limits in milliseconds, such as ttft:200 tpot:50 "
        "e2el:3000"
    )
    add_option(group, "--goodput", about, "NAME:MS", default=[], nargs="+")
    about = "Percentiles of each latency"
    add_option(group, "--metric-percentiles", about, "P,P", default=_DEFAULT_PERCENTILES)


class Workload:
    """The requests of a measurement, and how they are sent.

    Args:
        parsed: The parsed arguments that the functions above have added.
        defaults: Defaults for fields of DatasetOptions.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(self, parsed: argparse.Namespace, **defaults: object) -> None:
        self.dataset = dataset_options(parsed, **defaults)
        check_file(self.dataset)
        backend = parsed.backend
        if backend is None:
            backend = Backend.CHAT if self.dataset.needs_messages else Backend.COMPLETIONS
        self.backend: Backend = backend
        ignore_eos = parsed.ignore_eos
        if ignore_eos is None:
            ignore_eos = self.dataset.is_synthetic
        self.fields: dict[str, Any] = {"temperature": parsed.temperature}
        if ignore_eos:
            self.fields["ignore_eos"] = True
        self.goodput = parse_goodput(getattr(parsed, "goodput", []))
        self.percentiles = parse_percentiles(
            getattr(parsed, "metric_percentiles", _DEFAULT_PERCENTILES)
        )

    @property
    def is_chat(self) -> bool:
        """True if chat completions are measured."""
        return self.backend is Backend.CHAT

    def sessions(self, count: int | None, seed_offset: int) -> list[Session]:
        """Return `count` sessions, or the default number if it is None.

        Different offsets give different sessions without shared prefixes.

        Raises:
            ConfigError: The file of the dataset cannot be used.
        """
        options = msgspec.structs.replace(self.dataset, seed=self.dataset.seed + seed_offset)
        return make_sessions(options, count, as_text=self.is_chat)


def parse_goodput(limits: Sequence[str]) -> dict[str, float]:
    """Return the limits of `--goodput`, such as `ttft:200`, in milliseconds.

    Raises:
        ConfigError: A limit does not have this form.
    """
    parsed = {}
    for limit in limits:
        name, _, value = limit.partition(":")
        try:
            milliseconds = float(value)
        except ValueError:
            milliseconds = math.nan
        if name not in ("ttft", "tpot", "e2el") or not milliseconds > 0:
            raise ConfigError(
                f"--goodput {limit}: must be ttft, tpot or e2el, then a colon and a number of milliseconds, "
                "such as ttft:200"
            )
        parsed[name] = milliseconds
    return parsed


def parse_percentiles(text: str) -> list[float]:
    """Return the percentiles of `--metric-percentiles`, such as `50,99`.

    Raises:
        ConfigError: One of them is not a number from 0 to 100.
    """
    try:
        percentiles = [float(part) for part in text.split(",")]
    except ValueError:
        percentiles = []
    if not percentiles or not all(0 <= p <= 100 for p in percentiles):
        raise ConfigError(
            f"--metric-percentiles {text}: must be numbers from 0 to 100, such as 50,99"
        )
    return percentiles
