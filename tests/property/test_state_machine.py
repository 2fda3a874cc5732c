"""Random programs over a prefetcher on the simulated device: start, next, drop, close, error, reconfigure, streams.

The model is the plain loop. Every batch is read late, by a kernel queued behind work of random length, and mostly
dropped at once; what the kernels saw is looked at when the device has come to rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from prefetchpipe import GPUPrefetcher
from prefetchpipe.errors import IteratorClosedError
from prefetchpipe.testing import SimulatedDevice
from tests.support import join_ours, our_threads

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::prefetchpipe.errors.PrefetchWarning"),
]

SLOTS = 3
MOST_LIVE = 4
SECONDS = st.sampled_from([0.0, 1e-6, 1e-3, 0.05])
FATES = st.sampled_from(["drop", "drop", "keep", "slice"])
WHICH = st.integers(0, MOST_LIVE - 1)

moderate = settings(
    max_examples=500,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


class Log:
    """What one pass over a loader was seen to do; written by whoever pulls."""

    def __init__(self, depth: int, *, watch_device: bool) -> None:
        self.depth = depth
        self.watch_device = watch_device
        self.pulled = 0
        self.delivered = 0
        self.fences: list[list[Kernel]] = []
        """For each `next`: what had been queued on the consumer's stream by then."""
        self.faults: list[str] = []

    def pull(self) -> None:
        number = self.pulled
        self.pulled += 1
        if self.pulled - self.delivered > self.depth + 1:
            self.faults.append(f"{self.pulled} pulled after {self.delivered} delivered")
        due = number - self.depth
        if self.watch_device and due >= 0 and not all(kernel.done for kernel in self.fences[due]):
            self.faults.append(f"batch {number} pulled although the device is not done with batch {due - 1}")


class Kernel:
    """A read queued on a stream."""

    def __init__(self, expected: float) -> None:
        self.expected = expected
        self.done = False
        self.seen: list[list[float]] = []

    def __call__(self, *views: torch.Tensor) -> None:
        self.seen = [view.double().unique().tolist() for view in views]
        self.done = True


class Rows:
    """A loader of dicts whose tensors hold nothing but one number, another one for every pass and row.

    Args:
        device: For page-locked tensors.
        count: Rows of a pass.
        size: Elements of the larger leaf.
        kind: "fresh" (new tensors), "buffer" or "pinned buffer" (the same ones again), "raises" (after the last row).
    """

    def __init__(self, device: SimulatedDevice, count: int, size: int, kind: str) -> None:
        self.device = device
        self.count = count
        self.size = size
        self.kind = kind
        self.passes = 0
        self.new_log: Callable[[], Log] = lambda: Log(99, watch_device=False)
        self.log = self.new_log()
        self.reached = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        self.log = self.new_log()
        return self.rows(self.passes, 0, self.log)

    def rows(self, number: int, first: int, log: Log) -> Iterator[Any]:
        x, y = torch.zeros(self.size), torch.zeros(3, dtype=torch.int64)
        if self.kind == "pinned buffer":
            x = self.device.pin_memory(x)
        for index in range(first, self.count):
            self.at(index)
            self.reached = index + 1
            log.pull()
            if self.kind in ("buffer", "pinned buffer"):
                yield {"x": x.fill_(value_of(number, index)), "y": y.fill_(value_of(number, index)), "i": index}
            else:
                yield make(number, index, self.size)
        x.fill_(-1)
        y.fill_(-1)
        self.at(0)
        if self.kind == "raises":
            raise KeyError(self.count)

    def at(self, position: int) -> None:
        """For loaders with a state."""


class Stateful(Rows):
    """Starts again at the first row, unless a state was loaded."""

    position = 0
    loaded = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        self.log = self.new_log()
        first, self.loaded = self.loaded, 0
        self.position = first
        return self.rows(self.passes, first, self.log)

    def rows(self, number: int, first: int, log: Log) -> Iterator[Any]:
        for batch in super().rows(number, first, log):
            self.position = batch["i"] + 1
            yield batch

    def at(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = self.position = state["position"]


def value_of(number: int, index: int) -> int:
    return 100 * number + index + 1


def make(number: int, index: int, size: int) -> dict[str, Any]:
    value = value_of(number, index)
    return {"x": torch.full((size,), float(value)), "y": torch.full((3,), value), "i": index}


class Setup:
    """One prefetcher and what the model knows of it."""

    def __init__(self, device: SimulatedDevice, source: str, count: int, size: int, options: dict[str, Any]) -> None:
        self.device = device
        self.source = source
        self.count = count
        self.size = size
        self.options = options
        self.depth = options["depth"]
        self.factor, self.added, transform = self._transform(options["transform"])
        # No reference to this object: what is dropped has to go without the collector.
        self.new_log = partial(Log, self.depth, watch_device=options["fetch"] != "auto")
        self.list = [make(1, index, size) for index in range(count)]
        if source == "pinned list":
            self.list = [{**batch, "x": device.pin_memory(batch["x"])} for batch in self.list]
        self.rows: Rows | None = None
        loader: Any = self.list
        if source not in ("list", "pinned list"):
            kind = "fresh" if source in ("stateful", "one-shot") else source
            self.rows = (Stateful if source == "stateful" else Rows)(device, count, size, kind)
            self.rows.new_log = self.new_log
            loader = self.rows
        self.log: Log | None = None  # of a source that has one pass only
        if source == "one-shot":
            self.log = Log(self.depth, watch_device=False)
            loader = self.rows.rows(1, 0, self.log)
        self.prefetcher = GPUPrefetcher(loader, device, **{**options, "transform": transform})
        self.next_row = 0
        """Where the next pass begins."""
        self.position = 0
        """The state that a loader with one should have."""

    def _transform(self, name: str | None) -> tuple[float, float, Any]:
        device = self.device

        def in_place(batch: Any) -> Any:
            for key in ("x", "y"):
                device.launch(lambda view: view.mul_(2), batch[key], seconds=1e-4)
            return batch

        def elsewhere(batch: Any) -> Any:
            result = {**batch}
            for key in ("x", "y"):
                leaf = batch[key]
                result[key] = device.empty(leaf.shape, leaf.stride(), leaf.dtype)
                device.launch(lambda to, of: to.copy_(of).mul_(3), result[key], leaf)
            return result

        def at_once(batch: Any) -> Any:
            return {**batch, "x": batch["x"] + 5, "y": batch["y"] + 5}

        return {
            None: (1, 0, None),
            "in place": (2, 0, in_place),
            "elsewhere": (3, 0, elsewhere),
            "at once": (1, 5, at_once),
        }[name]

    @property
    def batch_bytes(self) -> int:
        """At most, with alignment, on the device and in a slot."""
        return self.size * 4 + 3 * 8 + 128

    @property
    def live_bytes(self) -> int:
        return self.batch_bytes * (2 if self.options["transform"] == "elsewhere" else 1)

    def expected(self, number: int, index: int) -> float:
        return value_of(number, index) * self.factor + self.added


class Pass:
    """One iterator and what the model expects of it."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.iterator = iter(setup.prefetcher)
        rows = setup.rows
        self.number = 1 if rows is None or setup.source == "one-shot" else rows.passes
        self.log = setup.log or (rows.log if rows is not None else setup.new_log())
        self.row = setup.next_row
        if setup.source != "one-shot":
            setup.next_row = 0
        self.state = "open"

    def calm_down(self) -> None:
        """Wait until the thread is as far ahead as it goes, so that a failure is one again when it is replayed."""
        log, setup = self.log, self.setup
        if setup.rows is None or setup.options["fetch"] != "thread" or self.state != "open" or not log.delivered:
            return
        due = min(log.delivered + setup.depth, log.pulled + setup.count - setup.rows.reached)
        for _ in range(1000):
            if log.pulled >= due:
                return
            time.sleep(1e-4)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.threads = our_threads()
        self.kernels: dict[Any, list[Kernel]] = {}
        self.checks: list[Kernel] = []
        self.kept: list[tuple[Any, float, int]] = []
        self.passes: list[Pass] = []
        self.setups: list[Setup] = []

    @initialize(
        seed=st.integers(0, 1 << 16), bandwidth=st.sampled_from([25e9, 1e7, 1e6]), calm=st.sampled_from([True, False])
    )
    def begin(self, seed: int, bandwidth: float, calm: bool) -> None:
        self.calm = calm
        self.device = SimulatedDevice(seed=seed, bandwidth=bandwidth)
        self.streams = [self.device.default_stream, self.device.new_stream(), self.device.new_stream()]
        self.stream = self.streams[0]

    # What a program does

    @rule(
        source=st.sampled_from(
            ["list", "pinned list", "fresh", "buffer", "pinned buffer", "raises", "stateful", "one-shot"]
        ),
        count=st.sampled_from([12, 12, 5, 1, 0]),
        size=st.sampled_from([1000, 1000, 17, 1, 0]),
        depth=st.integers(1, 4),
        fetch=st.sampled_from(["thread", "thread", "caller", "auto"]),
        transform=st.sampled_from([None, None, None, "in place", "elsewhere", "at once"]),
        max_pinned_bytes=st.sampled_from([None, None, None, 0, 9000]),
        static=st.sampled_from([False, False, False, True]),
        checked=st.sampled_from([False, False, False, True]),
    )
    def configure(self, source: str, count: int, size: int, **options: Any) -> None:
        with self.device.use_stream(self.stream):
            self.setups.append(Setup(self.device, source, count, size, options))
        self.forget_setups()
        if len(self.passes) < MOST_LIVE:
            self.start()

    @precondition(lambda self: self.setups and len(self.passes) < MOST_LIVE)
    @rule()
    def start(self) -> None:
        setup = self.setups[-1]
        if setup.source in ("one-shot", "stateful"):  # one position: the last pass owns it
            self.passes = [p for p in self.passes if p.setup is not setup]
        with self.device.use_stream(self.stream):
            new = Pass(setup)
        if setup.source == "stateful":
            setup.position = new.row
        self.passes.append(new)

    @precondition(lambda self: self.passes)
    @rule(which=WHICH, seconds=SECONDS, fate=FATES)
    def advance(self, which: int, seconds: float, fate: str) -> None:
        with self.device.use_stream(self.stream):
            self.step(self.passes[which % len(self.passes)], seconds, fate)

    @precondition(lambda self: self.passes)
    @rule(which=WHICH, times=st.integers(2, 8), seconds=SECONDS)
    def loop(self, which: int, times: int, seconds: float) -> None:
        a_pass = self.passes[which % len(self.passes)]
        for _ in range(times):
            with self.device.use_stream(self.stream):
                self.step(a_pass, seconds, "drop")

    @precondition(lambda self: self.passes)
    @rule(seconds=SECONDS)
    def loop_over_the_newest_to_its_end(self, seconds: float) -> None:
        a_pass = self.passes[-1]
        while a_pass.state == "open":
            with self.device.use_stream(self.stream):
                self.step(a_pass, seconds, "drop")

    @precondition(lambda self: self.passes)
    @rule(which=WHICH, again=st.booleans())
    def drop_iterator(self, which: int, again: bool) -> None:
        gone = self.passes.pop(which % len(self.passes))
        setup = gone.setup
        del gone
        self.check_state(setup)
        self.forget_setups()
        if again:
            self.start()

    @precondition(lambda self: self.passes)
    @rule(which=WHICH)
    def close_iterator(self, which: int) -> None:
        closed = self.passes[which % len(self.passes)]
        closed.iterator.close()
        self.note_closed(closed)
        self.check_state(closed.setup)

    @precondition(lambda self: self.setups)
    @rule(which=st.integers(0, 2))
    def close_prefetcher(self, which: int) -> None:
        setup = self.setups[which % len(self.setups)]
        setup.prefetcher.close()
        for a_pass in self.passes:
            if a_pass.setup is setup:
                self.note_closed(a_pass)
        if setup.log is not None:
            setup.next_row = setup.log.pulled  # what was ahead is gone
            setup.log.delivered = setup.log.pulled
        assert setup.prefetcher.stats().pinned_bytes == 0
        self.check_state(setup)

    @rule(which=st.integers(0, 2))
    def change_stream(self, which: int) -> None:
        if any(p.setup.options["static"] for p in self.passes):
            self.device.synchronize()  # static buffers are ordered on one stream
        self.stream = self.streams[which]

    @rule()
    def synchronize(self) -> None:
        self.device.synchronize()
        self.check_values()

    @precondition(lambda self: self.kept)
    @rule(which=st.integers(0, 9))
    def forget_batch(self, which: int) -> None:
        self.kept.pop(which % len(self.kept))

    @precondition(lambda self: self.setups and self.setups[-1].source == "stateful")
    @rule(depth=st.integers(1, 4))
    def resume_in_a_new_prefetcher(self, depth: int) -> None:
        old = self.setups[-1]
        state = old.prefetcher.state_dict()
        assert state == {"position": old.position}
        new = Setup(self.device, "stateful", old.count, old.size, {**old.options, "depth": depth})
        new.prefetcher.load_state_dict(state)
        assert new.prefetcher.state_dict() == state
        new.next_row = new.position = old.position
        self.setups.append(new)
        self.forget_setups()

    # The model

    def step(self, a_pass: Pass, seconds: float, fate: str) -> None:
        setup, log = a_pass.setup, a_pass.log
        if a_pass.state == "open":
            # A list instead of nothing, so that a pass that goes wrong is not out of range as well.
            log.fences.append([k for k in self.kernels.get(self.stream, []) if not k.done])
        batch, error = outcome(a_pass.iterator)
        if a_pass.state == "closed":
            assert error is IteratorClosedError
        elif a_pass.state == "ended":
            assert error is StopIteration
        elif a_pass.row == setup.count:
            assert error is (KeyError if setup.source == "raises" else StopIteration)
            a_pass.state = "ended"
            if setup.source == "stateful":
                setup.position = 0
        else:
            assert error is None
            log.delivered += 1
            index = a_pass.row
            a_pass.row += 1
            setup.position = a_pass.row
            if setup.source == "one-shot":
                setup.next_row = a_pass.row
            expected = setup.expected(a_pass.number, index)
            self.use(setup, batch, expected=expected, index=index, seconds=seconds, fate=fate)
        self.check_state(setup)
        if self.calm:
            a_pass.calm_down()

    def use(self, setup: Setup, batch: Any, *, expected: float, index: int, seconds: float, fate: str) -> None:
        assert type(batch) is dict
        assert list(batch) == ["x", "y", "i"]
        x, y = batch["x"], batch["y"]
        assert (x.dtype, x.shape, y.dtype, y.shape) == (torch.float32, (setup.size,), torch.int64, (3,))
        assert batch["i"] == index
        kernel = Kernel(expected)
        self.device.launch(lambda: None, seconds=seconds)
        self.device.launch(kernel, x, y)
        self.kernels.setdefault(self.stream, []).append(kernel)
        self.checks.append(kernel)
        if fate != "drop" and not setup.options["static"]:
            self.kept.append((batch if fate == "keep" else {"x": x[::2], "y": y[1:]}, expected, setup.live_bytes))

    def note_closed(self, a_pass: Pass) -> None:
        if a_pass.state == "open":
            a_pass.state = "closed"

    def check_state(self, setup: Setup) -> None:
        if setup.source == "stateful":
            assert setup.prefetcher.state_dict() == {"position": setup.position}

    def check_values(self) -> None:
        for kernel in self.checks:
            assert kernel.done
            assert [seen for seen in kernel.seen if seen] == [[kernel.expected]] * (1 + bool(kernel.seen[0]))
        self.checks.clear()
        self.kernels.clear()
        for batch, expected, _ in self.kept:
            assert batch["y"].unique().tolist() == [expected]
            assert batch["x"].unique().tolist() == [expected][: batch["x"].numel()]

    def forget_setups(self) -> None:
        """The last one and those with an iterator stay."""
        used = {id(p.setup) for p in self.passes}
        self.setups = [s for s in self.setups if id(s) in used or s is self.setups[-1]]

    # What holds at any time

    @invariant()
    def nobody_pulls_too_far(self) -> None:
        for a_pass in self.passes:
            assert a_pass.log.faults == []

    @invariant()
    def memory_is_bounded(self) -> None:
        if not hasattr(self, "device"):
            return
        pinned = device = 0
        for setup in self.setups:
            live = sum(p.setup is setup and p.state == "open" for p in self.passes)
            pinned += (live + 1) * SLOTS * setup.batch_bytes
            carried = setup.depth + 1 if setup.source == "one-shot" else 0
            device += (live * (setup.depth + 2) + carried) * setup.live_bytes
            limit = setup.options["max_pinned_bytes"]
            assert limit is None or setup.prefetcher.stats().pinned_bytes <= limit
        device += sum(nbytes for _, _, nbytes in self.kept)
        self.device.query(self.device.new_event())  # takes notice of what was freed
        assert self.device.allocated_bytes <= device
        assert self.device.pinned_bytes <= pinned

    def teardown(self) -> None:
        if not hasattr(self, "device"):
            return
        logs = [a_pass.log for a_pass in self.passes]
        self.passes.clear()
        self.setups.clear()
        assert [log.faults for log in logs if log.faults] == []
        assert join_ours(self.threads) == set()
        self.device.synchronize()
        self.check_values()
        self.kept.clear()
        self.device.synchronize()
        assert (self.device.pinned_bytes, self.device.allocated_bytes) == (0, 0)


def outcome(iterator: Iterator[Any]) -> tuple[Any, type[BaseException] | None]:
    """The batch, or the type of what was raised; its traceback, which holds the iterator, is not kept."""
    try:
        return next(iterator), None
    except (StopIteration, IteratorClosedError, KeyError) as error:
        return None, type(error)


@pytest.mark.timeout(400)  # shrinking a failure takes its time
def test_random_programs_see_what_the_plain_loop_sees() -> None:
    run_state_machine_as_test(Machine, settings=moderate)
