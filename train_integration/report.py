"""One self-contained HTML page from tables and line plots: no scripts, no files beside it, everything escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from ingest.storage.atomic import write_atomic

_COLOURS = ("#0b6e99", "#c4501b", "#4f8a10", "#7b3f98", "#8a6d00")
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1c1e21;background:#fff}
h1{font-size:1.6rem}h2{font-size:1.15rem;margin-top:2rem}table{border-collapse:collapse;margin:.5rem 0}
td,th{border-bottom:1px solid #d8dbe0;padding:.3rem .9rem .3rem 0;text-align:left;vertical-align:top}
td.num{text-align:right;font-variant-numeric:tabular-nums}.ok{color:#2d7a1f;font-weight:600}.bad{color:#b3261e;font-weight:600}
svg{max-width:100%;height:auto}svg text{font:12px system-ui,sans-serif;fill:#444}figcaption{color:#555;font-size:.9rem}
"""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a plot: equally long ``x`` and ``y``."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def table_html(rows: Sequence[Sequence[object]], header: Sequence[str] = ()) -> str:
    """An HTML table; numbers are set to the right, ``True`` and ``False`` as a coloured yes and no."""

    def cell(value: object) -> str:
        if isinstance(value, bool):
            return f'<td class="{"ok" if value else "bad"}">{"yes" if value else "no"}</td>'
        if isinstance(value, int | float):
            return f'<td class="num">{number_text(value)}</td>'
        return f"<td>{escape(str(value))}</td>"

    head = "<tr>" + "".join(f"<th>{escape(name)}</th>" for name in header) + "</tr>" if header else ""
    return "<table>" + head + "".join("<tr>" + "".join(cell(value) for value in row) + "</tr>" for row in rows) + "</table>"


def number_text(value: float) -> str:
    """A number as a person writes it: 4,924 or 0.0312."""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def line_plot(series: Sequence[Series], *, title: str, x_label: str, y_label: str, width: int = 720, height: int = 260) -> str:
    """An SVG line plot as a figure."""
    left, right, top, bottom = 62, 12, 30, 40
    xs = [x for line in series for x in line.x]
    ys = [y for line in series for y in line.y]
    if not xs:
        return f"<figure><figcaption>{escape(title)}: no points</figcaption></figure>"
    x_low, x_high = min(xs), max(xs)
    y_low, y_high = min(0.0, *ys), max(ys)
    x_span, y_span = (x_high - x_low) or 1.0, (y_high - y_low) or 1.0

    def place(x: float, y: float) -> str:
        across = left + (x - x_low) / x_span * (width - left - right)
        down = height - bottom - (y - y_low) / y_span * (height - top - bottom)
        return f"{across:.1f},{down:.1f}"

    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">']
    for share in (0.0, 0.5, 1.0):
        y = y_low + share * y_span
        down = height - bottom - share * (height - top - bottom)
        parts.append(f'<line x1="{left}" x2="{width - right}" y1="{down:.1f}" y2="{down:.1f}" stroke="#e3e6ea"/>')
        parts.append(f'<text x="{left - 6}" y="{down + 4:.1f}" text-anchor="end">{number_text(float(f"{y:.3g}"))}</text>')
        x = x_low + share * x_span
        across = left + share * (width - left - right)
        # The last label ends at the edge instead of beyond it.
        anchor = "end" if share == 1.0 else "middle"
        parts.append(f'<text x="{across:.1f}" y="{height - bottom + 16}" text-anchor="{anchor}">{number_text(float(f"{x:.4g}"))}</text>')
    names: list[str] = []
    for number, line in enumerate(series):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(place(x, y) for x, y in zip(line.x, line.y, strict=True))
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.8" points="{points}"/>')
        names.append(f'<tspan style="fill:{colour}" dx="{12 if number else 0}">{escape(line.name)}</tspan>')
    parts.append(f'<text x="{left}" y="{top - 12}">{"".join(names)}</text>')
    parts.append(f'<text x="{(left + width) / 2:.0f}" y="{height - 6}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text x="14" y="{height / 2:.0f}" text-anchor="middle" transform="rotate(-90 14 {height / 2:.0f})">{escape(y_label)}</text></svg>'
    )
    return f"<figure>{''.join(parts)}<figcaption>{escape(title)}</figcaption></figure>"


def write_page(path: Path, title: str, sections: Mapping[str, str]) -> Path:
    """Writes the page. Section bodies are HTML made by this module; titles are plain text."""
    body = "".join(f"<h2>{escape(name)}</h2>{html}" for name, html in sections.items())
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>{body}</html>\n"
    )
    write_atomic(path, page.encode())
    return path
