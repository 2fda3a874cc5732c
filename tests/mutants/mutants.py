"""Our own code with one wait, one event check, one reference or one step of an order removed.

Each must make the tests that it names fail. A mutant that survives shows a missing test, or a simulated device that is
kinder than a real one.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MUTANTS", "Mutant"]

_ORDERING = "tests/unit/test_ordering.py::"
_MEMORY = "tests/cases/test_memory.py::"
_INTEGRATIONS = "tests/integrations/test_ordering.py::"
_STATS = "tests/unit/test_stats.py::"
_TRACE = "tests/unit/test_trace.py::"
_WORKERS = "tests/unit/test_worker_slots.py::"
_QUEUES = "tests/unit/test_queues.py::"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit of one file of the package."""

    name: str
    file: str
    """Below prefetchpipe/."""
    find: str
    """Occurs exactly once in the file."""
    replace: str
    contract: int
    tests: tuple[str, ...]
    """Node ids; at least one of them has to fail."""


def _ordering(*names: str) -> tuple[str, ...]:
    return tuple(_ORDERING + name for name in names)


def _workers(*names: str) -> tuple[str, ...]:
    return tuple(_WORKERS + name for name in names)


TRANSFER = "pipeline/transfer.py"
PRODUCER = "pipeline/producer.py"
FETCHING = "pipeline/fetching.py"
LEAVING = "pipeline/leaving.py"
STAGING = "pipeline/staging.py"
RING = "memory/ring.py"
PREFETCHER = "prefetcher.py"
SHARED = "pipeline/shared.py"
COLLATE = "pipeline/collate.py"
WORKERS = "pipeline/workers.py"
QUEUES = "pipeline/queues.py"
STAND_IN = "integrations/_standin.py"

TOGETHER = "tables/together.py"
KERNELS = "tables/kernelmover.py"
MOVERS = "tables/movers.py"
AHEAD = "tables/ahead.py"


def _tables(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/test_tables_ordering.py::{name}" for name in names)


MUTANTS = (
    # Contract 3: ordered by events
    Mutant(
        "the consumer's stream does not wait for the ready event",
        TRANSFER,
        "self._device.wait(stream, ticket.ready)",
        "pass",
        3,
        _ordering("test_c3_the_consumers_stream_waits_for_the_copy"),
    ),
    Mutant(
        "the ready event is not recorded",
        TRANSFER,
        "self._device.record(ticket.ready, stream)  # contract 3: what",
        "pass  # contract 3: what",
        3,
        _ordering("test_c3_the_stream_of_the_moment_waits"),
    ),
    Mutant(
        "memory that is on the device already is not waited for",
        TRANSFER,
        "uses += (leaves[i] for i in plan.resident)",
        "pass",
        3,
        _ordering("test_c3_a_batch_made_on_the_device_by_the_loader_is_waited_for"),
    ),
    Mutant(
        "the copy stream does not wait for what the caller had queued before the pass",
        PRODUCER,
        "self._device.wait(self._device.copy_stream, event)",
        "pass",
        3,
        _ordering("test_c3_a_transform_sees_what_the_callers_stream_wrote_before_the_pass"),
    ),
    Mutant(
        "the transform does not wait for what the loader queued on the caller's stream",
        TRANSFER,
        "self._device.wait(self._device.copy_stream, event)",
        "pass",
        3,
        _ordering("test_c3_a_transform_sees_what_the_loader_wrote_on_the_callers_stream"),
    ),
    Mutant(
        "the transform is not ordered after the copies",
        TRANSFER,
        "self._device.before_transform()",
        "pass",
        3,
        _ordering("test_c3_a_transform_starts_after_the_copy"),
    ),
    Mutant(
        "static buffers are filled at once",
        "pipeline/static.py",
        "self._device.fill(targets, sources)",
        "torch._foreach_copy_(targets, sources)",
        3,
        _ordering("test_c3_static_buffers_are_filled_in_the_order_of_the_stream"),
    ),
    Mutant(
        "checked=True does not wait for the copy that it checks",
        TRANSFER,
        "self._device.synchronize(ticket.ready)",
        "pass",
        3,
        _ordering("test_c3_checked_compares_after_the_copy"),
    ),
    Mutant(
        "checked=True does not wait for the copy that it checks before a transform",
        TRANSFER,
        "self._device.synchronize(event)\n        _verify(check)",
        "_verify(check)",
        3,
        _ordering("test_c3_checked_compares_after_the_copy"),
    ),
    Mutant(
        "a batch that a framework has held back is not waited for on the stream of the moment",
        STAND_IN,
        "device.wait(stream, delivered)",
        "pass",
        3,
        (_INTEGRATIONS + "test_c3_the_stream_of_the_moment_waits",),
    ),
    Mutant(
        "the memory of a batch that a framework has held back is not kept for the stream of the moment",
        STAND_IN,
        "device.record_use(tensor, stream)",
        "pass",
        4,
        (_INTEGRATIONS + "test_c4_memory_is_kept_for_the_stream_of_the_moment",),
    ),
    # Contract 4: device memory
    Mutant(
        "use on the consumer's stream is not recorded when sending",
        TRANSFER,
        "self._record_uses(ticket, self.consumer_stream)",
        "ticket.used_on = self.consumer_stream",
        4,
        _ordering("test_c4_memory_is_kept_for_the_consumers_late_kernel"),
    ),
    Mutant(
        "use on another stream is not recorded at delivery",
        TRANSFER,
        "if stream is not ticket.used_on:",
        "if False:",
        4,
        _ordering("test_c4_memory_is_kept_for_the_stream_that_took_the_batch"),
    ),
    Mutant(
        "use is recorded for the last stream only if it is another",
        TRANSFER,
        "self._device.record_use(tensor, stream)",
        "pass",
        4,
        _ordering("test_c4_memory_is_kept_for_the_consumers_late_kernel"),
    ),
    Mutant(
        "the memory of directly copied leaves is not recorded",
        TRANSFER,
        "uses.append(out[i])",
        "pass",
        4,
        _ordering("test_c4_memory_is_kept_for_the_consumers_late_kernel"),
    ),
    Mutant(
        "memory that the transform allocated is not recorded",
        TRANSFER,
        "ticket.uses = self._distinct(find_tensors(batch))",
        "pass",
        4,
        _ordering("test_c4_memory_that_a_transform_allocates_is_kept_too"),
    ),
    Mutant(
        "tensors are forgotten before their use is recorded",
        TRANSFER,
        "        ticket.uses = uses\n",
        "        ticket.uses = uses[:0]\n",
        4,
        _ordering("test_c4_memory_is_kept_for_the_consumers_late_kernel"),
    ),
    Mutant(
        "the host does not wait for the device to be done with an earlier batch",
        FETCHING,
        "self._device.synchronize(done)",
        "pass",
        4,
        _ordering("test_c4_the_host_runs_ahead_of_the_device_by_depth_batches_only"),
    ),
    Mutant(
        "the done event is not recorded",
        PRODUCER,
        "self._device.record(event, stream)\n        return event",
        "return event",
        4,
        _ordering("test_c4_the_host_runs_ahead_of_the_device_by_depth_batches_only"),
    ),
    Mutant(
        "a credit forgets its event",
        PREFETCHER,
        "producer.allow(done, ticket)",
        "producer.allow(None, ticket)",
        4,
        _ordering("test_c4_memory_of_a_slow_device_is_bounded"),
    ),
    Mutant(
        "the producer's thread takes memory from the pool of another stream than it copies on",
        FETCHING,
        "self._device.bind_thread()",
        "pass",
        4,
        _ordering("test_c4_memory_is_kept_for_the_consumers_late_kernel"),
    ),
    Mutant(
        "a batch sent by the caller takes memory from the pool of the caller's stream",
        FETCHING,
        "with self._device.on_copy_stream():",
        "with nullcontext():",
        4,
        _ordering("test_c4_memory_is_kept_for_the_consumers_late_kernel"),
    ),
    # Contract 5: the source may reuse its buffer
    Mutant(
        "a pinned source that may be reused is not waited for",
        TRANSFER,
        'device.synchronize(event)\n            self._note_wait(self._counters.clock() - started, "wait for the copy',
        'self._note_wait(self._counters.clock() - started, "wait for the copy',
        5,
        _ordering("test_c5_a_pinned_buffer_is_not_handed_back_before_its_copy"),
    ),
    Mutant(
        "a batch that could not go the plain way brings a credit too many",
        PRODUCER,
        "self._credits.get()  # contract 8:",
        "pass  # contract 8:",
        8,
        ("tests/unit/test_plain_way.py::test_c8_nothing_may_be_fetched_further_ahead_afterwards",),
    ),
    Mutant(
        "every source counts as one that is not reused",
        FETCHING,
        "not torchloader.gives_up_memory(shared.loader)",
        "False",
        5,
        _ordering("test_c5_a_pinned_buffer_is_not_handed_back_before_its_copy"),
    ),
    Mutant(
        "the packing threads are not waited for",
        STAGING,
        "for _ in range(1, self._count):",
        "for _ in ():",
        5,
        _ordering("test_c5_packing_has_ended_when_it_says_so"),
    ),
    Mutant(
        "a batch is copied before the packing threads have ended",
        STAGING,
        "packers.finish()  # also",
        "pass  # also",
        5,
        _ordering("test_c5_many_leaves_are_packed_before_they_are_copied"),
    ),
    # Contract 6: slots, pinned and pageable sources
    Mutant(
        "a slot is written again without a look at its event",
        RING,
        "if not self._device.query(slot.event):",
        "if False:",
        6,
        _ordering("test_c6_a_slot_is_written_again_only_after_its_copy"),
    ),
    Mutant(
        "a slot's event is not recorded",
        TRANSFER,
        "device.record(slot.event, stream)\n        if probe",
        "pass\n        if probe",
        6,
        _ordering("test_c6_a_slot_is_written_again_only_after_its_copy"),
    ),
    Mutant(
        "a slot is not marked as used",
        RING,
        "slot.used = True",
        "pass",
        6,
        _ordering("test_c6_a_slot_is_written_again_only_after_its_copy"),
    ),
    Mutant(
        "the ring is given back while copies are under way",
        RING,
        "self._device.synchronize(slot.event)\n                slot.used = False",
        "slot.used = False",
        6,
        _ordering("test_c6_a_ring_waits_for_its_copies_before_it_goes"),
    ),
    Mutant(
        "pageable memory is not held until its copy has passed",
        TRANSFER,
        "self._device.synchronize(slot.event)  # contract 6: this memory",
        "pass  # contract 6: this memory",
        6,
        _ordering("test_c6_pageable_memory_outlives_the_copy_out_of_it"),
    ),
    Mutant(
        "a pinned source is not held",
        TRANSFER,
        "(event, [leaves[i] for i in which])",
        "(event, None)",
        6,
        _ordering("test_c6_a_pinned_source_outlives_the_copy_out_of_it"),
    ),
    Mutant(
        "a pinned source is held for one batch, whatever its event says",
        TRANSFER,
        "while len(self._held) > 1 and device.query(self._held[0][0]):",
        "while len(self._held) > 1:",
        6,
        _ordering("test_c6_a_pinned_source_outlives_the_copy_out_of_it"),
    ),
    Mutant(
        "a pinned source is dropped at close without a wait",
        TRANSFER,
        "self._device.synchronize(event)  # contract 6: a pinned source",
        "pass  # contract 6: a pinned source",
        6,
        _ordering("test_c6_a_pinned_source_is_held_while_the_pass_is_closed"),
    ),
    # Contracts 1, 7, 8, 9, 11: the order of tickets, and how a pass ends
    Mutant(
        "the end and an error overtake the batches before them",
        FETCHING,
        "self._ready.put(ticket)  # contract 1: before",
        "while ticket.final and not self._ready.empty():\n"
        "                self._ready.get()\n            self._ready.put(ticket)  # contract 1: before",
        7,
        _ordering(
            "test_c7_an_error_arrives_after_the_batches_before_it",
            "test_c1_the_end_arrives_after_the_batches_before_it",
        ),
    ),
    Mutant(
        "a batch of a pass that was left has no event",
        TRANSFER,
        "self._device.record(ticket.ready, stream)  # contract 3, and",
        "ticket.ready = None  # contract 3, and",
        3,
        ("tests/unit/test_plain_way.py::test_c3_c4_a_batch_of_a_pass_that_was_left_goes_to_another_stream",),
    ),
    Mutant(
        "the end is told before what the thread has put",
        PRODUCER,
        "return None  # what the thread has put comes first, the end too",
        "return end_ticket() if self._ended else None",
        1,
        ("tests/unit/test_thread_trial.py::test_c1_c7_the_end_does_not_overtake_what_the_thread_has_put",),
    ),
    Mutant(
        "a thread that retires takes its credit along",
        FETCHING,
        "for unused in [credit] * (credit is not WAITING) + [None] * aside:",
        "for unused in []:",
        8,
        ("tests/unit/test_thread_trial.py::test_c8_the_caller_finds_all_credits_when_the_thread_has_retired",),
    ),
    Mutant(
        "a thread retires while a consumer waits for it",
        FETCHING,
        "if self._consumers_waiting or self._stopping:",
        "if self._stopping:",
        1,
        ("tests/unit/test_thread_trial.py::test_c1_a_thread_that_somebody_waits_for_stays",),
    ),
    Mutant(
        "only one of several waiting threads hears of the end",
        LEAVING,
        "self._ready.put(end_ticket())  # for another",
        "pass  # for another",
        1,
        _ordering("test_c1_every_thread_that_waits_hears_of_the_end"),
    ),
    Mutant(
        "what a dropped pass took from a one-shot source is lost",
        LEAVING,
        "self._shared.carry(source, left)",
        "False",
        1,
        _ordering("test_c1_what_a_dropped_pass_took_from_a_one_shot_source_is_not_lost"),
    ),
    Mutant(
        "two threads at one iterator send at once",
        PRODUCER,
        "with self._inside:  # contract 1",
        "if True:  # contract 1",
        1,
        _ordering("test_c1_two_threads_at_one_iterator_do_not_send_at_once"),
    ),
    Mutant(
        "credits do not bound the look-ahead",
        FETCHING,
        "for _ in range(self._options.depth):",
        "for _ in range(99):",
        8,
        _ordering("test_c8_a_pass_that_is_not_advanced_pulls_depth_batches"),
    ),
    Mutant(
        "a dropped iterator does not stop its producer",
        PREFETCHER,
        "weakref.finalize(self, leave or producer.detach)",
        "weakref.finalize(self, int)",
        9,
        _ordering("test_c9_a_dropped_iterator_ends_its_thread"),
    ),
    Mutant(
        "close keeps the batches that were ahead",
        LEAVING,
        "while not self._ready.empty():\n            ticket",
        "while False:\n            ticket",
        9,
        _ordering("test_c9_closing_drops_the_batches_that_were_ahead"),
    ),
    Mutant(
        "a pass is given back although somebody is in the middle of a batch",
        LEAVING,
        "if not self._inside.acquire(timeout=min(seconds, LEAVE_SECONDS)):",
        "self._inside = threading.Lock()\n        if not self._inside.acquire():",
        9,
        _ordering("test_c9_closing_while_another_thread_fetches_for_itself"),
    ),
    Mutant(
        "a consumer that was inside when the pass was stopped does not give back",
        PRODUCER,
        "is_left = self._keeps_if_left(ticket, stream)",
        "is_left = False",
        9,
        _ordering("test_c9_closing_while_another_thread_fetches_for_itself"),
    ),
    Mutant(
        "stopping a pass does not wake its consumer",
        LEAVING,
        "self._ready.put(failed_ticket(self._closed()))  # a consumer that waits",
        "pass  # a consumer that waits",
        9,
        _ordering("test_c9_closing_wakes_a_consumer_that_waits_in_another_thread"),
    ),
    Mutant(
        "a pass that ends after close keeps its ring for the next one",
        SHARED,
        "self._leased.pop(id(transfer), -1) == self._generation and not",
        "self._leased.pop(id(transfer), -1) >= 0 and not",
        9,
        _ordering("test_c6_a_pass_that_ends_after_close_gives_its_ring_back"),
    ),
    Mutant(
        "the state is the loader's at delivery, prefetched batches included",
        PREFETCHER,
        "self._shared.state = ticket.state",
        "self._shared.state = self._shared.capture_state(producer)",
        11,
        _ordering("test_c11_the_state_is_that_after_the_batch_last_yielded"),
    ),
    Mutant(
        "an older pass draws ahead while a newer one draws",
        FETCHING,
        "if self._is_held_back and not self._consumers_waiting:",
        "if False:",
        10,
        ("tests/unit/test_corners.py::test_c10_an_older_pass_draws_nothing_ahead_once_a_newer_one_has_begun",),
    ),
    Mutant(
        "a newer pass begins where an older one has drawn ahead",
        LEAVING,
        "            if not self._released:  # a pass",
        "            if False:  # a pass",
        10,
        ("tests/unit/test_corners.py::test_c10_a_pass_left_early_leaves_the_generator_as_the_plain_loop",),
    ),
    Mutant(
        "the state is taken before its batch",
        FETCHING,
        "batch = self._next(self.source)\n",
        "early = self._shared.capture_state(self)\n                    batch = self._next(self.source)\n"
        "                    self._shared.capture_state = lambda _: early\n",
        11,
        _ordering("test_c11_the_state_is_that_after_the_batch_last_yielded"),
    ),
    Mutant(
        "the state is a reference to what the loader goes on writing to",
        SHARED,
        "_copied(self.twins.state_of(producer.source))",
        "self.twins.state_of(producer.source)",
        11,
        _ordering("test_c11_the_state_is_that_after_the_batch_last_yielded"),
    ),
    # Contract 15: the device is full
    Mutant(
        "a full device is not given time by the batches before",
        FETCHING,
        "or tries > self._options.depth:",
        "or True:",
        15,
        (f"{_MEMORY}test_c15_m4_device_memory_for_two_batches_at_depth_four[thread-]",),
    ),
    # Contract 2: leaves are independent
    Mutant(
        "waits for batches that are not taken yet use up the tries of a full device",
        FETCHING,
        "tries += not was_taken ",
        "tries += 1 ",
        15,
        ("tests/unit/test_corners.py::test_c15_waiting_for_batches_that_are_taken_late_does_not_count",),
    ),
    Mutant(
        "leaves are autograd views of one slab",
        "batch/layout.py",
        "with torch._C._AutoDispatchBelowADInplaceOrView():",
        "if True:",
        2,
        ("tests/property/test_layout.py::test_c2_neighbours_in_a_slab_are_no_views",),
    ),
    # Tables
    Mutant(
        "a gather does not wait for the scatter before it",
        KERNELS,
        "device.wait(stream, event)  # contract 3: a gather after a scatter sees it, on any stream",
        "pass",
        3,
        _tables("test_c3_a_gather_sees_the_scatter_before_it_on_another_stream"),
    ),
    Mutant(
        "a scatter does not wait for the scatter before it",
        KERNELS,
        "self._device.wait(stream, event)  # contract 3: the scatter before this has written its rows",
        "pass",
        3,
        _tables("test_c3_a_scatter_follows_the_scatter_before_it_on_another_stream"),
    ),
    Mutant(
        "a scatter does not wait for the gathers before it",
        KERNELS,
        "self._device.wait(stream, event)  # contract 3: a gather before this still reads the old rows",
        "pass",
        3,
        _tables("test_c3_a_gather_keeps_its_rows_when_a_scatter_on_another_stream_follows"),
    ),
    Mutant(
        "tables that are gathered together wait for the scatters of the first",
        KERNELS,
        "{id(mover._written): mover._written for mover in movers}.values():\n            device",
        "[self._written]:\n            device",
        3,
        _tables("test_c3_tables_that_move_together_wait_for_what_each_of_them_did_alone"),
    ),
    Mutant(
        "tables that are written together wait for the scatters of the first",
        KERNELS,
        "written = {id(mover._written): mover._written for mover in movers}",
        "written = {0: self._written}",
        3,
        _tables("test_c3_tables_that_move_together_wait_for_what_each_of_them_did_alone"),
    ),
    Mutant(
        "tables that are written together wait for the gathers of the first",
        KERNELS,
        "for mover in movers for event in mover._reads.values()}",
        "for event in self._reads.values()}",
        3,
        _tables("test_c3_tables_that_move_together_wait_for_what_each_of_them_did_alone"),
    ),
    Mutant(
        "what was written together is known to the first table alone",
        KERNELS,
        "        for mover in movers:\n            mover._written = self._own",
        "        self._written = self._own",
        3,
        _tables("test_c3_each_table_waits_for_what_several_did_together"),
    ),
    Mutant(
        "what was gathered together is known to the first table alone",
        KERNELS,
        "        for mover in movers:\n            mover._reads[stream] = read",
        "        self._reads[stream] = read",
        3,
        _tables("test_c3_each_table_waits_for_what_several_did_together"),
    ),
    Mutant(
        "what was found about ids is not kept for the stream that looks up",
        "tables/embedding.py",
        "device.record_use(tensor, stream)  # contract 4: made on the stream that was current then",
        "pass",
        4,
        _tables("test_c4_what_was_found_about_ids_is_kept_for_the_stream_that_looks_up"),
    ),
    Mutant(
        "a host read does not wait for the scatter by a kernel",
        KERNELS,
        "self._device.synchronize(self._written)\n        for event in self._reads.values():\n"
        "            self._device.synchronize(event)\n        self.poll()",
        "for event in self._reads.values():\n            self._device.synchronize(event)\n        self.poll()",
        3,
        _tables("test_c3_a_host_read_waits_for_the_scatter"),
    ),
    Mutant(
        "a host write does not wait for the gather by a kernel",
        KERNELS,
        "            self._device.synchronize(event)\n        self.poll()",
        "            pass\n        self.poll()",
        3,
        _tables("test_c3_a_host_write_waits_for_the_gather"),
    ),
    Mutant(
        "the host writes rows that have not arrived",
        MOVERS,
        "self._back.wait()  # contract 3: the rows have arrived on the host",
        "pass",
        3,
        _tables("test_c3_a_host_read_waits_for_the_scatter"),
    ),
    Mutant(
        "a staged gather does not see the scatter that is half-way",
        MOVERS,
        "self.settle()  # contract 3: a gather after a scatter sees it",
        "pass",
        3,
        _tables("test_c3_a_gather_sees_the_scatter_before_it_on_another_stream"),
    ),
    Mutant(
        "a staged scatter overwrites the one that is half-way",
        MOVERS,
        "self.settle()  # the buffer still holds the scatter before this one",
        "pass",
        3,
        _tables("test_c3_a_scatter_follows_the_scatter_before_it_on_another_stream"),
    ),
    Mutant(
        "ids are read by the host before they have arrived",
        MOVERS,
        "self._device.synchronize(event)  # contract 3: the ids are read by the host next",
        "pass",
        3,
        _tables("test_c3_ids_of_the_device_are_waited_for"),
    ),
    Mutant(
        "rows are written back before the step has made them",
        TOGETHER,
        "device.wait(device.copy_stream, first._handover)\n            for group",
        "for group",
        3,
        _tables("test_c3_rows_are_written_back_after_the_step_that_makes_them"),
    ),
    Mutant(
        "rows ahead are gathered before their ids are there",
        TOGETHER,
        "device.wait(device.copy_stream, first._handover)\n            rows",
        "rows",
        3,
        _tables("test_c3_rows_ahead_are_gathered_after_their_ids_are_made"),
    ),
    Mutant(
        "rows ahead are not waited for",
        AHEAD,
        "device.wait(stream, self._ready)",
        "pass",
        3,
        _tables("test_c3_rows_ahead_are_waited_for_when_taken"),
    ),
    Mutant(
        "rows ahead that are gathered again do not wait for their ids",
        AHEAD,
        "device.wait(stream, self._ready)\n",
        "if rows is not None:\n            device.wait(stream, self._ready)\n",
        3,
        _tables("test_c3_rows_ahead_that_are_gathered_again_are_behind_their_ids"),
    ),
    Mutant(
        "a scatter that is half-way reads the caller's ids",
        MOVERS,
        "held = Index(index.ids.clone(), index.shape, resident=False)",
        "held = index",
        5,
        _tables("test_c5_the_ids_of_a_scatter_may_be_written_to_at_once"),
    ),
    Mutant(
        "rows ahead take new values that another stream is still making",
        AHEAD,
        " or (patches and self._maker != stream)",
        "",
        3,
        _tables("test_c3_new_values_of_another_stream_are_not_read_before_they_are_made"),
    ),
    Mutant(
        "rows ahead miss what was written back since",
        AHEAD,
        "_replace(rows, index, [taken[number][3][turn][1] for number in numbers], new_index, device)",
        "pass",
        3,
        _tables("test_a_loop_with_rows_ahead_is_the_loop_without"),
    ),
    Mutant(
        "rows that are written back are not kept",
        TOGETHER,
        "device.record_use(new, device.copy_stream)  # contract 4: the copy stream still reads them",
        "pass",
        4,
        _tables("test_c4_rows_that_are_written_back_are_kept_until_they_are_read"),
    ),
    Mutant(
        "rows and ids that patch rows ahead are not kept for the stream that does it",
        TOGETHER,
        "                device.record_use(new, stream)",
        "                pass",
        4,
        _tables("test_c4_what_patches_rows_ahead_is_kept_for_the_stream_that_does_it"),
    ),
    Mutant(
        "gradients are not kept for the stream that steps",
        "tables/optimizer.py",
        "self._table.where.record_use(grad, stream)  # contract 4: the backward pass may have run on another",
        "pass",
        4,
        _tables("test_c4_gradients_are_kept_for_the_stream_that_steps"),
    ),
    Mutant(
        "ids of rows that are written back are not kept",
        TOGETHER,
        "device.record_use(new, device.copy_stream)  # contract 4: the copy stream still reads them\n"
        "        if index.resident:",
        "device.record_use(new, device.copy_stream)\n        if False:",
        4,
        _tables("test_c4_ids_are_kept_until_the_copy_stream_has_read_them"),
    ),
    Mutant(
        "ids of rows ahead are not kept",
        TOGETHER,
        "device.record_use(index.ids, device.copy_stream)  # contract 4\n",
        "pass\n",
        4,
        _tables("test_c4_ids_are_kept_until_the_copy_stream_has_read_them"),
    ),
    Mutant(
        "rows ahead are not kept for the stream that takes them",
        AHEAD,
        "device.record_use(rows, stream)",
        "pass",
        4,
        _tables("test_c4_rows_ahead_are_kept_for_the_stream_that_takes_them"),
    ),
    Mutant(
        "a staging buffer is written under its copy",
        "tables/memory.py",
        "self._device.synchronize(self._event)  # contract 6: the copy may still be running",
        "pass",
        6,
        _tables("test_c6_many_gathers_behind_a_slow_link"),
    ),
    Mutant(
        "a table is freed under the kernels that read it",
        KERNELS,
        "self._device.synchronize(event)  # contract 6: kernels may still be reading this memory",
        "pass",
        6,
        _tables("test_c6_a_table_goes_after_the_copies_out_of_it"),
    ),
    Mutant(
        "a table goes without its last rows",
        MOVERS,
        "        self.settle()\n        for staging in (*self._out, self._back):",
        "        for staging in (*self._out, self._back):",
        6,
        _tables("test_c6_a_mapped_or_pinned_table_that_goes_has_its_last_rows"),
    ),
    # What is measured on the device is read when it has passed
    Mutant(
        "copies that still run are read",
        "pipeline/timing.py",
        "while self._pending and self._device.query(self._pending[0].done):",
        "while self._pending:",
        3,
        (_STATS + "test_stats_waits_for_no_copy",),
    ),
    Mutant(
        "a trace does not wait for its copies",
        "pipeline/recorder.py",
        "self._device.synchronize(probe.done)",
        "pass",
        3,
        (_TRACE + "test_every_copy_is_on_the_copy_lane",),
    ),
    Mutant(
        "a trace does not wait for the loop's work on the device",
        "pipeline/recorder.py",
        "self._device.synchronize(step[1])",
        "pass",
        3,
        (_TRACE + "test_every_copy_is_on_the_copy_lane",),
    ),
    Mutant(
        "the link is measured before its copies have passed",
        "limits.py",
        "device.synchronize(end)\n                rates",
        "rates",
        3,
        (_STATS + "test_limits_are_measured_when_asked_for_and_remembered",),
    ),
    # Worker processes
    Mutant(
        "memory of a worker's batch is forgotten before its use is recorded",
        TRANSFER,
        "ticket.uses = [*uses, *memory] if device.staged else uses",
        "ticket.uses = uses",
        4,
        _workers("test_c4_memory_is_kept_for_the_consumers_late_kernel"),
    ),
    Mutant(
        "a worker's slot is given back before its copy has passed",
        TRANSFER,
        "            if not self._device.query(event):\n                if not self._lent[-1]",
        "            if False:\n                if not self._lent[-1]",
        6,
        _workers("test_c6_a_slot_is_given_back_when_its_copy_has_passed"),
    ),
    Mutant(
        "a worker's slot that is wanted is not waited for",
        TRANSFER,
        "                    return\n                self._device.synchronize(event)\n",
        "                    return\n",
        6,
        _workers("test_c6_a_slot_is_given_back_when_its_copy_has_passed"),
    ),
    Mutant(
        "the event of a copy out of a worker's slot is not recorded",
        TRANSFER,
        "            device.record(event, stream)\n            self._lent.append",
        "            self._lent.append",
        6,
        _workers("test_c6_a_slot_is_given_back_when_its_copy_has_passed"),
    ),
    Mutant(
        "the batch keeps the slot that is under copy, and gives it back as it goes",
        TRANSFER,
        "self._lent.append((event, batch.take_slot()))",
        "self._lent.append((event, batch.slot))",
        6,
        _workers("test_c6_a_slot_is_given_back_when_its_copy_has_passed"),
    ),
    Mutant(
        "the last slots of a pass are given back under copy",
        TRANSFER,
        "            self._device.synchronize(event)  # contract 6\n            self._return(event, slot)",
        "            self._return(event, slot)",
        6,
        _workers(
            "test_c6_the_last_slots_wait_for_their_copies_at_the_end_of_a_pass",
            "test_c6_slots_of_closed_workers_stay_until_their_copies_have_passed",
        ),
    ),
    Mutant(
        "no slot is given back while a worker is waited for",
        FETCHING,
        "            self.transfer.return_slots()\n",
        "",
        6,
        _workers("test_c6_no_worker_waits_for_slots_that_are_kept_while_its_batch_is_waited_for"),
    ),
    Mutant(
        "more slots are kept than were promised",
        WORKERS,
        "table.under_way.get(self._worker, 0) > table.kept.get(self._worker, 0)",
        "False",
        6,
        _workers("test_c6_no_worker_waits_for_slots_that_are_kept_while_its_batch_is_waited_for"),
    ),
    Mutant(
        "a slot is not marked busy",
        COLLATE,
        "slot.segment.flags[STATE] = BUSY",
        "pass",
        6,
        _workers("test_c6_a_slot_is_busy_from_the_packing_to_the_copy"),
    ),
    Mutant(
        "a worker takes a slot that is busy",
        COLLATE,
        "return self.segment is None or self.segment.flags[STATE] == FREE",
        "return True",
        6,
        _workers("test_c6_a_slot_is_given_back_when_its_copy_has_passed"),
    ),
    Mutant(
        "a slot is unregistered under copy",
        WORKERS,
        "if not self._is_retired or self._is_copying or self._is_closed:",
        "if not self._is_retired or self._is_closed:",
        6,
        _workers("test_c6_slots_of_closed_workers_stay_until_their_copies_have_passed"),
    ),
    Mutant(
        "a slot that cannot be registered is given back before it is copied out",
        WORKERS,
        "leaves = self.placed(self.copied_leaves(), self.others)",
        "self.slot.segment.tensor.fill_(0)\n        leaves = self.placed(self.copied_leaves(), self.others)",
        6,
        _workers("test_c15_registration_refused_copies_out_of_the_slot_first"),
    ),
    Mutant(
        "a batch that is dropped keeps its slot",
        WORKERS,
        "            with suppress(Exception):\n                slot.give_back()",
        "            pass",
        6,
        _workers("test_c6_a_batch_that_is_dropped_unsent_gives_its_slot_back"),
    ),
    Mutant(
        "a batch that cannot be read keeps its slot",
        WORKERS,
        "        except BaseException:\n            slot.give_back()\n            raise",
        "        except BaseException:\n            raise",
        6,
        _workers("test_c7_a_batch_that_cannot_be_read_loses_no_slot_and_no_plan"),
    ),
    Mutant(
        "the parent is not told of slots that are gone",
        COLLATE,
        "        dropped = tuple(other.number for other in self._slots if other.is_dropped())",
        "        dropped = ()",
        14,
        _workers("test_c14_one_large_slot_takes_the_place_of_several_small_ones"),
    ),
    Mutant(
        "a retired segment goes with the collector only",
        WORKERS,
        "self.views.replace(segment)",
        "self.views.replace(segment)\n        segment.handle = (*segment.handle, self)",
        14,
        _workers("test_c14_retired_memory_goes_without_the_collector"),
    ),
    Mutant(
        "plans are forgotten by the worker alone",
        WORKERS,
        "                plans.clear()",
        "                pass",
        14,
        _workers("test_plans_are_forgotten_on_both_sides_together"),
    ),
    # Queues between the DataLoader and its workers
    Mutant(
        "a message overtakes a large one before it",
        QUEUES,
        "self._thread is None and self._put_now(obj)",
        "self._put_now(obj)",
        1,
        (f"{_QUEUES}test_c1_what_follows_a_large_message_stays_behind_it",),
    ),
    Mutant(
        "a full pipe is written to",
        QUEUES,
        "if poller.poll(0) != [(number, select.POLLOUT)]:",
        "if False:",
        9,
        (f"{_QUEUES}test_a_pipe_that_is_full_blocks_nobody",),
    ),
    Mutant(
        "what arrived together with another message is lost",
        QUEUES,
        "del arrived[:end]",
        "arrived.clear()",
        1,
        (f"{_QUEUES}test_several_messages_that_arrive_at_once",),
    ),
)
