"""A heat map as SVG, for W&B and for reports."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from jaxsim.results.terminal import number

CELL, LEFT, ABOVE, BELOW = (72, 32), 64, 44, 44  # pixels: a cell, and the room for labels around the cells
# From low to high; anchors of viridis (van der Walt and Smith, 2015), which is even in lightness and safe for
# colour-blind readers.
COLOURS = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
EMPTY = "#e0e0e0"


def heat_map(title: str, rows: Sequence[Mapping[str, Any]], x: str, y: str, value: str) -> str:
    """The largest `value` of the rows at each pair of `x` and `y`; grey where no row has one."""
    across, up = (sorted({row[key] for row in rows}) for key in (x, y))
    best: dict[tuple[Any, Any], float] = {}
    for row in rows:
        found = row.get(value)
        if found is not None and math.isfinite(found):
            best[row[x], row[y]] = max(found, best.get((row[x], row[y]), -math.inf))
    low, high = min(best.values(), default=0.0), max(best.values(), default=0.0)
    width, height = CELL
    parts = [_text(8, 16, title, "start", "bold"), _text(8, ABOVE - 8, y, "start")]
    for column, at_x in enumerate(across):
        for line, at_y in enumerate(reversed(up)):
            left_edge, top = LEFT + column * width, ABOVE + line * height
            found = best.get((at_x, at_y))
            fill, ink = EMPTY, "black"
            if found is not None:
                share = (found - low) / (high - low) if high > low else 1.0
                fill, ink = _colour(share), "white" if share < 0.6 else "black"
            parts.append(f'<rect x="{left_edge}" y="{top}" width="{width}" height="{height}" fill="{fill}"/>')
            label = "-" if found is None else number(found)
            parts.append(_text(left_edge + width / 2, top + height / 2 + 4, label, "middle", fill=ink))
    bottom = ABOVE + len(up) * height
    parts += [_text(LEFT + (i + 0.5) * width, bottom + 16, at, "middle") for i, at in enumerate(across)]
    parts += [_text(LEFT - 8, ABOVE + (i + 0.5) * height + 4, at, "end") for i, at in enumerate(reversed(up))]
    parts.append(_text(LEFT + len(across) * width, bottom + 36, x, "end"))
    size = (max(LEFT + len(across) * width, 8 * max(len(title), len(x), len(y))) + 8, bottom + BELOW)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{size[0]}" height="{size[1]}"'
    return f'{head} font-family="sans-serif" font-size="12">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: Any, anchor: str, weight: str = "normal", fill: str = "black") -> str:
    style = f'text-anchor="{anchor}" font-weight="{weight}" fill="{fill}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(str(text))}</text>'


def _colour(share: float) -> str:
    """Between the anchors, `share` of the way from the first to the last."""
    place = share * (len(COLOURS) - 1)
    lower = min(int(place), len(COLOURS) - 2)
    mixed = (round(a + (b - a) * (place - lower)) for a, b in zip(COLOURS[lower], COLOURS[lower + 1], strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)
