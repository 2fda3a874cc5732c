"""Random schedules: a loop with rows ahead gives the bits of the loop without; a table is what a matrix would be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import optim

from prefetchpipe import GPUPrefetcher, HostEmbedding, HostTable
from prefetchpipe.tables import Lookahead, RowOptimizer
from prefetchpipe.tables.together import gather_ahead
from prefetchpipe.testing import SimulatedDevice
from tests.support_tables import ZeroCopyDevice, on_device

ROWS, DIM = 6, 4

OPTIMIZERS = {
    "Adam": (optim.Adam, {"lr": 0.1}),
    "Adagrad": (optim.Adagrad, {"lr": 0.1}),
    "SGD": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
}


def simulated(zero: bool, seed: int, bandwidth: float, seconds: float) -> Any:
    options: Any = {"seed": seed, "bandwidth": bandwidth}
    return ZeroCopyDevice(seconds, **options) if zero else SimulatedDevice(**options)


make_device = st.builds(
    simulated,
    st.booleans(),
    st.integers(0, 1000),
    st.sampled_from([1e4, 1e6, 1e9]),
    st.sampled_from([0.0, 1e-6, 1e-3]),
)
ids_lists = st.lists(st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=5), min_size=1, max_size=7)


def train(
    device: Any, batches: list[list[int]], name: str, *, depth: int, wrapped: bool, streams: bool
) -> list[torch.Tensor]:
    kind, options = OPTIMIZERS[name]
    start = torch.arange(ROWS * DIM, dtype=torch.float32).view(ROWS, DIM)
    embedding = HostEmbedding(ROWS, DIM, device=device, init=start)
    optimizer = RowOptimizer(kind, embedding, **options)
    source: Any = [torch.tensor(ids) for ids in batches]
    if wrapped:
        source = GPUPrefetcher(source, device, depth=2)
    loop = embedding.lookahead(source, lambda ids: ids, depth=depth) if depth else source
    for number, ids in enumerate(loop):
        optimizer.zero_grad()
        if isinstance(device, SimulatedDevice) and streams and number % 2:
            with device.use_stream(device.new_stream()):
                (embedding(ids) * (number + 1)).pow(2).mean().backward()
                optimizer.step()
        else:
            (embedding(ids) * (number + 1)).pow(2).mean().backward()
            optimizer.step()
    return [embedding.table.host_tensor(), *(table.host_tensor() for table in optimizer.tables.values())]


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(
    device=make_device,
    batches=ids_lists,
    name=st.sampled_from(sorted(OPTIMIZERS)),
    depth=st.integers(1, 4),
    wrapped=st.booleans(),
    streams=st.booleans(),
)
def test_rows_ahead_change_nothing(  # noqa: PLR0917
    device: Any, batches: list[list[int]], name: str, depth: int, wrapped: bool, streams: bool
) -> None:
    expected = train("cpu", batches, name, depth=0, wrapped=False, streams=False)
    for got, wanted in zip(
        train(device, batches, name, depth=depth, wrapped=wrapped, streams=streams), expected, strict=True
    ):
        assert torch.equal(got, wanted)


operations = st.lists(
    st.tuples(
        st.sampled_from(["gather", "scatter", "add", "host write", "ahead", "take"]),
        st.lists(st.integers(0, ROWS - 1), max_size=5),
        st.booleans(),
        st.integers(0, 2),
    ),
    max_size=14,
)


@pytest.mark.slow
@settings(max_examples=80, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(device=make_device, steps=operations)
def test_a_table_is_what_a_matrix_would_be(device: Any, steps: list[tuple[str, list[int], bool, int]]) -> None:
    model = torch.arange(ROWS * DIM, dtype=torch.float32).view(ROWS, DIM)
    table = HostTable(ROWS, DIM, device=device, init=model)
    streams = [device.default_stream, device.new_stream(), device.new_stream()]
    gathered: list[tuple[torch.Tensor, torch.Tensor]] = []
    ahead: list[tuple[Any, list[int]]] = []
    for number, (what, ids, resident, which) in enumerate(steps):
        values = torch.full((len(ids), DIM), float(number)) + torch.arange(len(ids))[:, None]
        with device.use_stream(streams[which]):
            index = on_device(device, torch.tensor(ids, dtype=torch.int64)) if resident else ids
            rows = on_device(device, values) if resident else values
            if what == "gather":
                gathered.append((table.gather(index), model[ids].clone()))
            elif what == "scatter":
                table.scatter(index, rows)
                for position, row in enumerate(ids):
                    model[row] = values[position]
            elif what == "add":
                table.scatter_add(index, rows)
                for position, row in enumerate(ids):
                    model[row] += values[position]
            elif what == "host write" and ids:
                table[ids[0]] = float(number)
                model[ids[0]] = float(number)
            elif what == "ahead":
                from prefetchpipe.tables.index import read_index

                wanted = sorted(set(ids))
                ahead.append((gather_ahead([table], table.place(read_index(wanted, ROWS, device))), wanted))
            elif what == "take" and ahead:
                taken, wanted = ahead.pop(0)
                gathered.append((taken.take()[0], model[wanted].clone()))
    device.synchronize()
    for got, expected in gathered:
        assert torch.equal(got.view(expected.shape), expected)
    assert torch.equal(table.host_tensor(), model)


# The iterator


def pairs(count: int) -> list[torch.Tensor]:
    return [torch.tensor([i % ROWS, (i + 1) % ROWS]) for i in range(count)]


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_every_batch_comes_and_none_is_pulled_early(depth: int, count: int) -> None:
    embedding = HostEmbedding(ROWS, DIM, device="cpu")
    pulled = 0

    def source() -> Any:
        nonlocal pulled
        for batch in pairs(count):
            pulled += 1
            yield batch

    seen = []
    for number, ids in enumerate(embedding.lookahead(source(), lambda ids: ids, depth=depth)):
        assert pulled <= number + 1 + depth
        seen.append(embedding(ids).shape)
    assert seen == [(2, DIM)] * count
    assert embedding._prepared == {}


@pytest.mark.parametrize("bad", ["loader", "id", "choose"])
def test_an_error_comes_after_the_batches_before_it(bad: str) -> None:
    embedding = HostEmbedding(ROWS, DIM, device="cpu")

    def source() -> Any:
        yield from pairs(3)
        if bad == "loader":
            raise KeyError("row 3")
        yield torch.tensor([ROWS]) if bad == "id" else torch.tensor([1, 1, 1])

    def choose(ids: torch.Tensor) -> torch.Tensor:
        if bad == "choose" and len(ids) == 3:
            raise KeyError("row 3")
        return ids

    seen = 0
    with pytest.raises(IndexError if bad == "id" else KeyError):
        for ids in embedding.lookahead(source(), choose, depth=3):
            embedding(ids)
            seen += 1
    assert seen == 3
    assert embedding._prepared == {}


def test_leaving_early_gives_everything_up() -> None:
    embedding = HostEmbedding(ROWS, DIM, device="cpu")
    for ids in embedding.lookahead(pairs(5), lambda ids: ids, depth=2):
        embedding(ids)
        break
    assert embedding._prepared == {}


def test_rows_that_nobody_asks_for_are_told_once() -> None:
    embedding = HostEmbedding(ROWS, DIM, device="cpu")

    def copies() -> None:
        for ids in embedding.lookahead(pairs(5), lambda ids: ids):
            embedding(ids.clone())

    with pytest.warns(RuntimeWarning, match="the very object") as caught:
        copies()
    assert len(caught) == 1
    assert embedding._prepared == {}


def test_ids_that_are_written_to_meanwhile_are_looked_up_again() -> None:
    embedding = HostEmbedding(ROWS, DIM, device="cpu")
    for ids in embedding.lookahead(pairs(4), lambda ids: ids):
        ids.add_(1).remainder_(ROWS)
        assert torch.equal(embedding(ids), embedding.table.host_tensor()[ids])
    for array in embedding.lookahead([p.numpy() for p in pairs(4)], lambda ids: ids):
        array[:] = 2
        assert torch.equal(embedding(array), embedding.table.host_tensor()[[2, 2]])


def test_several_embeddings_and_several_lookups() -> None:
    words, contexts = (HostEmbedding(ROWS, DIM, device="cpu") for _ in range(2))
    batches = [(a, b, c) for a, b, c in zip(pairs(4), pairs(4), pairs(4), strict=True)]
    loop = Lookahead(batches, {words: lambda b: b[0], contexts: lambda b: (b[1], b[2])})
    assert len(loop) == 4
    for word, positive, negative in loop:
        words(word)
        contexts(positive)
        contexts(negative)
    assert words._prepared == contexts._prepared == {}


@pytest.mark.parametrize(
    ("ids", "depth", "error"),
    [({}, 0, ValueError), ({}, 1.5, TypeError), ({}, True, TypeError), ({1: len}, 1, TypeError)],
)
def test_a_wrong_option_is_named(ids: Any, depth: Any, error: Any) -> None:
    with pytest.raises(error, match="must"):
        Lookahead([], ids, depth=depth)
