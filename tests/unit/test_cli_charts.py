"""Charts: no text covers another, and what a chart shows is in it."""

from __future__ import annotations

import itertools
import types

import pytest
from matplotlib.text import Text

from prefetchpipe.cli.charts import breakeven, style, sweep, timeline
from prefetchpipe.cli.measure.curves import Curve, crossovers
from prefetchpipe.cli.measure.grid import Point
from prefetchpipe.cli.measure.nvml import Usage
from prefetchpipe.cli.measure.passes import Window

pytestmark = pytest.mark.slow

SIZES = (32, 64, 128, 256, 512, 1024, 2048)
LINE = "A headline that is long enough to need a second line, whatever the width of the chart may be in the end, or not"


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Figures as they are saved."""
    figures = []

    def keep(figure, path):
        style.save(figure, path)
        figures.append(figure)

    for module in (breakeven, sweep, timeline):
        monkeypatch.setattr(module, "save", keep)
    return figures


def texts(figure):
    """Every visible text and the box of its words, without an annotation's arrow."""
    renderer = figure.canvas.get_renderer()
    found = [*figure.texts]
    for panel in figure.axes:
        if panel.get_visible():
            found += [*panel.texts, *panel.get_children(), panel.xaxis.label, panel.yaxis.label]
            for axis, (low, high) in ((panel.xaxis, panel.get_xlim()), (panel.yaxis, panel.get_ylim())):
                ticks = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=False)
                found += [label for place, label in ticks if min(low, high) <= place <= max(low, high)]
    chosen = {id(item): item for item in found if isinstance(item, Text) and item.get_text()}
    return [(item.get_text(), Text.get_window_extent(item, renderer)) for item in chosen.values()]


def overlapping(figure):
    return [
        (one, other)
        for (one, box), (other, second) in itertools.combinations(texts(figure), 2)
        if box.shrunk(0.98, 0.9).overlaps(second.shrunk(0.98, 0.9))
    ]


def outside(figure):
    width, height = figure.get_size_inches() * figure.dpi
    return [words for words, box in texts(figure) if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height]


def curves(op, scale):
    sides = {
        "NumPy": lambda n: 1e-6 + scale * n**2,
        "torch CPU": lambda n: 4e-6 + 0.4 * scale * n**2,
        "torch GPU": lambda n: 1.2e-5 + 0.01 * scale * n**2,
        "torch GPU + copies": lambda n: 4e-5 + 0.01 * scale * n**2 + n * n / 2e9,
    }
    return [
        Curve(op, side, SIZES, tuple((time(n) * 0.9, time(n), time(n) * 1.2) for n in SIZES))
        for side, time in sides.items()
    ]


@pytest.mark.parametrize("names", [("multiply", "matmul", "reduce", "mlp"), ("multiply",)])
def test_breakeven(drawn, tmp_path, names):
    scales = {"multiply": 1e-9, "matmul": 2e-11, "reduce": 4e-8, "mlp": 6e-10}
    taken = [curve for name in names for curve in curves(name, scales[name])]
    found = {name: crossovers([curve for curve in taken if curve.op == name]) for name in names}
    breakeven.draw(taken, found, headline=LINE, where=LINE * 2, path=tmp_path / "a.png")
    (figure,) = drawn
    assert overlapping(figure) == []
    assert outside(figure) == []
    assert sum(words == "torch GPU + copies" for words, _ in texts(figure)) == len(names)


def point(size, depth, workers):
    rate = int((1 + (workers or 0)) * (size or 1) ** 0.5 * (1 - 1 / (depth + 2)) * 1e9)
    return Point(
        size, depth, workers, [Window(1, 1, 1, int(rate * k), 0, Usage(None, None), "") for k in (0.9, 1, 1.1)]
    )


@pytest.mark.parametrize(
    ("sizes", "workers"),
    [((32, 64, 128), (0, 2, 4)), ((64,), (None,)), ((None,), (0, 2))],
    ids=["grid", "one", "depth"],
)
def test_sweep(drawn, tmp_path, sizes, workers):
    points = [point(*key) for key in itertools.product(sizes, (1, 2, 4), workers)]
    sweep.draw(points, headline=LINE, where=LINE, path=tmp_path / "a.png")
    (figure,) = drawn
    assert overlapping(figure) == []
    assert outside(figure) == []
    names = [words for words, _ in texts(figure) if words.startswith("depth ")]
    assert len(names) == (0 if sizes == (None,) else 3 * len(workers))


@pytest.mark.parametrize("seconds", [1.0, 0.001])
def test_timeline(drawn, tmp_path, seconds):
    lanes = (("loader", 0, 0.9), ("packing", 0.9, 0.4), ("copy", 1.3, 0.7), ("compute", 2.1, 1.0), ("wait", 2.0, 0.1))
    spans = [
        types.SimpleNamespace(
            lane=lane, name=lane, batch=100 + number, start_seconds=number + start, seconds=length * seconds
        )
        for number in range(10)
        for lane, start, length in lanes
    ]
    timeline.draw(spans, headline=LINE, where=LINE, path=tmp_path / "a.png")
    (figure,) = drawn
    assert overlapping(figure) == []
    assert outside(figure) == []
    assert sum(words.endswith("busy") for words, _ in texts(figure)) == 4


def test_the_overlap_check_sees_one(drawn):
    figure, panels = style.new_figure(1, 1, size=(4, 3))
    panels[0, 0].text(0.5, 0.5, "one text")
    panels[0, 0].text(0.52, 0.5, "another")
    figure.canvas.draw()
    assert overlapping(figure) == [("one text", "another")]
