"""Names beside the points of a picture, where they cover neither each other nor a point nor a line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation

_NEAR, _LINE = 8, 13  # points: from a marker's middle to its label, and from one line of text to the next
_LINES_AWAY = 6
_BETWEEN = 40  # places along a piece of a line that a label should not cover
_MARK = 6  # pixels around a point that belong to it
_SPOT = 100.0  # what covering a point costs, in square pixels
_GREY = "#8a939b"
Pixels = NDArray[np.float64]


def place_labels(axis: Axes, points: Mapping[str, tuple[float, float]]) -> list[Annotation]:
    """Write each name beside its point, with a thin line where it is not level with it; in their order.

    A label takes the place, of those around its point from near to far, that covers least of the labels
    before it, of all points, of the axis' lines and legend, and leaves the axis least; its line likewise.
    Everything else has to be drawn before; labels do not move the axis.
    """
    figure = axis.get_figure()
    assert figure is not None  # the axis was made by one
    figure.draw_without_rendering()  # type: ignore[union-attr]
    legend = axis.get_legend()
    marks = axis.transData.transform(list(points.values()))
    drawn = _Drawn(
        inside=_box(axis),
        marks=marks,
        spots=np.concatenate([marks, *_along_lines(axis)]),
        boxes=[] if legend is None else [_box(legend)],
        points_per_pixel=72 / figure.dpi,
    )
    found = []
    for mark, (name, point) in zip(marks, points.items(), strict=True):
        label = axis.annotate(name, point, (_NEAR, 0), textcoords="offset points")
        label.set_in_layout(False)
        least, best = float("inf"), (_NEAR, 0)
        for place in _places():
            _put(label, place)
            cost = drawn.cost(_box(label, 1), mark, place)
            if cost < least:
                least, best = cost, place
        _put(label, best)
        drawn.boxes.append(_box(label, 1))
        if best[1]:
            pen = {"arrowstyle": "-", "color": _GREY, "lw": 0.6, "shrinkA": 0}
            axis.annotate("", point, best, textcoords="offset points", arrowprops=pen).set_in_layout(False)
        found.append(label)
    return found


@dataclass
class _Drawn:
    """What is there already, in pixels; boxes are ``[left, low, right, high]``."""

    inside: Pixels
    marks: Pixels
    spots: Pixels
    boxes: list[Pixels]
    points_per_pixel: float

    def cost(self, box: Pixels, mark: Pixels, place: tuple[int, int]) -> float:
        """Square pixels of other labels and of the outside, and as much for each spot that is covered."""
        low, high = box[:2], box[2:]
        outside = np.prod(high - low) - _overlap(box, self.inside)
        labels = sum(_overlap(box, other) for other in self.boxes)
        covered = ((self.spots >= low - 2) & (self.spots <= high + 2)).all(axis=1).sum()
        return float(outside + labels + _SPOT * (covered + self._crossed(mark, place)))

    def _crossed(self, mark: Pixels, place: tuple[int, int]) -> int:
        """Other points and labels that the line from the point to its label runs through."""
        if not place[1]:
            return 0
        line = mark + np.linspace(0, 1, _BETWEEN)[:, None] * np.array(place) / self.points_per_pixel
        others = self.marks[(self.marks != mark).any(axis=1)]
        near = (np.abs(others[:, None] - line).max(axis=2) < _MARK).any(axis=1).sum()
        boxes = sum(bool(((line >= box[:2]) & (line <= box[2:])).all(axis=1).any()) for box in self.boxes)
        return int(near) + boxes


def _places() -> Iterator[tuple[int, int]]:
    """Points to the right and up of the marker, near ones first."""
    for lines in range(_LINES_AWAY):
        for up in (lines * _LINE, -lines * _LINE) if lines else (0,):
            yield from ((_NEAR, up), (-_NEAR, up))
            if lines:
                yield from ((0, up), (4 * _NEAR, up), (-4 * _NEAR, up))


def _put(label: Annotation, place: tuple[int, int]) -> None:
    right, up = place
    label.set_position(place)
    label.set_horizontalalignment("left" if right > 0 else "right" if right < 0 else "center")
    label.set_verticalalignment("center" if right else "bottom" if up > 0 else "top")


def _along_lines(axis: Axes) -> list[Pixels]:
    """Places along the lines that join points."""
    found = []
    for line in axis.get_lines():
        if line.get_linestyle() == "None":
            continue
        ends = axis.transData.transform(line.get_xydata())
        steps = np.linspace(0, 1, _BETWEEN)[:, None]
        found += [start + steps * (end - start) for start, end in pairwise(ends)]
    return found


def _box(artist: Artist, margin: float = 0) -> Pixels:
    return np.asarray(artist.get_window_extent().padded(margin).extents)


def _overlap(box: Pixels, other: Pixels) -> float:
    sides = np.minimum(box[2:], other[2:]) - np.maximum(box[:2], other[:2])
    return float(np.prod(sides.clip(min=0)))
