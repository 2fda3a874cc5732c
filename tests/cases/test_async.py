"""async for, on asyncio and on trio: contracts C1, C2, C5, C7, C8, C9 where the consumer is a task."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from torch.utils.data import DataLoader

from prefetchpipe import GPUPrefetcher, HostPrefetcher
from prefetchpipe.errors import IteratorClosedError
from prefetchpipe.pipeline.waking import loop_call
from prefetchpipe.testing import SimulatedDevice
from tests.support import TIMEOUT, Source, Surroundings, frame_names, join_ours, our_threads, settle, to_plain

Run = Callable[[Callable[[], Awaitable[Any]]], Any]


@pytest.fixture(params=["asyncio", "trio"])
def run(request: pytest.FixtureRequest) -> Run:
    return functools.partial(anyio.run, backend=request.param)


def filled(index: int) -> torch.Tensor:
    return torch.full((64,), float(index))


async def rows(count: int) -> AsyncIterator[torch.Tensor]:
    for index in range(count):
        await anyio.lowlevel.checkpoint()
        yield filled(index)


class Rows:
    """A source that can be iterated again and again, and says what it was asked."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.pulled = 0
        self.closed = 0
        self.tasks: set[Any] = set()
        self.threads: set[int] = set()

    async def __aiter__(self) -> AsyncIterator[torch.Tensor]:
        try:
            for index in range(self.count):
                self.pulled += 1
                self.threads.add(threading.get_ident())
                self.tasks.add(anyio.get_current_task().id)
                await anyio.lowlevel.checkpoint()
                yield filled(index)
        finally:
            self.closed += 1


def sources(count: int) -> dict[str, Any]:
    return {
        "list": [filled(index) for index in range(count)],
        "generator": (filled(index) for index in range(count)),
        "loader": DataLoader([filled(index) for index in range(count)], batch_size=None),
        "async generator": rows(count),
        "async iterable": Rows(count),
    }


KINDS = list(sources(0))


async def firsts(batches: Any, device: Any) -> list[float]:
    kept = [batch async for batch in batches]
    settle(device)
    return [float(to_plain(batch)[0]) for batch in kept]


# The same batches


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, 7])
def test_c1_all_batches_in_order(run: Run, device: Any, kind: str, count: int) -> None:
    async def main() -> None:
        prefetcher = GPUPrefetcher(sources(count)[kind], device)
        assert await firsts(prefetcher, device) == list(range(count))
        iterator = aiter(prefetcher)
        if kind in {"list", "loader", "async iterable"}:  # once more
            assert await firsts(iterator, device) == list(range(count))
        for _ in range(2):
            with pytest.raises(StopAsyncIteration):
                await anext(iterator)

    run(main)


def test_c1_values_that_are_no_tensors(run: Run) -> None:
    batches = [1, None, 0, [], {}, "text"]

    async def main() -> None:
        assert [batch async for batch in GPUPrefetcher(batches, "cpu")] == batches

    run(main)


@pytest.mark.parametrize("kind", ["generator", "async generator"])
def test_c1_a_one_shot_source_goes_on_where_a_pass_was_left(run: Run, device: Any, kind: str) -> None:
    async def main() -> None:
        prefetcher = GPUPrefetcher(sources(9)[kind], device)
        taken = [to_plain(await anext(aiter(prefetcher))) for _ in range(2)]
        async for batch in prefetcher:
            taken.append(batch)
            break
        settle(device)
        assert [float(batch[0]) for batch in taken] == [0, 1, 2] or device != "cpu"
        assert await firsts(prefetcher, device) == [3, 4, 5, 6, 7, 8]

    run(main)


def test_c1_two_passes_at_once(run: Run, device: Any) -> None:
    async def main() -> None:
        prefetcher = GPUPrefetcher(Rows(6), device)
        seen: list[list[float]] = []

        async def consume() -> None:
            seen.append(await firsts(prefetcher, device))

        async with anyio.create_task_group() as group:
            group.start_soon(consume)
            group.start_soon(consume)
        assert seen == [list(range(6))] * 2

    run(main)


def test_c1_two_tasks_over_one_iterator(run: Run) -> None:
    async def main() -> None:
        iterator = aiter(GPUPrefetcher(rows(40), "cpu"))
        seen: list[float] = []

        async def consume() -> None:
            seen.extend([float(batch[0]) async for batch in iterator])

        async with anyio.create_task_group() as group:
            group.start_soon(consume)
            group.start_soon(consume)
        assert sorted(seen) == list(range(40))

    run(main)


def test_c2_batches_are_kept_and_sources_may_reuse_their_buffer(run: Run, device: Any) -> None:
    async def one_buffer() -> AsyncIterator[torch.Tensor]:
        buffer = torch.zeros(64)
        for index in range(8):
            yield buffer.fill_(index)

    async def main() -> None:
        assert await firsts(GPUPrefetcher(one_buffer(), device, depth=3), device) == list(range(8))

    run(main)


def test_the_sync_form_says_what_to_use() -> None:
    with pytest.raises(TypeError, match="async for"):
        iter(GPUPrefetcher(rows(1), "cpu"))
    with pytest.raises(TypeError, match="loader must be an iterable"):
        GPUPrefetcher(3, "cpu")


# The loop is not held


def test_a_sync_loader_runs_in_a_thread_and_the_loop_keeps_its_beat(run: Run, device: Any) -> None:
    """The loader comes back only after the ticker has beaten fifty times: held, the loop would never get there."""
    beaten = threading.Event()
    threads = set()

    def slow() -> Iterator[torch.Tensor]:
        for index in range(3):
            threads.add(threading.get_ident())
            assert beaten.wait(TIMEOUT)
            beaten.clear()
            yield filled(index)

    async def ticker() -> None:
        beats = 0
        while True:
            await anyio.sleep(0.001)
            beats += 1
            if beats % 50 == 0:
                beaten.set()

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(ticker)
            assert await firsts(GPUPrefetcher(slow(), device), device) == [0, 1, 2]
            group.cancel_scope.cancel()
        assert threading.get_ident() not in threads
        assert len(threads) == 1

    run(main)


def test_waiting_starts_no_thread_per_batch(run: Run, device: Any) -> None:
    async def main() -> None:
        seen = set()
        async for _ in GPUPrefetcher(rows(50), device):
            seen |= {thread.ident for thread in our_threads()}
        assert len(seen) == 1

    run(main)


def test_a_coroutine_source_runs_in_one_task_of_the_loop(run: Run) -> None:
    source = Rows(6)

    async def main() -> None:
        assert len([batch async for batch in GPUPrefetcher(source, "cpu")]) == 6
        assert source.threads == {threading.get_ident()}
        assert len(source.tasks) == 1
        assert source.tasks != {anyio.get_current_task().id}

    run(main)


@pytest.mark.slow
def test_a_source_may_hold_scopes_and_task_groups_open_between_batches(run: Run) -> None:
    async def source() -> AsyncIterator[torch.Tensor]:
        with anyio.fail_after(TIMEOUT):
            send, receive = anyio.create_memory_object_stream[int](0)
            async with anyio.create_task_group() as group:

                async def produce() -> None:
                    async with send:
                        for index in range(6):
                            with contextlib.suppress(anyio.BrokenResourceError):  # the other side is closed early
                                await send.send(index)

                group.start_soon(produce)
                async with receive:
                    async for index in receive:
                        yield filled(index)

    class Again:
        def __aiter__(self) -> AsyncIterator[torch.Tensor]:
            return source()

    async def main() -> None:
        assert await firsts(GPUPrefetcher(source(), "cpu"), "cpu") == list(range(6))
        for make in (Again, source):
            async with GPUPrefetcher(make(), "cpu") as prefetcher:
                async for _ in prefetcher:
                    break
            async for _ in GPUPrefetcher(make(), "cpu"):
                break
            gc.collect()
            for _ in range(20):
                await anyio.lowlevel.checkpoint()

    run(main)


def test_a_ready_batch_is_a_checkpoint(run: Run) -> None:
    """Other tasks have their turn, although every batch is there already."""

    async def main() -> None:
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as group:
            group.start_soon(other)
            async for _ in GPUPrefetcher(list(range(20)), "cpu"):
                pass
            assert turns >= 10
            group.cancel_scope.cancel()

    run(main)


def test_fetch_caller_runs_the_loader_in_the_loops_own_thread(run: Run) -> None:
    source = Source(filled, 5)
    threads = set()

    def noting() -> Iterator[torch.Tensor]:
        for batch in source:
            threads.add(threading.get_ident())
            yield batch

    async def main() -> None:
        assert await firsts(GPUPrefetcher(noting(), "cpu", fetch="caller"), "cpu") == list(range(5))
        assert threads == {threading.get_ident()}

    run(main)


def test_c17_modes_of_the_task_hold_in_the_loader(run: Run) -> None:
    seen = set()

    def noting() -> Iterator[torch.Tensor]:
        for index in range(4):
            seen.add((torch.is_inference_mode_enabled(), threading.get_ident()))
            yield filled(index)

    async def main() -> None:
        with torch.inference_mode():
            async for _ in GPUPrefetcher(noting(), "cpu"):
                pass
        ((inference, thread),) = seen
        assert inference
        assert thread != threading.get_ident()

    run(main)


def test_checked_compares_off_the_loop(run: Run) -> None:
    device = SimulatedDevice(bandwidth=1e6)

    async def main() -> None:
        assert await firsts(GPUPrefetcher(rows(5), device, checked=True), device) == list(range(5))

    run(main)


def test_static_batches(run: Run, sim: Any) -> None:
    async def main() -> None:
        pointers = set()
        async for batch in GPUPrefetcher(rows(5), sim, static=True):
            pointers.add(batch.data_ptr())
        assert len(pointers) == 1

    run(main)


# Laziness


@pytest.mark.parametrize("depth", [1, 3])
def test_c8_at_most_depth_and_one_ahead(run: Run, device: Any, depth: int) -> None:
    source = Rows(30)

    async def main() -> None:
        prefetcher = GPUPrefetcher(source, device, depth=depth)
        iterator = aiter(prefetcher)
        assert source.pulled == 0
        for taken in range(1, 8):
            await anext(iterator)
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            assert source.pulled <= taken + depth
        await prefetcher.aclose()

    run(main)


# Cancellation


def test_a_timeout_loses_no_batch(run: Run, device: Any) -> None:
    may_go_on = threading.Event()

    def slow() -> Iterator[torch.Tensor]:
        yield filled(0)
        assert may_go_on.wait(TIMEOUT)
        yield filled(1)
        yield filled(2)

    async def main() -> None:
        iterator = aiter(GPUPrefetcher(slow(), device))
        kept = [await anext(iterator)]
        for _ in range(3):
            with pytest.raises(TimeoutError):
                with anyio.fail_after(0.01):
                    await anext(iterator)
        may_go_on.set()
        kept += [batch async for batch in iterator]
        settle(device)
        assert [float(batch[0]) for batch in kept] == [0, 1, 2]

    run(main)


def test_a_timeout_does_not_reach_into_the_source(run: Run, device: Any) -> None:
    async def main() -> None:
        may_go_on = anyio.Event()

        async def slow() -> AsyncIterator[torch.Tensor]:
            yield filled(0)
            await may_go_on.wait()
            yield filled(1)
            yield filled(2)

        iterator = aiter(GPUPrefetcher(slow(), device))
        kept = [await anext(iterator)]
        for _ in range(3):
            with anyio.move_on_after(0.01) as scope:
                await anext(iterator)
            assert scope.cancelled_caught
        may_go_on.set()
        kept += [batch async for batch in iterator]
        settle(device)
        assert [float(batch[0]) for batch in kept] == [0, 1, 2]

    run(main)


@pytest.mark.parametrize("host", [False, True], ids=["to the device", "to the host"])
def test_cancelled_in_the_moment_in_which_the_batch_arrives(run: Run, host: bool) -> None:
    """The wake-up is under way to the task when its scope is cancelled: it must not have taken the batch yet."""
    may_go_on, arrived = threading.Event(), threading.Event()

    def slow() -> Iterator[torch.Tensor]:
        assert may_go_on.wait(TIMEOUT)
        for index in range(5):
            yield filled(index)

    async def main() -> None:
        iterator: Any = aiter(HostPrefetcher(slow(), device="cpu") if host else GPUPrefetcher(slow(), "cpu"))
        got: list[float] = []
        scope = anyio.CancelScope()

        async def take() -> None:
            with scope:
                got.append(float((await anext(iterator))[0]))

        async with anyio.create_task_group() as group:
            group.start_soon(take)
            queue = None
            while queue is None or not queue._wakers:  # until it waits
                await anyio.lowlevel.checkpoint()
                inner = iterator._relay if host else iterator._producer
                queue = inner and (inner.results if host else inner._ready)
            queue._wakers.append(arrived.set)  # behind the one of the task
            may_go_on.set()
            assert arrived.wait(TIMEOUT)  # holds the loop: the wake-up queues up, and behind it the cancellation
            queue._wakers.remove(arrived.set)
            loop_call()(scope.cancel)
        got += [float(batch[0]) async for batch in iterator]
        assert got == [0, 1, 2, 3, 4]

    run(main)


def test_a_cancelled_scope_takes_nothing(run: Run, device: Any) -> None:
    async def main() -> None:
        iterator = aiter(GPUPrefetcher(rows(4), device))
        kept = [await anext(iterator)]
        with anyio.CancelScope() as scope:
            scope.cancel()
            await anext(iterator)
        assert scope.cancelled_caught
        kept += [batch async for batch in iterator]
        settle(device)
        assert [float(batch[0]) for batch in kept] == [0, 1, 2, 3]

    run(main)


def test_a_native_cancellation_loses_no_batch() -> None:
    may_go_on = threading.Event()

    def slow() -> Iterator[torch.Tensor]:
        yield filled(0)
        assert may_go_on.wait(TIMEOUT)
        yield filled(1)

    async def main() -> None:
        iterator = aiter(GPUPrefetcher(slow(), "cpu"))
        assert float((await anext(iterator))[0]) == 0
        task = asyncio.ensure_future(anext(iterator))
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_go_on.set()
        assert [float(batch[0]) async for batch in iterator] == [1]

    asyncio.run(main())


# Errors


class OddError(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(one, two)


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("error", [KeyError("row 2"), OddError("a", "b")], ids=["KeyError", "two arguments"])
def test_c7_one_error_after_the_batches_before_it(run: Run, device: Any, kind: str, error: Exception) -> None:
    async def the_sources_own_frame() -> AsyncIterator[torch.Tensor]:
        yield filled(0)
        yield filled(1)
        raise error

    def the_loaders_own_frame() -> Iterator[torch.Tensor]:
        yield filled(0)
        yield filled(1)
        raise error

    async def main() -> None:
        source = the_sources_own_frame() if kind == "async" else the_loaders_own_frame()
        iterator = aiter(GPUPrefetcher(source, device))
        await anext(iterator)
        await anext(iterator)
        with pytest.raises(type(error)) as caught:
            await anext(iterator)
        assert caught.value is error
        assert {"the_sources_own_frame", "the_loaders_own_frame"} & set(frame_names(caught.tb))
        for _ in range(2):
            with pytest.raises(StopAsyncIteration):
                await anext(iterator)

    run(main)


def test_c7_an_error_of_iter_and_of_aiter(run: Run) -> None:
    class Broken:
        def __iter__(self) -> Any:
            raise ValueError("no iterator")

    class AsyncBroken:
        def __aiter__(self) -> Any:
            raise ValueError("no iterator")

    async def main() -> None:
        for broken in (Broken(), AsyncBroken()):
            with pytest.raises(ValueError, match="no iterator"):
                await anext(aiter(GPUPrefetcher(broken, "cpu")))

    run(main)


@pytest.mark.parametrize("error", [StopIteration("odd"), StopAsyncIteration("odd")], ids=["sync", "async"])
def test_c7_an_end_out_of_the_transform_is_no_end(run: Run, error: Exception) -> None:
    def transform(batch: Any) -> Any:
        raise error

    async def main() -> None:
        with pytest.raises(RuntimeError, match=r"Stop(Async)?Iteration|raised StopIteration"):
            await anext(aiter(GPUPrefetcher([filled(0)], "cpu", transform=transform)))

    run(main)


def test_c7_a_source_that_raises_the_class_of_a_cancellation() -> None:
    async def odd() -> AsyncIterator[torch.Tensor]:
        yield filled(0)
        raise asyncio.CancelledError("my own")

    async def main() -> None:
        iterator = aiter(GPUPrefetcher(odd(), "cpu"))
        await anext(iterator)
        with pytest.raises(asyncio.CancelledError, match="my own"):
            await anext(iterator)

    asyncio.run(main())


def test_c7_an_error_in_a_task_group_stays_one_error(run: Run) -> None:
    async def bad() -> AsyncIterator[torch.Tensor]:
        yield filled(0)
        raise KeyError("row 1")

    async def main() -> None:
        with pytest.raises(ExceptionGroup) as caught:
            async with anyio.create_task_group():
                async for _ in GPUPrefetcher(bad(), "cpu"):
                    pass
        assert [type(error) for error in caught.value.exceptions] == [KeyError]  # the user's own group, nothing of ours

    run(main)


# Leaving


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "kind"),
    [
        *((way, "async iterable") for way in ("break", "aclosing", "async with", "with", "error", "cancel", "del")),
        *((way, "list") for way in ("break", "aclosing", "cancel")),
        *((way, "async generator") for way in ("break", "async with")),
    ],
)
def test_c9_nothing_stays_behind(run: Run, device: Any, way: str, kind: str) -> None:
    before = Surroundings(device)

    async def leave(prefetcher: Any) -> None:
        if way == "aclosing":
            async with aclosing(aiter(prefetcher)) as iterator:
                async for _ in iterator:
                    return
        if way == "async with":
            async with prefetcher:
                async for _ in prefetcher:
                    return
        if way == "with":
            with prefetcher:
                async for _ in prefetcher:
                    return
        if way == "error":
            with contextlib.suppress(ZeroDivisionError):
                async for _ in prefetcher:
                    raise ZeroDivisionError
        if way == "cancel":
            with anyio.CancelScope() as scope:
                async for _ in prefetcher:
                    scope.cancel()
            return
        if way == "del":
            iterator = aiter(prefetcher)
            await anext(iterator)
            del iterator
            return
        async for _ in prefetcher:
            return

    async def main() -> None:
        for _ in range(2):
            source = sources(20)[kind]
            prefetcher = GPUPrefetcher(source, device)
            await leave(prefetcher)
            del prefetcher, source
        await anyio.to_thread.run_sync(join_ours)
        for _ in range(20):
            await anyio.lowlevel.checkpoint()

    run(main)
    gc.collect()
    before.threads |= {thread for thread in threading.enumerate() if thread.name.startswith(("AnyIO", "Trio"))}
    before.assert_restored()


def test_c9_a_source_of_our_own_making_is_closed_with_its_pass(run: Run, device: Any) -> None:
    source = Rows(20)

    async def main() -> None:
        async with aclosing(aiter(GPUPrefetcher(source, device))) as iterator:
            async for _ in iterator:
                break
        assert source.closed == 1
        async with GPUPrefetcher(source, device) as prefetcher:
            async for _ in prefetcher:
                break
        assert source.closed == 2

    run(main)


@pytest.mark.parametrize("way", ["break", "aclosing"])
def test_c9_leaving_a_source_that_gives_nothing_more(run: Run, way: str) -> None:
    async def main() -> None:
        asked_again = anyio.Event()

        class Silent:
            async def __aiter__(self) -> AsyncIterator[torch.Tensor]:
                yield filled(0)
                asked_again.set()
                await anyio.sleep_forever()

        if way == "break":
            async for _ in GPUPrefetcher(Silent(), "cpu"):
                await asked_again.wait()
                break
        else:
            async with aclosing(aiter(GPUPrefetcher(Silent(), "cpu"))) as iterator:
                await anext(iterator)
                await asked_again.wait()
        assert await anyio.to_thread.run_sync(join_ours) == set()

    run(main)


@pytest.mark.parametrize("way", ["break", "async with", "twice"])
def test_c9_a_source_may_await_while_it_cleans_up(way: str) -> None:
    """On asyncio, as a plain loop lets it; its pull is under way when the pass is left. (On trio it needs a shield.)"""
    steps: list[str] = []

    async def main() -> None:
        waits, ended = asyncio.Event(), asyncio.Event()
        pulled: list[Any] = []

        async def source() -> AsyncIterator[torch.Tensor]:
            try:
                for index in range(2):
                    yield filled(index)
                waits.set()
                await anyio.sleep_forever()
            finally:
                for step in ("first", "second"):
                    if way == "twice":
                        pulled[0].cancel()
                    for _ in range(3):
                        await asyncio.sleep(0)
                    steps.append(step)
                ended.set()

        prefetcher = GPUPrefetcher(source(), "cpu")
        if way == "break":
            async for _ in prefetcher:
                await waits.wait()
                break
            del prefetcher
            gc.collect()
        else:
            async with prefetcher:
                async for _ in prefetcher:
                    await waits.wait()
                    break
                pulled.append(prefetcher._shared.async_source)
        with anyio.fail_after(TIMEOUT):
            await ended.wait()

    anyio.run(main)
    assert steps == ["first", "second"]
    assert join_ours() == set()


def test_c9_break_waits_for_no_loader(run: Run) -> None:
    """The producer is inside the loader, which does not come back before the loop goes on."""
    entered, may_go_on = threading.Event(), threading.Event()

    def slow() -> Iterator[torch.Tensor]:
        yield filled(0)
        entered.set()
        assert may_go_on.wait(TIMEOUT)
        yield filled(1)

    async def main() -> None:
        async for _ in GPUPrefetcher(slow(), "cpu"):
            assert await anyio.to_thread.run_sync(entered.wait, TIMEOUT)
            break
        may_go_on.set()

    run(main)
    assert join_ours() == set()


def test_c9_closed_while_a_task_waits(run: Run) -> None:
    may_go_on = threading.Event()

    def slow() -> Iterator[torch.Tensor]:
        assert may_go_on.wait(TIMEOUT)
        yield filled(0)

    async def main() -> None:
        prefetcher = GPUPrefetcher(slow(), "cpu")
        iterator = aiter(prefetcher)
        raised = []

        async def take() -> None:
            with pytest.raises(IteratorClosedError):
                await anext(iterator)
            raised.append(True)
            may_go_on.set()

        async with anyio.create_task_group() as group:
            group.start_soon(take)
            for _ in range(10):
                await anyio.lowlevel.checkpoint()
            await iterator.aclose()
        assert raised == [True]
        with pytest.raises(IteratorClosedError):
            await anext(iterator)
        await iterator.aclose()

    run(main)


def test_c9_a_loop_that_ends_ends_the_pass(run: Run) -> None:
    """Nobody left the pass: its iterator is still held."""
    held = []

    async def never() -> AsyncIterator[torch.Tensor]:
        yield filled(0)
        await anyio.sleep_forever()

    async def main() -> None:
        iterator = aiter(GPUPrefetcher(never(), "cpu"))
        held.append(iterator)
        await anext(iterator)

    run(main)
    held.clear()
    gc.collect()
    assert join_ours() == set()


# Back to the host


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, 7])
def test_back_to_the_host_in_order(run: Run, device: Any, kind: str, count: int) -> None:
    async def main() -> None:
        prefetcher = HostPrefetcher(sources(count)[kind], device=device)
        assert await firsts(prefetcher, "cpu") == list(range(count))

    run(main)


def test_both_directions_in_one_loop(run: Run, device: Any) -> None:
    async def main() -> None:
        outputs = (batch async for batch in GPUPrefetcher(rows(9), device))
        async with HostPrefetcher(outputs, device=device) as back:
            assert await firsts(back, "cpu") == list(range(9))

    run(main)


@pytest.mark.parametrize("direction", [GPUPrefetcher, HostPrefetcher])
@pytest.mark.parametrize("what", ["prefetcher", "iterator"])
@pytest.mark.parametrize("own", [True, False], ids=["iterable", "generator"])
def test_c9_whoever_waits_while_it_is_closed_hears_of_it(run: Run, direction: Any, what: str, own: bool) -> None:
    async def live() -> AsyncIterator[torch.Tensor]:
        yield filled(0)
        await anyio.sleep_forever()

    class Live:
        def __aiter__(self) -> AsyncIterator[torch.Tensor]:
            return live()

    raised = []

    async def main() -> None:
        prefetcher = direction(Live() if own else live(), device="cpu")
        iterator = aiter(prefetcher)
        assert float((await anext(iterator))[0]) == 0

        async def wait() -> None:
            with pytest.raises(IteratorClosedError):
                await anext(iterator)
            raised.append(True)

        with anyio.fail_after(TIMEOUT):
            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                await (prefetcher if what == "prefetcher" else iterator).aclose()
            with contextlib.suppress(IteratorClosedError, StopAsyncIteration):
                await anext(iterator)
            await prefetcher.aclose()

    run(main)
    assert raised == [True]
    assert join_ours() == set()


@pytest.mark.parametrize("depth", [1, 3])
def test_a_live_source_that_waits_holds_no_batch_back(run: Run, device: Any, depth: int) -> None:
    """Its next batch comes when the one before has been answered: nothing ahead of that is there to be pulled."""

    async def main() -> list[float]:
        send, receive = anyio.create_memory_object_stream[torch.Tensor](1)
        got = []

        async def source() -> AsyncIterator[Any]:
            async with receive:
                async for batch in GPUPrefetcher(receive, device):
                    yield batch

        with anyio.fail_after(TIMEOUT):
            await send.send(filled(0))
            async with send, HostPrefetcher(source(), depth, device=device) as results:
                async for out in results:
                    got.append(float(out[0]))
                    if len(got) == 5:
                        await send.aclose()
                    else:
                        await send.send(filled(len(got)))
        return got

    assert run(main) == [0, 1, 2, 3, 4]
    assert join_ours() == set()


def test_waiting_for_a_copy_back_does_not_hold_the_loop(run: Run) -> None:
    """The copy's event passes only after the ticker has beaten fifty times."""
    beaten = threading.Event()

    class Late(SimulatedDevice):
        def synchronize(self, event: Any = None) -> None:
            assert beaten.wait(TIMEOUT)
            super().synchronize(event)

    device = Late()
    made = device.empty(torch.Size((8,)), (1,), torch.float32).fill_(3)

    async def ticker() -> None:
        for _ in range(50):
            await anyio.sleep(0.001)
        beaten.set()

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(ticker)
            assert [batch.tolist() async for batch in HostPrefetcher([made], device=device)] == [[3.0] * 8]

    run(main)


def test_a_timeout_on_the_way_back_loses_no_batch(run: Run, device: Any) -> None:
    may_go_on = threading.Event()

    def slow() -> Iterator[torch.Tensor]:
        yield filled(0)
        assert may_go_on.wait(TIMEOUT)
        yield filled(1)

    async def main() -> None:
        iterator = aiter(HostPrefetcher(slow(), device=device))
        with pytest.raises(TimeoutError):
            with anyio.fail_after(0.01):
                await anext(iterator)
        may_go_on.set()
        assert [float(batch[0]) async for batch in iterator] == [0, 1]

    run(main)


@pytest.mark.parametrize("kind", ["generator", "async generator"])
def test_a_one_shot_source_goes_on_on_the_way_back(run: Run, device: Any, kind: str) -> None:
    async def main() -> None:
        prefetcher = HostPrefetcher(sources(7)[kind], device=device)
        async for batch in prefetcher:
            assert float(batch[0]) == 0
            break
        assert await firsts(prefetcher, "cpu") == [1, 2, 3, 4, 5, 6]
        await prefetcher.aclose()

    run(main)


def test_who_waits_on_the_way_back_hears_that_the_pass_was_closed(run: Run) -> None:
    class Silent:
        async def __aiter__(self) -> AsyncIterator[torch.Tensor]:
            yield filled(0)
            await anyio.sleep_forever()

    async def main() -> None:
        iterator: Any = aiter(HostPrefetcher(Silent(), device="cpu"))
        await anext(iterator)

        async def wait() -> None:
            with pytest.raises(IteratorClosedError, match="this pass was closed") as caught:
                await anext(iterator)
            assert caught.type is IteratorClosedError

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            relay = iterator._relay
            bring_back = relay._on_leave
            relay._on_leave = lambda: (bring_back(), relay.join())  # the thread has all the time to say something else
            relay.leave()

    run(main)


def test_an_error_on_the_way_back(run: Run, device: Any) -> None:
    async def bad() -> AsyncIterator[torch.Tensor]:
        yield filled(0)
        raise KeyError("row 1")

    async def main() -> None:
        iterator = aiter(HostPrefetcher(bad(), device=device))
        assert float((await anext(iterator))[0]) == 0
        with pytest.raises(KeyError, match="row 1"):
            await anext(iterator)
        with pytest.raises(StopAsyncIteration):
            await anext(iterator)

    run(main)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["break", "aclosing", "async with"])
@pytest.mark.parametrize("kind", ["list", "async iterable"])
def test_nothing_stays_behind_on_the_way_back(run: Run, device: Any, way: str, kind: str) -> None:
    before = Surroundings(device)

    async def main() -> None:
        prefetcher = HostPrefetcher(sources(20)[kind], device=device)
        if way == "aclosing":
            async with aclosing(aiter(prefetcher)) as iterator:
                await anext(iterator)
            with pytest.raises(IteratorClosedError):
                await anext(iterator)
        elif way == "async with":
            async with prefetcher:
                await anext(aiter(prefetcher))
        else:
            async for _ in prefetcher:
                break
        await anyio.to_thread.run_sync(join_ours)

    run(main)
    gc.collect()
    before.threads |= {thread for thread in threading.enumerate() if thread.name.startswith(("AnyIO", "Trio"))}
    before.assert_restored()
