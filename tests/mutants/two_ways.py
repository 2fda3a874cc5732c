"""Mutants of the way back to the host and of the asynchronous form."""

from __future__ import annotations

from tests.mutants.mutants import Mutant

__all__ = ["MUTANTS"]

OFFLOADING = "pipeline/offloading.py"
LANDING = "memory/landing.py"
AIO = "aio.py"
SOURCE = "pipeline/asyncsource.py"
WAKING = "pipeline/waking.py"


def _back(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/test_offload_ordering.py::{name}" for name in names)


def _async(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/cases/test_async.py::{name}" for name in names)


MUTANTS = (
    # Contract 3: ordered by events
    Mutant(
        "the copy back does not wait for the producer's stream",
        OFFLOADING,
        "device.wait(device.d2h_stream, slot.produced)",
        "pass",
        3,
        _back("test_c3_the_copy_waits_for_what_the_producers_stream_has_queued"),
    ),
    Mutant(
        "the event that the copy back waits for is not recorded",
        OFFLOADING,
        "device.record(slot.produced, stream)",
        "pass",
        3,
        _back("test_c3_the_copy_waits_for_what_the_producers_stream_has_queued"),
    ),
    Mutant(
        "the host does not wait for the copy back",
        OFFLOADING,
        "self._device.synchronize(job.slot.landed)",
        "pass",
        3,
        _back("test_c3_the_host_reads_when_the_copy_has_passed"),
    ),
    Mutant(
        "the event that the host waits for is not recorded",
        OFFLOADING,
        "device.record(slot.landed, device.d2h_stream)",
        "pass",
        3,
        _back("test_c3_the_host_reads_when_the_copy_has_passed"),
    ),
    Mutant(
        "an asynchronous source is taken to have run on the stream of our thread",
        OFFLOADING,
        "if self.stream_of is None else",
        "if True else",
        3,
        _back("test_c3_an_asynchronous_source_is_waited_for_on_its_own_stream"),
    ),
    # Contract 5: the source may free and overwrite
    Mutant(
        "batches are gathered on the side stream",
        OFFLOADING,
        "device.fill(views, layout.sources(leaves))",
        "device.on_stream(device.d2h_stream).__enter__(); device.wait(device.d2h_stream, slot.produced); "
        "device.fill(views, layout.sources(leaves)); device.on_stream(stream).__enter__()",
        5,
        _back("test_c5_the_source_overwrites_its_tensor_at_once"),
    ),
    Mutant(
        "the producer's stream waits for the link",
        OFFLOADING,
        "self._counters.copies += 1",
        "self._counters.copies += 1; device.wait(stream, slot.landed)",
        5,
        _back("test_c5_the_producers_stream_does_not_wait_for_the_link"),
    ),
    # Contract 6: slots and slabs
    Mutant(
        "a slab is gathered into again while it is copied from",
        OFFLOADING,
        "self._counters.copies += 1",
        "self._counters.copies += 1; self.slots.landed(slot)",
        6,
        _back("test_c5_the_source_frees_its_tensor_at_once"),
    ),
    Mutant(
        "closing frees slots under a copy",
        OFFLOADING,
        "self._device.synchronize(slot.landed)  # contract 6",
        "pass  # contract 6",
        6,
        _back("test_c6_close_waits_for_the_copies_under_way"),
    ),
    # Contract 2: owned by the consumer
    Mutant(
        "a slot that the consumer took along is used again",
        OFFLOADING,
        "elif job.lent is None:\n            self.slots.release(slot)",
        "else:\n            self.slots.release(slot)",
        2,
        _back("test_c2_a_batch_taken_along_is_not_written_again"),
    ),
    Mutant(
        "any number of slots is lent, as if a loop held one batch at a time",
        LANDING,
        "weakref.finalize(buffer, self._come_back, slot).atexit = False",
        "self._come_back(slot)",
        2,
        _back("test_c2_a_batch_in_use_is_not_written_while_the_loop_names_it"),
    ),
    Mutant(
        "small leaves are views of the slot",
        OFFLOADING,
        "piece = piece.clone()",
        "pass",
        2,
        _back("test_c2_a_small_leaf_is_not_written_again"),
    ),
    Mutant(
        "a host tensor of the source's is handed on as it is",
        OFFLOADING,
        "arrived, memory = layout.allocate(cpu.empty, cpu.alloc)",
        "arrived, memory = list(sources), []; continue_ = layout",
        2,
        ("tests/cases/test_offload.py::test_c2_what_a_host_leaf_holds_is_copied[cpu]",),
    ),
    Mutant(
        "checked=True does not wait for the copy that it checks off the loop",
        "pipeline/transfer.py",
        "self._device.synchronize(ready)",
        "pass",
        3,
        _async("test_checked_compares_off_the_loop[asyncio]"),
    ),
    # Contract 1 where the consumer is a task
    Mutant(
        "a batch is taken before the last await",
        AIO,
        "ticket = await self._take(producer)",
        "ticket = await self._take(producer)\n            await anyio.lowlevel.checkpoint_if_cancelled()",
        1,
        _async("test_cancelled_in_the_moment_in_which_the_batch_arrives[asyncio-to the device]"),
    ),
    Mutant(
        "a batch on the host is taken before the last await",
        "offload_aio.py",
        "self._is_asked = False\n            if not ticket.final",
        "self._is_asked = False\n            await anyio.lowlevel.checkpoint_if_cancelled()\n"
        "            if not ticket.final",
        1,
        _async("test_cancelled_in_the_moment_in_which_the_batch_arrives[trio-to the host]"),
    ),
    Mutant(
        "the task is not woken",
        WAKING,
        "call(event.set)",
        "pass",
        1,
        _async("test_a_timeout_loses_no_batch[asyncio-cpu]"),
    ),
    Mutant(
        "leaving a pass ends the user's own source",
        SOURCE,
        "if self.own:\n            self.cancel()",
        "if True:\n            self.cancel()",
        1,
        _async("test_c1_a_one_shot_source_goes_on_where_a_pass_was_left[asyncio-cpu-async generator]"),
    ),
    # Contracts 7 and 9
    Mutant(
        "StopAsyncIteration out of a transform ends the loop",
        AIO,
        "if isinstance(error, StopAsyncIteration):",
        "if False:",
        7,
        _async("test_c7_an_end_out_of_the_transform_is_no_end[asyncio-async]"),
    ),
    Mutant(
        "break waits for the loader",
        AIO,
        "leave=producer.detach_soon)",
        "leave=lambda: producer.source is not None and producer._thread.join())",
        9,
        _async("test_c9_break_waits_for_no_loader[asyncio]"),
    ),
    Mutant(
        "leaving does not bring our thread back out of the source",
        AIO,
        "producer.on_leave = self._source.leave",
        "pass",
        9,
        _async("test_c9_leaving_a_source_that_gives_nothing_more[asyncio-break]"),
    ),
    Mutant(
        "a source of our own making is not closed",
        SOURCE,
        "await close()",
        "pass",
        9,
        _async("test_c9_a_source_of_our_own_making_is_closed_with_its_pass[asyncio-cpu]"),
    ),
    Mutant(
        "a source's cleaning up is cancelled a second time",
        SOURCE,
        "        if self._is_ending:\n            return",
        "        if False:\n            return",
        9,
        _async("test_c9_a_source_may_await_while_it_cleans_up[twice]"),
    ),
    Mutant(
        "a live source holds back what is done",
        OFFLOADING,
        "_PATIENCE_SECONDS if self._pending else None",
        "None",
        8,
        _async("test_a_live_source_that_waits_holds_no_batch_back[asyncio-cpu-1]"),
    ),
    Mutant(
        "the borrowed slot goes back before there is a next batch",
        OFFLOADING,
        "if self._borrowed is not None and (self._pending or self._given_back):",
        "if self._borrowed is not None:",
        2,
        ("tests/cases/test_offload.py::test_c2_the_borrowed_batch_before_an_error_stays[sim-4]",),
    ),
    Mutant(
        "the borrowed slot goes back with the pass",
        OFFLOADING,
        "        self._leave_borrowed()\n",
        "        self._give_back_borrowed()\n",
        2,
        ("tests/cases/test_offload.py::test_c2_the_borrowed_batch_at_which_a_loop_is_left_stays[sim-small-break]",),
    ),
    Mutant(
        "pinned memory that was refused for the sake of another pass is never asked for again",
        "memory/landing.py",
        " and self._memory.held_bytes >= self._held",
        "",
        15,
        ("tests/cases/test_offload.py::test_c15_pinned_memory_is_used_again_when_another_pass_ends[sim-True]",),
    ),
    Mutant(
        "a leaf that fails keeps the slot of those beside it",
        OFFLOADING,
        "                self._retire(job.slot)\n            raise",
        "                pass\n            raise",
        14,
        ("tests/cases/test_offload.py::test_c14_a_leaf_that_fails_beside_a_packed_one_costs_no_slot[sim]",),
    ),
)
