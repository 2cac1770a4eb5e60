"""Small line pictures of figures that were measured: PNG, SVG, or one HTML page that needs nothing else.

matplotlib is asked for only here, and only when a picture is wanted: tables and JSON never need it.
"""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from streams.errors import ConfigError

SUFFIXES = (".png", ".svg", ".html")
_COLUMNS = 2  # panels side by side
_INCHES = (5.2, 3.4)  # of one panel
_STYLES = ("-", "--", ":", "-.")  # so that curves differ also in print and for eyes that see no colour

Curve = tuple[str, Sequence[float], Sequence[float]]  # (name, xs, ys); a y of nan leaves a gap


class Panel(NamedTuple):
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    curves: Sequence[Curve]
    marks: Sequence[tuple[float, str]] = ()  # vertical lines: (x, what it marks)


def require_picture(path: Path) -> None:
    """Refuse a picture that cannot be made, before any work is done for it. Raises ConfigError."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{path}: a picture's name must end in {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}")
    _pyplot()


def lines(path: Path | None, panels: Sequence[Panel], *, title: str) -> str | None:
    """Draw the panels into a file; its suffix says which kind. Without a path, return them as SVG text.

    Raises ConfigError without matplotlib, for another suffix, and for a folder that is not there.
    """
    if path is not None:
        require_picture(path)
    pyplot = _pyplot()
    figure = _figure(pyplot, panels, title)
    try:
        if path is None:
            return _svg(figure)
        if path.suffix.lower() == ".png":
            figure.savefig(path, dpi=120)
        else:
            svg = _svg(figure)
            text = svg if path.suffix.lower() == ".svg" else page(title, svg)
            path.write_text(text, encoding="utf-8")
        return None
    finally:
        pyplot.close(figure)


def page(title: str, *parts: str) -> str:
    """A self-contained HTML page of parts that are HTML or SVG already."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        "<style>body{font:15px/1.5 system-ui,sans-serif;margin:2em;max-width:72em}svg{max-width:100%;height:auto}"
        "pre{overflow-x:auto}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            f"a picture needs matplotlib, which is not installed ({error}): pip install 'millstream[train]', "
            "or leave the picture out"
        ) from error
    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot

    return pyplot


def _figure(pyplot: Any, panels: Sequence[Panel], title: str) -> Any:
    columns = min(_COLUMNS, max(1, len(panels)))
    rows = -(-len(panels) // columns) or 1
    width, height = _INCHES
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(width * columns, height * rows + 0.4), squeeze=False
    )
    places = list(axes.flat)
    for place, panel in zip(places, panels, strict=False):
        _draw(place, panel)
    for place in places[len(panels) :]:
        place.set_axis_off()
    figure.suptitle(title)
    figure.tight_layout()
    return figure


def _draw(axes: Any, panel: Panel) -> None:
    for place, (name, xs, ys) in enumerate(panel.curves):
        marker = "o" if len(xs) <= 16 else None
        style = _STYLES[place % len(_STYLES)]
        axes.plot(xs, ys, style, label=name, marker=marker, markersize=4, linewidth=1.4)
    for place, (x, name) in enumerate(panel.marks):
        axes.axvline(x, color="0.55", linewidth=1, linestyle=(0, (4, 2 + 2 * place)), label=name)
    axes.set_title(panel.title, fontsize=10)
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    axes.grid(alpha=0.3)
    if panel.curves or panel.marks:
        axes.legend(fontsize=8, framealpha=0.5)


def _svg(figure: Any) -> str:
    """The figure as an <svg> element, without the XML head that HTML does not take."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
