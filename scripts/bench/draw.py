"""Draw a bar chart of a comparison as SVG, from JSON.

The JSON was written by `peers --json`, or it is a chart: title, unit, points, series, machine and date.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from engine.frontend.cli.bench.svg import draw
from side_by_side.points import POINTS


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench/run draw", description=__doc__)
    parser.add_argument("json", type=Path)
    parser.add_argument("svg", type=Path)
    arguments = parser.parse_args()
    content = json.loads(arguments.json.read_text())
    chart = chart_of_records(content["records"]) if "records" in content else content
    arguments.svg.write_text(draw(chart))


def chart_of_records(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the chart of a comparison's decode points, with medians over all rounds."""
    points = [key for key, point in POINTS.items() if point.name.startswith("128/128")]
    names = dict.fromkeys(record["name"] for record in records)
    return {
        "title": "128 tokens in and 128 out",
        "unit": "output tokens per second",
        "points": [POINTS[key].name for key in points],
        "series": [
            {
                "name": name,
                "values": [_median(records, name, key) for key in points],
            }
            for name in names
        ],
        "machine": "",
        "date": "",
    }


def _median(records: list[dict[str, Any]], name: str, point: str) -> float | None:
    figures = [
        record["points"][point][POINTS[point].figure]
        for record in records
        if record["name"] == name and record["points"].get(point)
    ]
    return statistics.median(figures) if figures else None


if __name__ == "__main__":
    main()
