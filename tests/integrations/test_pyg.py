"""PyTorch Geometric's graphs: same type, same attributes, packed; contracts C1, C2, C12, C16."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric import EdgeIndex, Index
from torch_geometric.data import Batch, Data, HeteroData, TemporalData
from torch_geometric.data import batch as batch_module
from torch_geometric.loader import DataListLoader, DataLoader

from prefetchpipe import GPUPrefetcher
from prefetchpipe.batch import flatten, unflatten
from prefetchpipe.batch.graphs import GraphSpec
from tests.support import (
    Readings,
    assert_same,
    constants,
    is_cuda,
    is_simulated,
    kernel,
    no_gc,
    run_script,
    script_environment,
    settle,
    to_plain,
)

pytestmark = pytest.mark.timeout(60)


def graph(number: int) -> Data:
    nodes = number + 2
    return Data(
        x=torch.arange(nodes * 3, dtype=torch.float32).view(nodes, 3) + 100 * number,
        edge_index=torch.stack([torch.arange(nodes), torch.arange(nodes).roll(1)]),
        y=torch.tensor([number]),
        name=f"graph {number}",
        rank=number,
    )


def hetero(number: int) -> HeteroData:
    data = HeteroData()
    data["paper"].x = torch.full((number + 1, 2), float(number))
    data["author"].x = torch.full((2, 3), float(number))
    data["author"].num_nodes = 2
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1], [0, number]])
    data["author", "writes", "paper"].weight = torch.tensor([0.5, number])
    data.label = torch.tensor([number])
    data.where = f"shard {number}"
    return data


class PairData(Data):
    """Two graphs in one, as in PyG's own advanced batching tutorial."""

    def __inc__(self, key: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        if key == "edge_index_s":
            return self.x_s.size(0)
        return self.x_t.size(0) if key == "edge_index_t" else super().__inc__(key, value, *args, **kwargs)


def pair(number: int) -> PairData:
    edges = torch.tensor([[0, 1], [1, 0]])
    return PairData(x_s=torch.rand(2 + number, 2), edge_index_s=edges, x_t=torch.rand(3, 2), edge_index_t=edges)


def events(number: int) -> TemporalData:
    count = torch.arange(5)
    return TemporalData(src=count, dst=count + number, t=count * 10, msg=torch.rand(5, 2))


def contents(data: Any) -> Any:
    """All public values as CPU tensors in plain containers, by storage."""
    return [(store.__dict__.get("_key"), to_plain(dict(store.items()))) for store in data.stores]


def on_device(device: Any, data: Any) -> bool:
    tensors = [value for store in data.stores for value in store.values() if isinstance(value, torch.Tensor)]
    return bool(tensors) and all(tensor.is_cuda == is_cuda(device) for tensor in tensors)


@pytest.mark.parametrize("make", [graph, hetero, pair], ids=["Data", "HeteroData", "subclass"])
def test_c12_batches_of_a_loader_are_those_of_the_plain_loop(device: Any, make: Any) -> None:
    loader = DataLoader([make(i) for i in range(10)], batch_size=4)
    plain = list(loader)
    out = list(GPUPrefetcher(loader, device))
    settle(device)
    assert [type(batch) for batch in out] == [type(batch) for batch in plain]
    assert all(isinstance(batch, Batch) for batch in out)
    for one, other in zip(out, plain, strict=True):
        assert one.keys() == other.keys()
        assert_same(contents(one), contents(other))
        assert on_device(device, one)
        assert (one.num_graphs, len(one)) == (other.num_graphs, len(other))


@pytest.mark.parametrize("make", [graph, hetero, pair], ids=["Data", "HeteroData", "subclass"])
def test_c12_a_batch_can_be_taken_apart_again(device: Any, make: Any) -> None:
    graphs = [make(i) for i in range(4)]
    loader = DataLoader(graphs, batch_size=4)
    ((plain,), (batch,)) = loader, GPUPrefetcher(loader, device)
    settle(device)
    parts, expected = batch.to_data_list(), plain.to_data_list()
    assert [type(part) for part in parts] == [type(one) for one in graphs]
    for part, one in zip(parts, expected, strict=True):
        assert_same(contents(part), contents(one))
        assert on_device(device, part)
    assert_same(contents(batch[2]), contents(expected[2]))


@pytest.mark.parametrize("make", [graph, hetero, pair, events])
def test_c12_single_graphs_and_the_source_stays_as_it_was(device: Any, make: Any) -> None:
    source = make(1)
    before, held = copy.deepcopy(source), dict(source.stores[0].items())
    first, second = GPUPrefetcher([source, source], device)
    settle(device)
    for out in (first, second):
        assert type(out) is type(source)
        assert_same(contents(out), contents(before))
        assert on_device(device, out)
        assert all(store.__dict__["_parent"]() is out for store in out.stores)
    assert all(source.stores[0][key] is value for key, value in held.items())
    assert_same(contents(source), contents(before))
    first.stores[0]["new"] = 1
    assert "new" not in second.stores[0]
    assert "new" not in source.stores[0]


def test_c16_graphs_are_packed(stream_device: Any) -> None:
    loader = DataLoader([hetero(i) for i in range(8)], batch_size=4)
    nbytes = [sum(v.nbytes for s in b.stores for v in s.values() if isinstance(v, torch.Tensor)) for b in loader]
    prefetcher = GPUPrefetcher(loader, stream_device)
    for _ in prefetcher:
        pass
    stats = prefetcher.stats()
    assert stats.staged_bytes >= sum(nbytes)
    assert stats.pageable_bytes == 0
    if is_simulated(stream_device):
        assert stream_device.copies == 2  # one slab a batch


def test_c12_private_and_cached_attributes_are_kept(device: Any) -> None:
    (source,) = DataLoader([graph(i) for i in range(3)], batch_size=3, follow_batch=["y"])
    assert source.is_node_attr("x")  # cached by name from here on
    source.stores[0].num_nodes = source.num_nodes
    (out,) = GPUPrefetcher([source], device)
    settle(device)
    private = {name for name in source.stores[0].__dict__ if name.startswith("_")}
    assert private == {name for name in out.stores[0].__dict__ if name.startswith("_")}
    assert {"_slice_dict", "_inc_dict", "_num_graphs", "_cached_attr"} <= private
    assert all(slices.is_cpu for slices in out._slice_dict.values())
    assert out.stores[0]._cached_attr == source.stores[0]._cached_attr
    out.stores[0].x = None  # takes the name out of the cache
    assert source.stores[0]._cached_attr != out.stores[0]._cached_attr
    assert out.ptr.tolist() == source.ptr.tolist()
    assert out.y_batch.tolist() == [0, 1, 2]


def test_c12_tensors_that_share_a_storage_still_do(device: Any) -> None:
    base = torch.arange(12.0).view(4, 3)
    (out,) = GPUPrefetcher([Data(x=base, pos=base[:, :2], edge_index=torch.zeros(2, 0, dtype=torch.int64))], device)
    settle(device)
    assert out.pos.data_ptr() == out.x.data_ptr()
    out.x.fill_(7)
    settle(device)
    assert out.pos.unique().tolist() == [7]


def test_c12_values_of_every_kind(device: Any) -> None:
    source = Data(
        x=torch.ones(3, 2), nothing=None, text="text", empty={}, array=np.arange(3), names=np.array(["a", "b"]),
        several=[torch.zeros(2), (torch.ones(1), "s")], nested={"a": torch.arange(3), "b": {"c": [1, 2]}},
        inner=Data(x=torch.full((2,), 5.0)),
        jagged=torch.nested.nested_tensor([torch.arange(2.0), torch.arange(3.0)], layout=torch.jagged),
    )  # fmt: skip
    (out,) = GPUPrefetcher([source], device)
    settle(device)
    assert_same(to_plain([out.several, out.nested, out.empty]), [source.several, source.nested, {}])
    assert_same(to_plain(out.array), torch.arange(3))
    assert out.names.tolist() == ["a", "b"]
    assert [row.tolist() for row in out.jagged.unbind()] == [[0, 1], [0, 1, 2]]
    assert type(out.inner) is Data
    assert out.inner.x.tolist() == [5, 5]
    assert out.text == "text"
    assert "nothing" not in out
    if is_cuda(device):
        assert all(tensor.is_cuda for tensor in (out.several[1][0], out.nested["a"], out.inner.x, out.array))


SPARSE = {
    "COO": lambda: torch.eye(4).to_sparse(),
    "COO, not coalesced": lambda: torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 1]]), torch.tensor([1.0, 2.0, 3.0]), (4,), check_invariants=True
    ),
    "CSR": lambda: torch.eye(4).to_sparse_csr(),
    "CSC": lambda: torch.eye(4).to_sparse_csc(),
    "BSR": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "BSC": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "without values": lambda: torch.zeros(4, 4).to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
@pytest.mark.parametrize("kind", list(SPARSE))
def test_c12_sparse_adjacency_matrices(device: Any, kind: str) -> None:
    source = SPARSE[kind]()
    prefetcher = GPUPrefetcher([Data(adj_t=source, x=torch.ones(4, 4)), Data(adj_t=source)], device)
    for out in list(prefetcher):
        settle(device)
        assert (type(out.adj_t), out.adj_t.layout, out.adj_t.shape) == (torch.Tensor, source.layout, source.shape)
        assert_same(to_plain(out.adj_t.to_dense()), source.to_dense())
        if source.layout is torch.sparse_coo:
            assert out.adj_t.is_coalesced() == source.is_coalesced()
        assert out.adj_t.is_cuda == is_cuda(device)
    values = source._values() if source.layout is torch.sparse_coo else source.values()
    assert prefetcher.stats().copied_bytes >= 64 + 2 * values.nbytes  # packed with all else, not moved by itself


def edges() -> EdgeIndex:
    return EdgeIndex([[0, 1, 1], [1, 0, 2]], sparse_size=(3, 3), sort_order="row")


@pytest.mark.parametrize("cached", ["nothing", "pointers", "transposed"])
def test_c12_index_tensors_keep_what_they_know(device: Any, cached: str) -> None:
    source = edges()
    if cached != "nothing":
        source.get_csr()
    if cached == "transposed":
        source.get_csc()
    index = Index([0, 1, 1], dim_size=3, is_sorted=True)
    (out,) = GPUPrefetcher([Data(edge_index=source, index=index, x=torch.ones(3))], device)
    settle(device)
    assert (type(out.edge_index), type(out.index)) == (EdgeIndex, Index)
    assert (out.edge_index.sparse_size(), out.edge_index.sort_order) == ((3, 3), source.sort_order)
    assert out.edge_index.as_tensor().tolist() == [[0, 1, 1], [1, 0, 2]]
    assert (out.index.dim_size, out.index.is_sorted, out.index.tolist()) == (3, True, [0, 1, 1])
    assert (out.edge_index._indptr is None) == (source._indptr is None)
    assert (out.edge_index._T_perm is None) == (source._T_perm is None)
    assert [part.tolist() for part in out.edge_index.get_csc()[0]] == [part.tolist() for part in edges().get_csc()[0]]
    assert out.edge_index.is_cuda == out.index.is_cuda == is_cuda(device)


def test_c12_index_tensors_in_a_batch(device: Any) -> None:
    graphs = [Data(x=torch.ones(3, 1), edge_index=edges()) for _ in range(3)]
    (batch,) = GPUPrefetcher(DataLoader(graphs, batch_size=3), device)
    settle(device)
    assert type(batch.edge_index) is EdgeIndex
    assert [part.edge_index.tolist() for part in batch.to_data_list()] == [edges().tolist()] * 3
    assert batch[1].edge_index.sparse_size() == (3, 3)


def test_c12_graphs_inside_other_containers(device: Any) -> None:
    graphs = [graph(i) for i in range(4)]
    ((first, *others),) = GPUPrefetcher(DataListLoader(graphs, batch_size=4), device)
    (mixed,) = GPUPrefetcher([{"graph": graphs[1], "weights": torch.rand(5), "again": graphs[1]}], device)
    settle(device)
    assert [type(one) for one in (first, *others)] == [Data] * 4
    assert_same([contents(one) for one in (first, *others)], [contents(one) for one in graphs])
    assert_same(contents(mixed["graph"]), contents(graphs[1]))


def test_c12_a_class_that_moves_itself_does_so(device: Any) -> None:
    class Own(Data):
        def to(self, device: Any, *args: Any, **kwargs: Any) -> Any:
            moved = super().to(device, *args, **kwargs)
            moved.note = "by its own way"
            return moved

    class OwnApply(Data):
        def apply(self, func: Any, *args: str) -> Any:
            self.note = "by its own way"
            return super().apply(func, *args)

    for cls in (Own, OwnApply):
        source = cls(x=torch.ones(2, 2))
        (out,) = GPUPrefetcher([source], device)
        settle(device)
        assert type(out) is cls
        assert out.note == "by its own way"
        assert out.x.tolist() == [[1, 1], [1, 1]]
        assert "note" not in source


def test_c2_every_batch_is_kept(device: Any) -> None:
    loader = DataLoader([graph(i) for i in range(24)], batch_size=2)
    kept = list(GPUPrefetcher(loader, device, depth=2))
    settle(device)
    assert_same([contents(batch) for batch in kept], [contents(batch) for batch in loader])


def test_c4_v4_a_slow_device_never_sees_another_batch(stream_device: Any, fetch: str) -> None:
    graphs = [Data(x=torch.full((512,), float(i + 1)), pos=torch.full((64, 2), float(i + 1))) for i in range(60)]
    readings = Readings(stream_device, 60)
    for index, batch in enumerate(GPUPrefetcher(DataLoader(graphs), stream_device, depth=3, fetch=fetch)):
        kernel(stream_device, lambda: None, seconds=0.005)
        readings.queue(index, batch.x, batch.pos)
        del batch
    assert readings.values() == constants(range(1, 61))


def test_c9_a_graph_goes_without_the_collector() -> None:
    (out,) = GPUPrefetcher([hetero(1)], "cpu")
    gone = weakref.ref(out)
    with no_gc():
        del out
        assert gone() is None


def test_a_graph_without_values_and_one_that_refers_to_itself(device: Any) -> None:
    empty, own = Data(), Data(x=torch.ones(2))
    own.me = own
    out, again = GPUPrefetcher([empty, own], device)
    settle(device)
    assert type(out) is Data
    assert len(out.keys()) == 0
    assert again.me is again
    assert again.x.tolist() == [1, 1]


def test_a_spec_travels_to_a_process_that_never_made_such_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = DataLoader([pair(i) for i in range(3)], batch_size=3)
    source.adjacency, source.edges = torch.eye(4).to_sparse_csc(), edges()
    leaves: list[Any] = []
    spec = flatten(source, leaves)
    assert type(spec) is GraphSpec
    sent = pickle.dumps(spec)
    monkeypatch.delattr(batch_module, "PairDataBatch")  # PyG keeps the classes of batches it has made there
    out = unflatten(pickle.loads(sent), leaves)
    assert type(out).__name__ == "PairDataBatch"
    assert isinstance(out, Batch)
    assert isinstance(out, PairData)
    assert_same([contents(part) for part in out.to_data_list()], [contents(part) for part in source.to_data_list()])
    assert_same(out.adjacency.to_dense(), torch.eye(4))
    assert out.edges.sparse_size() == (3, 3)


@pytest.mark.slow
def test_the_example() -> None:
    example = Path(__file__).resolve().parents[2] / "examples" / "pyg_graphs.py"
    done = subprocess.run(
        [sys.executable, str(example)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env=script_environment(CUDA_VISIBLE_DEVICES=""),
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    lines = {line[:16].strip(): line[16:] for line in done.stdout.splitlines()}
    assert float(lines["test accuracy"]) > 0.75


WITHOUT = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch_geometric", "tensordict", "transformers", "ray"):
            raise ModuleNotFoundError(f"{name} is not here", name=name)

sys.meta_path.insert(0, Blocked())

import torch
from prefetchpipe import GPUPrefetcher

class Movable:
    def __init__(self): self.x = torch.ones(2)
    def to(self, device): return self

Movable.to.__module__ = "torch_geometric.data.data"  # looks like the library's, and is none of its graphs
batches = [{"x": torch.full((3,), float(i)), "own": Movable()} for i in range(4)]
out = list(GPUPrefetcher(batches, "cpu"))
print([int(b["x"][0]) for b in out], {type(b["own"]).__name__ for b in out})
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("torch_geometric", "tensordict", "ray")))
"""


@pytest.mark.slow
def test_without_the_libraries(tmp_path: Path) -> None:
    done = run_script(tmp_path, WITHOUT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[0, 1, 2, 3] {'Movable'}", "[]"]
