"""Small self-contained HTML pages; every value is escaped, nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#1b1f24;background:#fff}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}
table{border-collapse:collapse;margin:1rem 0;width:100%}
th,td{border-bottom:1px solid #d8dee4;padding:.35rem .6rem;text-align:left;vertical-align:top}
th{background:#f6f8fa}td.number{text-align:right;font-variant-numeric:tabular-nums}
.bar{background:#d8dee4;height:.6rem;border-radius:.3rem;overflow:hidden;min-width:8rem}.bar i{display:block;height:100%;background:#2563a8}
.chat{border-left:4px solid #d8dee4;margin:.6rem 0;padding:.3rem .8rem;white-space:pre-wrap}
.chat.user{border-color:#2563a8}.chat.assistant{border-color:#2e7d4f}.chat.target{background:#eef7f0}
.tag{font-size:.8rem;color:#57606a}.pictures{display:flex;flex-wrap:wrap;gap:1rem}figure{margin:0}img{max-width:100%}
"""


def page(title: str, body: str) -> str:
    """A whole page; ``title`` is escaped, ``body`` is HTML."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table of escaped values; numbers stand to the right. Empty when there are no rows."""
    if not rows:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    lines = "".join("<tr>" + "".join(_cell(value) for value in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"


def heading(text: str) -> str:
    """An escaped second-level heading."""
    return f"<h2>{escape(text)}</h2>"


def text_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """The same table for a terminal, columns aligned."""
    cells = [[str(value) for value in row] for row in [header, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    numeric = [bool(rows) and all(_is_number(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            value.rjust(width) if right else value.ljust(width) for value, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in cells
    )


def percent(share: float) -> str:
    """A share as a percentage with one decimal."""
    return f"{100 * share:.1f} %"


def bar(share: float) -> str:
    """A horizontal bar; pass it through ``table`` inside a ``Raw``."""
    return f'<div class="bar"><i style="width:{100 * min(max(share, 0.0), 1.0):.1f}%"></i></div>'


class Raw(str):
    """HTML that ``table`` must not escape."""

    __slots__ = ()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, str) and value.endswith(" %"))


def _cell(value: object) -> str:
    if isinstance(value, Raw):
        return f"<td>{value}</td>"
    return f'<td class="number">{escape(str(value))}</td>' if _is_number(value) else f"<td>{escape(str(value))}</td>"
