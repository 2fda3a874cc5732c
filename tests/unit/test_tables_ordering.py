"""Tables on the simulated device: one wait or one reference each, and what goes wrong without it.

``staged``: rows pass through page-locked buffers. ``zero``: kernels work on the table where it is; their Python twins
run late. Named after the contracts; tests/mutants removes the waits one by one and expects these tests to fail.
"""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from torch import optim

from prefetchpipe import HostEmbedding, HostTable
from prefetchpipe.tables import Lookahead, RowOptimizer
from prefetchpipe.tables.ahead import MOST_PATCHES, RowsAhead
from prefetchpipe.tables.index import Index, read_index
from prefetchpipe.tables.together import gather_ahead, gather_rows, write_back
from prefetchpipe.testing import SimulatedDevice
from tests.support import Readings, constants
from tests.support_tables import SLOW, ZeroCopyDevice

ROWS, DIM = 8, 16


def staged() -> SimulatedDevice:
    return SimulatedDevice(bandwidth=SLOW)


def zero() -> ZeroCopyDevice:
    return ZeroCopyDevice(bandwidth=SLOW)


BOTH = pytest.mark.parametrize("make", [staged, zero])


def table_of(device: Any, **options: Any) -> HostTable:
    """Row i holds i + 1."""
    rows = torch.arange(1.0, ROWS + 1)[:, None].expand(ROWS, DIM)
    return HostTable(ROWS, DIM, device=device, init=rows, **options)


def made_late(device: Any, value: float, rows: int = 1, seconds: float = 0.05) -> torch.Tensor:
    """Device rows that a kernel on the current stream is going to fill."""
    made = device.empty(torch.Size((rows, DIM)), (DIM, 1), torch.float32)
    device.launch(lambda view: view.fill_(value), made, seconds=seconds)
    return made


def ids_made_late(device: Any, *ids: int) -> torch.Tensor:
    made = device.empty(torch.Size((len(ids),)), (1,), torch.int64)
    device.launch(lambda view: view.copy_(torch.tensor(ids)), made, seconds=0.05)
    return made


def read(device: Any, *rows: torch.Tensor, seconds: float = 0.0) -> list[tuple[float, float]]:
    readings = Readings(device, len(rows))
    for number, row in enumerate(rows):
        readings.queue(number, row, seconds=seconds)
    return readings.values()


def litter(device: Any) -> None:
    """Whatever was freed is handed out again and written to."""
    for nbytes in (8, 16, 24, 64, 128, 192, 8 * DIM * 4):
        kept = [device.alloc(nbytes) for _ in range(4)]
        for block in kept:
            device.launch(lambda view: view.fill_(0x77), block)


# Contract 3


@BOTH
def test_c3_the_stream_of_the_moment_has_the_rows(make: Any) -> None:
    device = make()
    table = table_of(device)
    readings = Readings(device, 6)
    for number in range(6):
        with device.use_stream(device.new_stream()):
            readings.queue(number, table.gather([number]))
    assert readings.values() == constants(range(1, 7))


@BOTH
def test_c3_a_gather_sees_the_scatter_before_it_on_another_stream(make: Any) -> None:
    device = make()
    table = table_of(device)
    table.scatter([3], made_late(device, 9.0))
    with device.use_stream(device.new_stream()):
        rows = table.gather([3])
        assert read(device, rows) == constants([9])


@BOTH
def test_c3_a_scatter_follows_the_scatter_before_it_on_another_stream(make: Any) -> None:
    device = make()
    table = table_of(device)
    table.scatter([3], made_late(device, 9.0))
    with device.use_stream(device.new_stream()):
        table.scatter([3], made_late(device, 10.0, seconds=0.0))
    assert table[3].tolist() == [10] * DIM
    table.scatter([3], made_late(device, 11.0), unique=True)
    with device.use_stream(device.new_stream()):
        table.scatter([3], made_late(device, 12.0, seconds=0.0), unique=True)
    device.synchronize()
    assert table[3].tolist() == [12] * DIM
    table.scatter([3], made_late(device, 20.0))
    with device.use_stream(device.new_stream()):
        table.scatter_add([3, 3], made_late(device, 1.0, rows=2, seconds=0.0))
    assert table[3].tolist() == [22] * DIM


@BOTH
def test_c3_a_gather_keeps_its_rows_when_a_scatter_on_another_stream_follows(make: Any) -> None:
    device = make()
    table = table_of(device)
    device.launch(lambda: None, seconds=0.05)
    rows = table.gather([3])
    with device.use_stream(device.new_stream()):
        table.scatter([3], made_late(device, 9.0, seconds=0.0))
    assert read(device, rows) == constants([4])
    assert table[3].tolist() == [9] * DIM


@BOTH
def test_c3_a_host_read_waits_for_the_scatter(make: Any) -> None:
    for look in (lambda t: t[3], lambda t: t.numpy()[3], lambda t: t.host_tensor()[3]):
        device = make()
        table = table_of(device)
        table.scatter([3], made_late(device, 9.0))
        assert look(table).tolist() == [9] * DIM


@BOTH
def test_c3_a_host_write_waits_for_the_gather(make: Any) -> None:
    device = make()
    table = table_of(device)
    device.launch(lambda: None, seconds=0.05)
    rows = table.gather([3])
    table[3] = 9
    assert read(device, rows) == constants([4])
    rows = table.gather([4])
    table.scatter([4], torch.full((1, DIM), 9.0))
    assert read(device, rows) == constants([5])


def test_c3_a_host_read_waits_for_this_table_alone() -> None:
    device = zero()
    table = table_of(device)
    table.gather([1])
    with device.use_stream(device.new_stream()):
        device.launch(lambda: None, seconds=100.0)
    table.scatter([3], made_late(device, 9.0))
    assert table[3].tolist() == [9] * DIM
    assert device.now < 1


@BOTH
def test_c3_ids_of_the_device_are_waited_for(make: Any) -> None:
    device = make()
    table = table_of(device)
    assert read(device, table.gather(ids_made_late(device, 5))) == constants([6])
    table.scatter(ids_made_late(device, 1, 2, 1), made_late(device, 9.0, rows=3))
    assert table[:4, 0].tolist() == [1, 9, 9, 4]


@BOTH
def test_c3_rows_are_written_back_after_the_step_that_makes_them(make: Any) -> None:
    device = make()
    table = table_of(device)
    rows = made_late(device, 9.0)
    write_back([table], index(table, 3), [rows])
    assert table[3].tolist() == [9] * DIM


@BOTH
def test_c3_rows_ahead_are_gathered_after_their_ids_are_made(make: Any) -> None:
    device = make()
    table = table_of(device)
    wanted = read_index(ids_made_late(device, 5), ROWS, device)
    ahead = gather_ahead([table], wanted if table.ids_on_device else index(table, 5))
    assert read(device, ahead.take()[0]) == constants([6])


@BOTH
def test_c3_rows_ahead_are_waited_for_when_taken(make: Any) -> None:
    device = make()
    table = table_of(device)
    aheads = [gather_ahead([table], index(table, row)) for row in range(4)]
    for number, ahead in enumerate(aheads):
        with device.use_stream(device.new_stream()):
            assert read(device, ahead.take()[0]) == constants([number + 1])


def index(table: HostTable, *rows: int) -> Index:
    return table.place(read_index(rows, ROWS, table.where))


@BOTH
@pytest.mark.parametrize("how", ["scatter", "scatter_add"])
def test_c5_the_ids_of_a_scatter_may_be_written_to_at_once(make: Any, how: str) -> None:
    device = make()
    table = HostTable(6, DIM, device=device)
    ids = torch.tensor([1, 2])
    getattr(table, how)(ids, made_late(device, 1.0, rows=2))
    ids.fill_(5)
    assert table.numpy().sum(1).tolist() == [0, DIM, DIM, 0, 0, 0]


@BOTH
def test_c3_rows_ahead_that_are_gathered_again_are_behind_their_ids(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids were made on another stream than the one that is current when the rows are taken."""
    device = make()
    table = HostTable(6, DIM, device=device)
    ahead = gather_ahead([table], Index(torch.tensor([1]), (1,), resident=False))
    table.scatter([1], torch.ones(1, DIM))
    stream, waits = device.new_stream(), []
    wait = device.wait
    monkeypatch.setattr(device, "wait", lambda *args: (waits.append(args), wait(*args)))
    with device.use_stream(stream):
        (rows,) = ahead.take()
    assert waits[0] == (stream, ahead._ready)
    device.synchronize()
    assert rows.tolist() == [[1.0] * DIM]


@BOTH
def test_c3_new_values_of_another_stream_are_not_read_before_they_are_made(make: Any) -> None:
    device = make()
    table = table_of(device)
    streams = [device.new_stream() for _ in range(3)]
    ids = index(table, 3)
    for makers in (streams[:1], streams[:2]):
        ahead = gather_ahead([table], ids)
        for number, stream in enumerate(makers):
            with device.use_stream(stream):
                write_back([table], ids, [made_late(device, 9.0 + number)])
        with device.use_stream(streams[2]):
            assert read(device, ahead.take()[0]) == constants([8 + len(makers)])


def test_c3_tables_that_move_together_wait_for_what_each_of_them_did_alone() -> None:
    device = zero()
    first, second = table_of(device), table_of(device)
    ids, stream = index(first, 3), device.new_stream()
    with device.use_stream(stream):
        second.scatter([3], made_late(device, 9.0))
    assert read(device, *gather_ahead([first, second], ids).take()) == constants([4, 9])

    with device.use_stream(stream):
        second.scatter([3], made_late(device, 10.0))
    write_back([first, second], ids, [made_late(device, 20.0, seconds=0.0) for _ in range(2)])
    assert second[3].tolist() == [20] * DIM

    with device.use_stream(stream):
        device.launch(lambda: None, seconds=0.05)
        rows = second.gather([3])
    write_back([first, second], ids, [made_late(device, 30.0, seconds=0.0) for _ in range(2)])
    with device.use_stream(stream):
        assert read(device, rows) == constants([20])


def test_c3_a_scatter_waits_for_what_the_copy_stream_gathers() -> None:
    device = zero()
    table = table_of(device)
    ids = index(table, 3)
    with device.on_copy_stream():
        device.launch(lambda: None, seconds=0.05)
        (rows,) = gather_rows([table], ids)
    table.scatter([3], made_late(device, 9.0, seconds=0.0))
    device.synchronize()
    assert read(device, rows) == constants([4])
    assert table[3].tolist() == [9] * DIM


def test_states_ahead_are_one_piece_of_memory_and_rows_another() -> None:
    device = zero()
    tables = [table_of(device) for _ in range(3)]
    taken = gather_ahead(tables, index(tables[0], 3, 5)).take()
    first, second, third = (rows.untyped_storage().data_ptr() for rows in taken)
    assert first != second == third
    assert not taken[0]._is_view()
    device.synchronize()
    assert [rows[:, 0].tolist() for rows in taken] == 3 * [[4, 6]]


def test_the_copy_stream_waits_for_nothing_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    device = zero()
    table = table_of(device)
    ids = index(table, 3)
    waits: list[Any] = []
    wait = device.wait
    monkeypatch.setattr(device, "wait", lambda stream, event: (waits.append(stream), wait(stream, event)))
    for batch in range(3):
        waits.clear()
        rows = gather_ahead([table], ids).take()
        write_back([table], ids, rows)
        if batch:
            assert waits == [device.copy_stream, device.current_stream(), device.copy_stream]  # for this thread's ids
    assert table[3].tolist() == [4] * DIM


def test_c3_each_table_waits_for_what_several_did_together() -> None:
    device = zero()
    first, second = table_of(device), table_of(device)
    ids, other = index(first, 3), device.new_stream()
    write_back([first, second], ids, [made_late(device, 9.0) for _ in range(2)])
    with device.use_stream(other):
        assert read(device, second.gather([3])) == constants([9])

    device.launch(lambda: None, seconds=0.05)
    rows = gather_rows([first, second], ids)
    second[3] = 10.0
    assert read(device, *rows) == constants([9, 9])

    first, second, third = (table_of(device) for _ in range(3))
    write_back([first, second, third], ids, [made_late(device, 9.0) for _ in range(3)])
    with device.use_stream(other):
        second.scatter([3], made_late(device, 10.0, seconds=0.0))
    assert [table[3].tolist() for table in (second, third, first)] == [[value] * DIM for value in (10, 9, 9)]


# Contract 4


@BOTH
def test_c4_rows_that_are_written_back_are_kept_until_they_are_read(make: Any) -> None:
    device = make()
    table = table_of(device)
    with device.on_copy_stream():
        device.launch(lambda: None, seconds=0.5)
    write_back([table], index(table, 3), [made_late(device, 9.0, seconds=0.0)])
    litter(device)
    assert table[3].tolist() == [9] * DIM


def test_c4_ids_are_kept_until_the_copy_stream_has_read_them() -> None:
    device = zero()
    table = table_of(device)
    with device.on_copy_stream():
        device.launch(lambda: None, seconds=0.5)
    write_back([table], index(table, 3), [made_late(device, 9.0, seconds=0.0)])
    gather_ahead([table], index(table, 4))
    litter(device)
    assert table[3].tolist() == [9] * DIM  # an id out of range would be told here, too


@BOTH
def test_c4_rows_ahead_are_kept_for_the_stream_that_takes_them(make: Any) -> None:
    device = make()
    table = table_of(device)
    readings = Readings(device, 4)
    for row in range(4):
        rows = gather_ahead([table], index(table, row)).take()[0]
        device.launch(lambda: None, seconds=0.05)
        readings.queue(row, rows)
        del rows
        with device.on_copy_stream():
            litter(device)
    assert readings.values() == constants([1, 2, 3, 4])


def test_c4_what_was_found_about_ids_is_kept_for_the_stream_that_looks_up() -> None:
    device = zero()
    embedding = HostEmbedding(ROWS, DIM, device=device, init=table_of("cpu").host_tensor())
    optimizer = RowOptimizer(optim.SGD, embedding, lr=1.0)
    ids = torch.tensor([3, 1, 3])
    prepared = embedding.prepare(ids)
    tensors = prepared.distinct.device_tensors()
    del prepared
    with device.use_stream(device.new_stream()):
        (embedding(ids) * torch.tensor([1.0, 2.0, 4.0])[:, None]).sum().backward()
        device.launch(lambda: None, seconds=0.5)
        users = [device._block_of(tensor).users for tensor in tensors if device._block_of(tensor) is not None]
        assert len(users) >= 3
        assert all(device.current_stream() in some for some in users)
        optimizer.step()
    assert embedding.table[:4, 0].tolist() == [1, 0, 3, -1]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_c4_what_patches_rows_ahead_is_kept_for_the_stream_that_does_it(depth: int) -> None:
    """The first forward pass runs on a side stream; its step, and all that follows, on the main one."""
    device = ZeroCopyDevice()
    main, side = device.default_stream, device.new_stream()
    embedding = HostEmbedding(ROWS, 2, device=device, init=torch.zeros(ROWS, 2))
    optimizer = RowOptimizer(optim.SGD, embedding, lr=1.0)
    batches = [torch.tensor([1, 2]) for _ in range(2)]
    loop = embedding.lookahead(batches, lambda ids: ids, depth=depth) if depth else iter(batches)
    seen = []
    for number, ids in enumerate(loop):
        stream = main if number else side
        with device.use_stream(stream):
            out = embedding(ids)
            seen.append(out.detach()[:, 0].tolist())
            out.sum().backward()
        event = device.new_event()
        device.record(event, stream)
        device.wait(main, event)
        del out
        optimizer.step()
        device.pass_time(1.0)
    assert seen == [[0, 0], [-1, -1]]
    assert embedding.table[:4, 0].tolist() == [0, -2, -2, 0]


def test_c4_gradients_are_kept_for_the_stream_that_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    device = zero()
    embedding = HostEmbedding(ROWS, DIM, device=device, init=table_of("cpu").host_tensor())
    optimizer = RowOptimizer(optim.SGD, embedding, lr=1.0)
    used: list[tuple[int, Any]] = []
    record_use = device.record_use
    monkeypatch.setattr(
        device, "record_use", lambda *given: (used.append((given[0].data_ptr(), given[1])), record_use(*given))
    )
    embedding(torch.tensor([3, 1, 3])).sum().backward()
    (active,) = embedding._active.values()
    assert active.rows.grad is not None
    grad = active.rows.grad.data_ptr()
    stream = device.new_stream()
    with device.use_stream(stream):
        optimizer.step()
    assert (grad, stream) in used
    assert embedding.table[:4, 0].tolist() == [1, 1, 3, 2]


# Contract 6


@BOTH
def test_c6_many_gathers_behind_a_slow_link(make: Any) -> None:
    device = make()
    table = table_of(device)
    rows = [table.gather([number % ROWS]) for number in range(20)]
    assert read(device, *rows) == constants([number % ROWS + 1 for number in range(20)])


def test_c6_a_pageable_buffer_is_copied_before_it_goes() -> None:
    device = staged()
    with pytest.warns(RuntimeWarning, match="page-locked"):
        table = table_of(device, max_pinned_bytes=0)
    rows = [table.gather([number]) for number in range(6)]
    table.scatter([7], made_late(device, 9.0))
    assert read(device, *rows) == constants(range(1, 7))
    assert table[7].tolist() == [9] * DIM


@BOTH
@pytest.mark.parametrize("how", ["close", "del"])
def test_c6_a_table_goes_after_the_copies_out_of_it(make: Any, how: str) -> None:
    device = make()
    table = table_of(device)
    device.launch(lambda: None, seconds=0.05)
    rows = table.gather([3])
    if how == "close":
        table.close()
    del table
    gc.collect()
    assert read(device, rows) == constants([4])
    assert device.pinned_bytes == 0


@BOTH
def test_c6_a_mapped_or_pinned_table_that_goes_has_its_last_rows(make: Any, tmp_path: Any) -> None:
    device = make()
    table = table_of(device, path=tmp_path / "rows.npy")
    write_back([table], index(table, 3), [made_late(device, 9.0)])
    del table
    again = HostTable(ROWS, DIM, device="cpu", path=tmp_path / "rows.npy")
    assert again[2:5, 0].tolist() == [3, 9, 5]


# Rows ahead that nobody takes


def test_rows_of_a_batch_that_could_not_be_prepared_are_given_up() -> None:
    first, second = (HostEmbedding(ROWS, DIM, device=zero()) for _ in range(2))
    batches = [(torch.tensor([1]), torch.tensor([1])), (torch.tensor([2]), torch.tensor([-9]))]
    taken = []
    with pytest.raises(IndexError, match="index -9"):
        for one, other in Lookahead(batches, {first: lambda pair: pair[0], second: lambda pair: pair[1]}):
            taken.append((first(one).shape, second(other).shape))
    assert len(taken) == 1
    assert first._prepared == second._prepared == {}


@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_written_past_a_loop_that_stands_still_does_not_pile_up(depth: int) -> None:
    device = ZeroCopyDevice(1e-6)
    embedding = HostEmbedding(ROWS, 2, device=device, init=torch.zeros(ROWS, 2))
    optimizer = RowOptimizer(optim.SGD, embedding, lr=1.0)
    still = iter(embedding.lookahead([torch.tensor([row]) for row in range(4)], lambda ids: ids, depth=depth))
    embedding(next(still))
    held = []
    for _ in range(3):
        for _ in range(MOST_PATCHES * depth):
            embedding(torch.tensor([1, 2, 1])).sum().backward()
            optimizer.step()
        device.synchronize()
        device.empty(torch.Size((1,)), (1,), torch.int64)  # what was freed is counted at the next call
        held.append(device.allocated_bytes)
    assert held[1] == held[2] < held[0]
    steps = 3 * MOST_PATCHES * depth
    assert [embedding(ids)[0, 0].item() for ids in still] == [-2 * steps, -steps, 0]


@pytest.mark.parametrize("depth", [1, 4])
def test_rows_ahead_live_through_the_steps_of_their_own_loop(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    embedding = HostEmbedding(ROWS, DIM, device="cpu", init=torch.zeros(ROWS, DIM))
    optimizer = RowOptimizer(optim.SGD, embedding, lr=1.0)
    batches = [torch.tensor([row % ROWS]) for row in range(3 * MOST_PATCHES)]
    ahead, again = [], []
    drop = RowsAhead.drop
    monkeypatch.setattr(RowsAhead, "drop", lambda self: (again.append(self), drop(self)))
    for ids in embedding.lookahead(batches, lambda ids: ids, depth=depth):
        ahead.append(ids)
        embedding(ids)
        for _ in range(MOST_PATCHES):
            embedding(ids.clone()).sum().backward()
            optimizer.step()
    assert len(ahead) == len(batches)
    assert not again


# Training


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_a_loop_with_rows_ahead_is_the_loop_without(make: Any, depth: int) -> None:
    generator = torch.Generator().manual_seed(3)
    batches = [torch.randint(0, ROWS, (4,), generator=generator) for _ in range(12)]
    weights = [torch.randn(4, DIM, generator=generator) for _ in batches]

    def run(device: Any, depth: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        embedding = HostEmbedding(ROWS, DIM, device=device, init=table_of("cpu").host_tensor())
        optimizer = RowOptimizer(optim.Adagrad, embedding, lr=0.1)
        loop = embedding.lookahead(batches, lambda ids: ids, depth=depth) if depth else iter(batches)
        for ids, weight in zip(loop, weights, strict=True):
            (embedding(ids) * weight).pow(2).sum().backward()
            optimizer.step()
            if hasattr(device, "launch"):
                litter(device)
        return embedding.table.host_tensor(), {k: t.host_tensor() for k, t in optimizer.tables.items()}

    rows, state = run(make(), depth)
    expected, expected_state = run("cpu", 0)
    assert torch.equal(rows, expected)
    assert all(torch.equal(state[name], expected_state[name]) for name in itertools.chain(state, expected_state))
