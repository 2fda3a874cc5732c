"""What `breakeven`, `sweep` and `trace` measure and conclude: no terminal, no timing asserted."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch

from prefetchpipe.cli.measure.crossover import find_crossover
from prefetchpipe.cli.measure.curves import Curve, crossovers, measure_operation, missing_sides
from prefetchpipe.cli.measure.grid import Point, compare, measure_grid
from prefetchpipe.cli.measure.nvml import Usage
from prefetchpipe.cli.measure.operations import OPERATIONS
from prefetchpipe.cli.measure.passes import EmptyLoaderError, Window, measure_window
from prefetchpipe.cli.measure.timeline import busy_shares, headline, hidden_share, lanes_of, window
from prefetchpipe.cli.measure.timing import Spread

CPU = torch.device("cpu")


class TestCrossover:
    def test_between_two_sizes_on_the_logarithm(self):
        found = find_crossover("a", "b", [10, 1000], [1.0, 1.0], [0.1, 10.0])
        assert (found.kind, found.size) == ("at", 100.0)

    def test_the_last_crossing_counts(self):
        found = find_crossover("a", "b", [1, 2, 4, 8], [1.0, 2.0, 2.0, 1.0], [2.0, 1.0, 1.0, 2.0])
        assert found.kind == "at"
        assert found.size == pytest.approx(4 * 2**0.5, rel=1e-3)

    @pytest.mark.parametrize(
        ("mine", "other", "kind"),
        [([1, 1], [2, 2], "from the start"), ([2, 2], [1, 1], "not reached"), ([1, 2], [2, 1], "not reached"),
         ([], [1, 1], "not measured")],
    )  # fmt: skip
    def test_where_there_is_none(self, mine, other, kind):
        found = find_crossover("a", "b", [1, 2], mine, other)
        assert (found.kind, found.size) == (kind, None)

    def test_the_gpu_has_to_beat_the_faster_cpu_side(self):
        sides = {
            "NumPy": (1.0, 9.0),
            "torch CPU": (5.0, 5.0),
            "torch GPU": (1.5, 1.5),
            "torch GPU + copies": (6.0, 6.0),
        }
        curves = [Curve("multiply", side, (1, 2), tuple((t,) for t in times)) for side, times in sides.items()]
        found = {crossover.faster: crossover for crossover in crossovers(curves)}
        assert [found[name].kind for name in sides if name != "NumPy"] == ["at", "at", "not reached"]
        assert found["torch GPU"].than == "the faster CPU side"

    def test_without_a_gpu(self):
        curves = [Curve("reduce", side, (1,), ((t,),)) for side, t in (("NumPy", 2.0), ("torch CPU", 1.0))]
        assert [crossover.kind for crossover in crossovers(curves)] == [
            "from the start",
            "not measured",
            "not measured",
        ]


class TestOperations:
    @pytest.mark.parametrize("name", OPERATIONS)
    def test_numpy_and_torch_compute_the_same(self, name):
        operation = OPERATIONS[name]
        generator = torch.Generator().manual_seed(0)
        shapes = [*operation.weights, *operation.inputs(5)]
        tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        arrays = [tensor.numpy().copy() for tensor in tensors]
        for _ in range(2):  # the second call sees the updated weights
            expected, got = operation.run(*arrays), operation.run(*tensors)
            np.testing.assert_allclose(got, expected, rtol=1e-12)

    def test_the_mlp_step_is_that_of_autograd(self):
        generator = torch.Generator().manual_seed(1)
        w1, w2, x, y = (
            torch.randn(shape, generator=generator, dtype=torch.float64)
            for shape in [*OPERATIONS["mlp"].weights, *OPERATIONS["mlp"].inputs(3)]
        )
        a, b = w1.clone().requires_grad_(), w2.clone().requires_grad_()
        loss = ((torch.relu(x @ a) @ b - y) ** 2).sum() / (2 * len(x))
        loss.backward()
        OPERATIONS["mlp"].run(w1, w2, x, y)
        torch.testing.assert_close(w1, (a - 1e-4 * a.grad).detach())
        torch.testing.assert_close(w2, (b - 1e-4 * b.grad).detach())

    def test_curves_have_every_size_and_repeat(self):
        curves = measure_operation("reduce", [2, 3], dtype="float32", device=CPU, seconds=0.0, repeats=2)
        assert [(curve.side, curve.sizes, [len(r) for r in curve.seconds]) for curve in curves] == [
            ("NumPy", (2, 3), [2, 2]),
            ("torch CPU", (2, 3), [2, 2]),
        ]

    def test_numpy_has_no_bfloat16(self):
        (curve,) = measure_operation("multiply", [2], dtype="bfloat16", device=CPU, seconds=0.0, repeats=1)
        assert curve.side == "torch CPU"
        assert missing_sides(CPU, "bfloat16")["NumPy"] == "NumPy has no bfloat16"
        assert set(missing_sides(CPU, "float32")) == {"torch GPU", "torch GPU + copies"}


class TestWindow:
    def test_batches_rows_and_bytes_are_counted_over_several_passes(self):
        loader = [
            (torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)),
            (torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)),
        ]
        seen = []
        found = measure_window(loader, CPU, depth=1, warm=1, batches=4, step=lambda batch: seen.append(len(batch[0])))
        assert (found.batches, found.samples, found.nbytes) == (4, 8, 8 * 16)
        assert seen == [3, 1, 3, 1, 3]
        assert 0 <= found.wait_seconds <= found.seconds

    def test_an_empty_loader_is_said(self):
        with pytest.raises(EmptyLoaderError, match="no batch"):
            measure_window([], CPU, depth=1, warm=0, batches=1)

    def test_batches_without_tensors(self):
        found = measure_window(["a"], CPU, depth=1, warm=0, batches=2)
        assert (found.samples, found.nbytes) == (2, 0)


def point(*rates, **key):
    made = Point(**{"batch_size": 8, "depth": 2, "num_workers": 0, **key})
    made.windows = [Window(1.0, 1, rate, 10, 0.5, Usage(50.0, rate), "") for rate in rates]
    return made


class TestGrid:
    @pytest.mark.parametrize(
        ("now", "verdict"), [((21, 25), "better"), ((5, 9), "worse"), ((20, 30), "same within spread")]
    )
    def test_better_and_worse_only_outside_the_spread(self, now, verdict):
        (found,) = compare([point(10, 20)], [point(*now)])
        assert found.verdict == verdict

    def test_one_repeat_has_no_spread(self):
        assert [found.verdict for found in compare([point(10)], [point(20, 21)])] == ["spread unknown"]
        assert [found.verdict for found in compare([point(10, 11)], [point(5)])] == ["spread unknown"]

    def test_only_points_of_both_runs_with_times(self):
        before = [point(10), point(10, depth=4), point(depth=1)]
        now = [point(10), point(10, batch_size=16), point(10, depth=1)]
        assert [difference.key for difference in compare(before, now)] == [(8, 2, 0)]

    def test_what_a_point_says(self):
        made = point(10, 30)
        assert made.samples_per_second() == Spread(20.0, 10.0, 30.0)
        assert (made.wait_share(), made.gpu_percent(), made.memory_bytes()) == (0.5, 50.0, 30)

    def test_an_error_ends_its_point_alone(self):
        points = [point(), point(depth=4)]
        order = []

        def make(which):
            if which.depth == 4:
                raise ValueError("no")
            return [torch.zeros(2)]

        measure_grid(
            points, make, CPU, repeats=2, warm=0, batches=1, step=None, explain=repr,
            done=lambda which: order.append(which.depth),
        )  # fmt: skip
        assert [len(item.windows) for item in points] == [2, 0]
        assert points[1].error == "ValueError('no')"
        assert order == [2, 4, 2, 4]


def span(lane, start, seconds, batch=0):
    return types.SimpleNamespace(lane=lane, name=lane, start_seconds=start, seconds=seconds, batch=batch)


class TestTimeline:
    def test_busy_shares_count_overlapping_spans_once(self):
        spans = [span("loader", 0, 2), span("loader", 1, 3), span("compute", 4, 6)]
        assert busy_shares(spans) == {"loader": 0.4, "compute": 0.6}

    def test_hidden_is_what_runs_behind_compute(self):
        spans = [span("loader", 0, 4), span("copy", 4, 4), span("compute", 2, 4)]
        assert hidden_share(spans) == 0.5
        assert hidden_share([span("compute", 0, 1)]) is None

    def test_lanes_in_the_order_of_the_pipeline_unknown_ones_last(self):
        spans = [span("other", 0, 1), span("compute", 0, 1), span("loader", 0, 1)]
        assert lanes_of(spans) == ["loader", "compute", "other"]

    def test_the_headline_names_who_sets_the_pace(self):
        assert headline([span("loader", 0, 1), span("compute", 0, 10)]).startswith("The loop sets the pace")
        slow = headline([span("loader", 0, 8), span("packing", 8, 1), span("compute", 9, 1)])
        assert slow.startswith("The loop works 10% of the time; the busiest lane before it is loader (80%)")
        assert headline([]) == "No work was recorded"

    def test_a_chart_shows_the_last_batches(self):
        spans = [span("loader", number, 1, number) for number in range(30)]
        assert [item.batch for item in window(spans)] == list(range(20, 30))
