"""Line plots as inline SVG: small, readable anywhere, no scripts."""

from __future__ import annotations

import math
from html import escape

WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 30, 38
COLORS = ("#0969da", "#bf5b17", "#1a7f37")


def line_plot(
    title: str,
    series: dict[str, list[tuple[float, float]]],
    *,
    x_label: str,
    y_range: tuple[float, float] | None = None,
) -> str:
    """An SVG element with one line per series; hovering a point shows its value.

    Args:
        series: (x, y) points by name; a single unnamed series gets no legend.
        y_range: fixed limits of the y axis; by default those of the data.

    Raises:
        ValueError: there is no finite point at all.
    """
    finite = {name: [p for p in points if math.isfinite(p[1])] for name, points in series.items()}
    points = [p for line in finite.values() for p in line]
    if not points:
        raise ValueError(f"plot {title!r} has no finite point")
    xs, ys = [x for x, _ in points], [y for _, y in points]
    x_ticks = ticks(min(xs), max(xs))
    y_ticks = ticks(*(y_range or (min(ys), max(ys))))
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1e-9)
    y_low, y_high = min(y_ticks[0], *ys), max(y_ticks[-1], *ys)

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text x="{LEFT}" y="18" font-weight="600">{escape(title)}</text>']
    for y in y_ticks:
        _, v = at(x_low, y)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{v:.1f}" y2="{v:.1f}" stroke="#d8dee4"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{v + 4:.1f}" text-anchor="end">{y:.4g}</text>')
    for x in x_ticks:
        if x_low <= x <= x_high:
            u, _ = at(x, y_low)
            parts.append(f'<text x="{u:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:.4g}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{escape(x_label)}</text>')
    for i, (name, line) in enumerate(finite.items()):
        color = COLORS[i % len(COLORS)]
        path = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.8"/>')
        for x, y in line:
            u, v = at(x, y)
            hint = escape(f"{x_label} {x:g}: {y:.4g}")
            parts.append(f'<circle cx="{u:.1f}" cy="{v:.1f}" r="2.2" fill="{color}"><title>{hint}</title></circle>')
        if name:
            u = WIDTH - RIGHT - 90 * (len(finite) - i)
            parts.append(f'<text x="{u}" y="18" fill="{color}">{escape(name)}</text>')
    body = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" font-size="11" font-family="sans-serif" role="img">{body}</svg>'


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`, about that many steps apart; at least two."""
    span = high - low or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / about))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power * about >= span * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]
