"""Draws a bar chart of a comparison as SVG, from JSON.

The JSON is what `peers --json` wrote, or a chart: title, unit, points, series, machine and date.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

from side_by_side.points import POINTS

WIDTH: Final = 820
BAR: Final = 14
COLORS: Final = ("#3949ab", "#90a4ae", "#7986cb", "#b0bec5", "#cfd8dc", "#e0e0e0")
STYLE: Final = (
    "text{font:13px system-ui,sans-serif;fill:#222}.t{font-weight:bold}.s{font-size:11px;fill:#666}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.s{fill:#aaa}}"
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench/run draw", description=__doc__)
    parser.add_argument("json", type=Path)
    parser.add_argument("svg", type=Path)
    arguments = parser.parse_args()
    content = json.loads(arguments.json.read_text())
    chart = chart_of_records(content["records"]) if "records" in content else content
    arguments.svg.write_text(draw(chart))


def chart_of_records(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the chart of the decode points of a comparison: medians of all rounds."""
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


def draw(chart: dict[str, Any]) -> str:
    """Return a chart as SVG: a group of horizontal bars for each point."""
    most = max(value for series in chart["series"] for value in series["values"] if value)
    scale = (WIDTH - 260) / most
    source = ", ".join(filter(None, (chart["machine"], chart["date"])))
    parts = [
        f'<text class="t" x="0" y="16">{escape(chart["title"])}</text>',
        f'<text class="s" x="0" y="34">{escape(chart["unit"])}. {escape(source)}</text>',
    ]
    x = 0
    for index, series in enumerate(chart["series"]):
        parts.append(f'<rect x="{x}" y="46" width="10" height="10" fill="{COLORS[index]}"/>')
        parts.append(f'<text x="{x + 15}" y="56">{escape(series["name"])}</text>')
        x += 150
    y = 74
    for point, name in enumerate(chart["points"]):
        parts.append(f'<text x="0" y="{y + 12}">{escape(name)}</text>')
        for index, series in enumerate(chart["series"]):
            value = series["values"][point]
            if value is None:
                continue
            width = max(1, round(value * scale))
            parts.append(
                f'<rect x="110" y="{y}" width="{width}" height="{BAR}" fill="{COLORS[index]}"/>'
                f'<text class="s" x="{114 + width}" y="{y + 11}">{value:,.0f}</text>'
            )
            y += BAR + 2
        y += 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img">'
        f"<title>{escape(chart['title'])}</title><style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )


if __name__ == "__main__":
    main()
