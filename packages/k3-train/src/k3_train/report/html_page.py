"""The frame of a self-contained HTML page: one style sheet, no script, no network."""

import html
from collections.abc import Iterable, Sequence

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1320px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .3rem; border-bottom: 1px solid #ddd; }
p { max-width: 75ch; margin: .3rem 0 .6rem; }
p.banner { background: #fff3cd; border: 1px solid #e0c65a; padding: .5rem .8rem; max-width: none;
  font-weight: 600; }
.row { display: flex; flex-wrap: wrap; gap: .6rem; align-items: flex-start; }
figure { margin: 0; border: 1px solid #eee; }
svg { display: block; } svg text { font: 11px system-ui, sans-serif; fill: #444; }
svg text.title { font-size: 12.5px; font-weight: 600; fill: #222; }
svg text.end { text-anchor: end; } svg text.mid { text-anchor: middle; }
svg line.grid { stroke: #e6e6e6; } svg polyline { fill: none; stroke-width: 1.6; }
svg image { image-rendering: pixelated; }
.legend { font-size: 12px; padding: 0 .6rem .4rem; max-width: 400px; }
.legend span { margin-right: .8rem; white-space: nowrap; }
.legend i { display: inline-block; width: 10px; height: 10px; margin-right: 4px; }
table { border-collapse: collapse; font-size: 13.5px; margin: .5rem 0; }
th, td { text-align: right; padding: .15rem .6rem; border-bottom: 1px solid #eee; }
th:first-child, td:first-child { text-align: left; }
tr.absent td { color: #999; }
pre { font-size: 12px; background: #f7f7f7; padding: .6rem; overflow-x: auto; }
"""


def page(title: str, *parts: str) -> str:
    """A whole document."""
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    body = f"<h1>{html.escape(title)}</h1>\n" + "".join(parts)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def paragraph(text: str, name: str = "") -> str:
    """Text, escaped; `name` is a class of the style sheet."""
    mark = f' class="{name}"' if name else ""
    return f"<p{mark}>{html.escape(text)}</p>\n"


def section(title: str, text: str, figures: Iterable[str]) -> str:
    """A heading, what the figures show, and the figures side by side; nothing without figures."""
    shown = "".join(figures)
    if not shown:
        return ""
    return f'<h2>{html.escape(title)}</h2>{paragraph(text)}<div class="row">{shown}</div>\n'


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of text; a row whose second cell starts with "not run" is dimmed."""
    cells = "".join(f"<th>{html.escape(one)}</th>" for one in head)
    lines = [f"<tr>{cells}</tr>"]
    for row in rows:
        mark = ' class="absent"' if len(row) > 1 and row[1].startswith("not run") else ""
        inner = "".join(f"<td>{html.escape(one)}</td>" for one in row)
        lines.append(f"<tr{mark}>{inner}</tr>")
    return f"<table>{''.join(lines)}</table>\n"


def details(title: str, text: str) -> str:
    """Text that opens on a click."""
    inner = f"<pre>{html.escape(text)}</pre>"
    return f"<details><summary>{html.escape(title)}</summary>{inner}</details>\n"
