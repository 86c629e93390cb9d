"""The command `engine top`: a live table of a running server's throughput, queues, cache and latencies."""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from ....protocol.errors import EngineError
from ...supervisor.console import reports_errors
from ..parsers import add_option, add_switch, command_parser
from ..remote.server import RemoteServer, ServerError
from ..remote.target import add_operator_arguments, open_server
from .sparkline import sparkline

if TYPE_CHECKING:
    from rich.console import Group

    from .samples import Rates, Sample

TIMEOUT_S: Final = 10.0
WINDOW: Final = 30
"""Number of readings over which shares and latencies are computed."""
GRAPH: Final = 60
"""Number of readings that a graph shows."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of `engine top`."""
    parser = command_parser(
        "top",
        "Show the load of a running server: tokens per second, requests, KV-cache usage, share of "
        "cached prompt tokens, and latencies. Servers with vLLM's metrics are supported too.",
    )
    add_operator_arguments(parser)
    add_option(parser, "--interval", "Seconds between readings", "S", float, 1.0)
    add_switch(parser, "--once", "Measure one interval, print the table and exit")
    add_switch(parser, "--json", "Print one JSON object per reading")
    return parser


@reports_errors
def main(argv: Sequence[str]) -> int:
    """Show the table until interrupted. Return 0, or 1 if the server does not answer."""
    parser = make_parser()
    parsed = parser.parse_args(argv)
    if not parsed.interval > 0:
        parser.error(f"--interval {parsed.interval:g}: must be above 0")
    try:
        watch = _Watch(open_server(parsed))
        show = _print_json if parsed.json else None
        if parsed.once or show is not None:
            _print_readings(watch, parsed, show)
        else:
            _draw_live(watch, parsed.interval)
    except KeyboardInterrupt:
        pass
    except ValueError as error:
        raise EngineError(str(error)) from None
    return 0


class _Watch:
    """Polls a server, and keeps the readings that graphs need."""

    def __init__(self, server: RemoteServer) -> None:
        self.server = server
        self.graphs: dict[str, deque[float]] = {
            name: deque(maxlen=GRAPH)
            for name in ("generated_tokens_s", "prompt_tokens_s", "running", "waiting", "kv_use")
        }
        self.processes: list[dict[str, Any]] = []
        self._samples: deque[Sample] = deque([self._read()], maxlen=WINDOW)

    def read(self) -> Rates:
        """Read the metrics, and return the rates since the last reading.

        Raises:
            EngineError: The server does not answer.
            ValueError: The server has no metrics of an inference server.
        """
        from .samples import rates_between

        self._samples.append(self._read())
        rates = rates_between(self._samples[-2], self._samples[-1], self._samples[0])
        for name, values in self.graphs.items():
            values.append(getattr(rates, name))
        return rates

    def _read(self) -> Sample:
        from .samples import read_sample

        try:
            self.processes = self.server.call("/engine/status", timeout_s=TIMEOUT_S)["processes"]
        except (ServerError, KeyError) as error:
            # Only Engine has a status route, so there are no processes to show for other servers.
            if isinstance(error, ServerError) and error.status in (None, 401, 403):
                raise
            self.processes = []
        return read_sample(self.server.read_text("/metrics", timeout_s=TIMEOUT_S))


def _print_readings(
    watch: _Watch, parsed: argparse.Namespace, show: Callable[[Rates], None] | None
) -> None:
    while True:
        time.sleep(parsed.interval)
        rates = watch.read()
        if show is not None:
            show(rates)
        else:
            from rich.console import Console as Terminal

            Terminal().print(_render(watch, rates), crop=False)
        if parsed.once:
            return


def _print_json(rates: Rates) -> None:
    import msgspec

    print(json.dumps(msgspec.to_builtins(rates)), flush=True)


def _draw_live(watch: _Watch, interval_s: float) -> None:
    from rich.live import Live

    with Live(screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            live.update(_render(watch, watch.read()), refresh=True)


def _render(watch: _Watch, rates: Rates) -> Group:
    """Return the contents of the screen: figures with graphs, latencies, and the processes."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    figures = Table(box=None, show_header=False, pad_edge=False)
    graphs = watch.graphs
    for label, value, name in (
        ("generated", f"{rates.generated_tokens_s:,.1f} tokens/s", "generated_tokens_s"),
        ("prompts", f"{rates.prompt_tokens_s:,.1f} tokens/s", "prompt_tokens_s"),
        ("running", f"{rates.running:,}", "running"),
        ("waiting", f"{rates.waiting:,}", "waiting"),
        ("KV cache", f"{rates.kv_use:.1%}", "kv_use"),
    ):
        most = 1.0 if name == "kv_use" else None
        figures.add_row(label, Text(value, justify="right"), sparkline(graphs[name], most))
    figures.add_row("prefix hits", Text(_percent(rates.hit_rate), justify="right"))
    figures.add_row("drafts taken", Text(_percent(rates.accepted), justify="right"))
    latencies = Table(box=None, pad_edge=False)
    latencies.add_column("LATENCY")
    latencies.add_column("P50 ms", justify="right")
    latencies.add_column("P99 ms", justify="right")
    for name, found in rates.latencies_ms.items():
        latencies.add_row(name, *(("", "") if found is None else (f"{ms:,.1f}" for ms in found)))
    parts: list[Any] = [
        Text(f"{watch.server.url}  {rates.requests_s:.2f} requests/s", style="bold"),
        "",
        figures,
        "",
        latencies,
    ]
    if watch.processes:
        from ..status import format_table

        table = format_table({"processes": watch.processes, "trouble": ""})
        parts += ["", Text(table, no_wrap=True, overflow="ignore")]
    return Group(*parts)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
