"""Print the results of a comparison as Markdown: medians, ratios to the best peer, fractions of the roofline."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from .model_cost import ModelCost
from .points import POINTS
from .roofline import floor_seconds

Record = dict[str, Any]


def make_table(results: dict[str, Any]) -> str:
    records: list[Record] = results["records"]
    sections = []
    for model in _unique(r["model"] for r in records):
        of_model = [r for r in records if r["model"] == model]
        for engine in _unique(r["name"] for r in of_model if r["engine"] == "Engine"):
            weights = engine.split(" ", 1)[1]
            # A peer that cannot read this file got it in a wider format.
            peers = _unique(
                r["name"]
                for r in of_model
                if r["engine"] != "Engine" and (weights != "bf16" or r["weights"] == "bf16")
            )
            sections.append(f"## {model}: {engine}")
            sections.append(_points_table(of_model, engine, peers))
            sections.append(_first_token_table(of_model, engine, peers))
            if results["machines"] and (cost := results["costs"].get(f"{model} {weights}")):
                machine = _best_machine(results["machines"])
                sections.append(_roofline_table(of_model, engine, ModelCost(**cost), machine))
        sections.append(_process_table(of_model))
    return "\n\n".join(filter(None, sections))


def _points_table(records: list[Record], engine: str, peers: Sequence[str]) -> str:
    def value(name: str, key: str) -> float | None:
        return _median(_figures(records, name, key, POINTS[key].figure))

    rows = []
    for key, point in POINTS.items():
        own = value(engine, key)
        if own is None:
            continue
        rates = {name: value(name, key) for name in peers}
        best = max((rate for rate in rates.values() if rate is not None), default=None)
        failed = sum(_figures(records, engine, key, "failed"))
        rows.append(
            [
                f"{point.name}: {point.figure.split('_')[0]} tok/s",
                f"{own:,.0f}" + (f" ({failed:.0f} failed)" if failed else ""),
                "" if best is None else f"{own / best:.2f}",
                _spread(records, engine, key, point.figure),
                _others(records, [engine, *peers], key),
                *(_number(rate, ",.0f") for rate in rates.values()),
            ]
        )
    head = ["point", engine, "ratio to the best", "range", "cores busy with others", *peers]
    return _markdown(head, rows)


def _first_token_table(records: list[Record], engine: str, peers: Sequence[str]) -> str:
    rows = []
    for key in ("c1", "c8", "c64"):
        times = {
            name: _median(_figures(records, name, key, "ttft_ms_p50")) for name in (engine, *peers)
        }
        if times[engine] is not None:
            rows.append([POINTS[key].name, *(_number(time, ",.0f") for time in times.values())])
    return _markdown(["first token p50, ms", engine, *peers], rows)


def _roofline_table(
    records: list[Record], engine: str, cost: ModelCost, machine: dict[str, float]
) -> str:
    peak = "bf16_ops_s" if engine.endswith("bf16") else "int8_ops_s"
    if not machine.get(peak):
        return ""
    rows = []
    for key, point in POINTS.items():
        wall = _median(_figures(records, engine, key, "wall_s"))
        if wall is not None:
            only_bytes = floor_seconds(point, cost, {**machine, peak: float("inf")}, peak)
            only_ops = floor_seconds(point, cost, {**machine, "read_bytes_s": float("inf")}, peak)
            floor = floor_seconds(point, cost, machine, peak)
            times = (only_bytes, only_ops, floor)
            rows.append([point.name, *(f"{100 * time / wall:.0f} %" for time in times)])
    title = (
        f"{engine}, {machine['read_bytes_s'] / 1e9:.0f} GB/s read, "
        f"{machine[peak] / 1e9:,.0f} {peak.split('_')[0]} GOP/s"
    )
    return _markdown([title, "bytes", "operations", "roofline"], rows)


def _process_table(records: list[Record]) -> str:
    rows = []
    for name in _unique(r["name"] for r in records):
        of_name = [r for r in records if r["name"] == name]
        memory = _median(sum(r["pss_mib"].values()) for r in of_name if "pss_mib" in r)
        start = _median(r["start_s"] for r in of_name)
        rows.append([name, str(len(of_name)), _number(start, ".2f"), _number(memory, ",.0f")])
    return _markdown(["", "rounds", "start to ready, s", "PSS without KV cache, MiB"], rows)


def _figures(records: list[Record], name: str, key: str, figure: str) -> list[float]:
    of_name = (r["points"].get(key) for r in records if r["name"] == name)
    return [p[figure] for p in of_name if p is not None and p[figure] is not None]


def _spread(records: list[Record], name: str, key: str, figure: str) -> str:
    values = _figures(records, name, key, figure)
    return f"{min(values):,.0f} to {max(values):,.0f}, {len(values)} rounds"


def _best_machine(machines: list[dict[str, float]]) -> dict[str, float]:
    """Return the highest rates ever measured, as the limits of the machine."""
    measured = [m for m in machines if m]
    return {key: max(m[key] for m in measured) for key in (measured or [{}])[0]}


def _others(records: list[Record], names: Sequence[str], key: str) -> str:
    """Return how many CPU cores other programs kept busy. If many, the row is unreliable."""
    points = [r["points"].get(key) for r in records if r["name"] in names]
    shares = [p["other_cpu_s"] / p["wall_s"] for p in points if p is not None]
    return f"{statistics.median(shares):.2f}, at most {max(shares):.2f}"


def _median(values: Iterable[float]) -> float | None:
    values = list(values)
    return statistics.median(values) if values else None


def _number(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def _unique(values: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(values))


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
