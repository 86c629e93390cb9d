"""Draw bar charts as SVG, for the plots of `engine bench` and the documentation."""

from __future__ import annotations

from typing import Any, Final
from xml.sax.saxutils import escape

WIDTH: Final = 820
BAR: Final = 14
_LABELS: Final = 110
"""Minimum width of the labels of the points, in pixels."""
_VALUES: Final = 150
"""Width that is left for the values next to the bars, in pixels."""
_LEGEND: Final = 150
"""Minimum width of a legend entry, in pixels."""
_CHARACTER: Final = 8
"""Maximum width of a character, in pixels."""
COLORS: Final = ("#3949ab", "#90a4ae", "#7986cb", "#b0bec5", "#cfd8dc", "#e0e0e0")
STYLE: Final = (
    "text{font:13px system-ui,sans-serif;fill:#222}.t{font-weight:bold}.s{font-size:11px;fill:#666}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.s{fill:#aaa}}"
)


def draw(*charts: dict[str, Any]) -> str:
    """Return an SVG with charts below each other. A chart has a group of horizontal bars for each point.

    Args:
        charts: Each has a `title`, a `unit`, the names of its `points`, and `series`. A series has a `name` and
            `values`, one for each point; a value may be None. `machine` and `date` may be empty.
    """
    parts: list[str] = []
    y = 0
    for chart in charts:
        y = _draw_chart(chart, parts, y)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img">'
        f"<title>{escape(charts[0]['title'])}</title><style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )


def _draw_chart(chart: dict[str, Any], parts: list[str], top: int) -> int:
    """Append the elements of a chart whose top is at `top`, and return its bottom."""
    values = (value for series in chart["series"] for value in series["values"])
    most = max((value for value in values if value), default=1.0)
    labels = max(_LABELS, *(_CHARACTER * len(name) for name in chart["points"]))
    legend = max(_LEGEND, *(_CHARACTER * len(s["name"]) + 30 for s in chart["series"]))
    scale = (WIDTH - labels - _VALUES) / most
    source = ", ".join(filter(None, (chart["machine"], chart["date"])))
    parts += [
        f'<text class="t" x="0" y="{top + 16}">{escape(chart["title"])}</text>',
        f'<text class="s" x="0" y="{top + 34}">{escape(chart["unit"])}. {escape(source)}</text>',
    ]
    for index, series in enumerate(chart["series"]):
        x, color = index * legend, COLORS[index % len(COLORS)]
        parts.append(f'<rect x="{x}" y="{top + 46}" width="10" height="10" fill="{color}"/>')
        parts.append(f'<text x="{x + 15}" y="{top + 56}">{escape(series["name"])}</text>')
    y = top + 74
    for point, name in enumerate(chart["points"]):
        parts.append(f'<text x="0" y="{y + 12}">{escape(name)}</text>')
        for index, series in enumerate(chart["series"]):
            value = series["values"][point]
            if value is None:
                continue
            width = max(1, round(value * scale))
            shown = f"{value:,.0f}" if most >= 100 else f"{value:,.3g}"
            parts.append(
                f'<rect x="{labels}" y="{y}" width="{width}" height="{BAR}" fill="{COLORS[index % len(COLORS)]}"/>'
                f'<text class="s" x="{labels + 4 + width}" y="{y + 11}">{shown}</text>'
            )
            y += BAR + 2
        y += 12
    return y
