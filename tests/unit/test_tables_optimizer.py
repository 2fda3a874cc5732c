"""HostEmbedding and RowOptimizer: rows and state are those of a dense nn.Embedding, and where they are not."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

from prefetchpipe import GPUPrefetcher, HostEmbedding, HostTable
from prefetchpipe.errors import PrefetchWarning
from prefetchpipe.tables import RowOptimizer
from prefetchpipe.tables.updates import AtOnce
from prefetchpipe.testing import SimulatedDevice
from tests.support_tables import ZeroCopyDevice, on_device

ROWS, DIM = 12, 8

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "SGD dampening": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "Adagrad": (optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.2}),
    "Adagrad decay": (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    "Adadelta": (optim.Adadelta, {"lr": 1.0}),
    "Adamax": (optim.Adamax, {"lr": 0.05}),
    "RMSprop": (optim.RMSprop, {"lr": 0.05}),
    "RMSprop centered": (optim.RMSprop, {"lr": 0.05, "momentum": 0.5, "centered": True}),
    "Rprop": (optim.Rprop, {"lr": 0.05}),
    "ASGD": (optim.ASGD, {"lr": 0.1, "t0": 2.0, "lambd": 0.01}),
    "AdamW": (optim.AdamW, {"lr": 0.05, "weight_decay": 0.1}),
    "Adam": (optim.Adam, {"lr": 0.05}),
    "Adam amsgrad": (optim.Adam, {"lr": 0.05, "amsgrad": True, "weight_decay": 0.01, "maximize": True}),
    "NAdam": (optim.NAdam, {"lr": 0.05}),
    "RAdam": (optim.RAdam, {"lr": 0.05}),
}

NINE = ["SGD momentum", "Adagrad", "Adadelta", "Adamax", "RMSprop", "Rprop", "ASGD", "AdamW", "Adam"]


@pytest.fixture(params=["cpu", "staged", "zero copy"])
def device(request: pytest.FixtureRequest) -> Any:
    made = {"staged": SimulatedDevice(bandwidth=1e6), "zero copy": ZeroCopyDevice()}
    return made.get(request.param, request.param)


@pytest.fixture
def capturable_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch runs its capturable arithmetic on the CPU too, as it does on CUDA."""
    for name in ("optimizer", "adam", "adamax", "asgd", "adadelta", "rmsprop", "rprop"):
        module = importlib.import_module(f"torch.optim.{name}")
        monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda supports_xla=True: ["cpu"])
    return


def start() -> torch.Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))


def batches(every_row: bool, steps: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids, some repeated, and weights of the loss."""
    generator = torch.Generator().manual_seed(2)
    made = []
    for _ in range(steps):
        some = torch.randint(0, ROWS, (2, 5), generator=generator)
        ids = torch.cat([torch.randperm(ROWS, generator=generator), some[0], some[0, :2]]) if every_row else some
        made.append((ids, torch.randn(*ids.shape, DIM, generator=generator)))
    return made


def loss_of(out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (out * weight).pow(2).sum()


def train(embedding: HostEmbedding, optimizer: Any, data: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for ids, weight in data:
        optimizer.zero_grad()
        loss_of(embedding(ids), weight).backward()
        optimizer.step()


def trained(device: Any, name: str, data: Any, **more: Any) -> tuple[HostEmbedding, RowOptimizer]:
    kind, options = OPTIMIZERS[name]
    embedding = HostEmbedding(ROWS, DIM, device=device, init=start())
    optimizer = RowOptimizer(kind, embedding, **{**options, **more})
    train(embedding, optimizer, data)
    return embedding, optimizer


def dense(name: str, data: Any, **more: Any) -> tuple[nn.Embedding, Any]:
    kind, options = OPTIMIZERS[name]
    embedding = nn.Embedding(ROWS, DIM, _weight=start())
    optimizer = kind(embedding.parameters(), **{**options, **more})
    train(embedding, optimizer, data)  # type: ignore[arg-type]
    return embedding, optimizer


def lazy(name: str, data: Any, **more: Any) -> torch.Tensor:
    """The rule in its plainest form: an optimizer for every row, stepped when the row is in the batch."""
    kind, options = OPTIMIZERS[name]
    rows = [row.clone()[None].requires_grad_() for row in start()]
    steppers = [kind([row], **{**options, **more}) for row in rows]
    for ids, weight in data:
        loss_of(torch.cat(rows)[ids], weight).backward()
        for row in ids.unique().tolist():
            steppers[row].step()
        for row in rows:
            row.grad = None
    return torch.cat(rows).detach()


# Parity


@pytest.mark.slow  # torch loads its compiler at the first step
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_in_every_batch_are_trained_as_in_a_dense_embedding(device: Any, name: str) -> None:
    data = batches(every_row=True)
    embedding, optimizer = trained(device, name, data)
    reference, reference_optimizer = dense(name, data)
    assert torch.equal(embedding.table.host_tensor(), reference.weight)
    (state,) = reference_optimizer.state.values() or ({},)
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim():
            assert torch.equal(optimizer.tables[key].host_tensor(), value), key
        elif value is not None:
            assert optimizer.tables[key].host_tensor().tolist() == [[float(value)]] * ROWS, key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rare_rows_are_trained_as_if_each_had_an_optimizer_of_its_own(device: Any, name: str) -> None:
    data = batches(every_row=False)
    embedding, _ = trained(device, name, data)
    torch.testing.assert_close(embedding.table.host_tensor(), lazy(name, data), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adam amsgrad", "Adamax", "ASGD"])
def test_one_count_a_row_in_one_launch_is_torchs_capturable_arithmetic(
    device: Any, capturable_here: None, name: str
) -> None:
    """What runs on CUDA: all rows in one parameter, with a tensor of counts."""
    every, rare = batches(every_row=True), batches(every_row=False)
    embedding, optimizer = trained(device, name, every)
    assert isinstance(optimizer._update, AtOnce)
    reference, _ = dense(name, every, capturable=True, foreach=False)
    assert torch.equal(embedding.table.host_tensor(), reference.weight)
    assert optimizer.tables["step"].host_tensor().tolist() == [[6.0]] * ROWS
    embedding, _ = trained(device, name, rare)
    alone = lazy(name, rare, capturable=True, foreach=False)
    torch.testing.assert_close(embedding.table.host_tensor(), alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["SGD", *NINE])
def test_what_differs_from_dense_for_rows_that_are_not_in_a_batch(name: str) -> None:
    """Dense momentum and decay go on for an untouched row, and its count; here nothing happens to it."""
    first, second = batches(every_row=True, steps=1)[0], batches(every_row=False)[0]
    ids = second[0] % (ROWS - 1)  # the last row is left out
    data = [first, (ids, second[1])]
    embedding, optimizer = trained("cpu", name, data)
    after_first, _ = dense(name, [first])
    reference, _ = dense(name, data)
    row = embedding.table.host_tensor()[-1]
    assert torch.equal(row, after_first.weight[-1])
    moved = not torch.equal(reference.weight[-1], after_first.weight[-1])
    assert moved == (name in {"SGD momentum", "Adamax", "ASGD", "AdamW", "Adam"})
    if "step" in optimizer.tables:
        assert optimizer.tables["step"][-1].tolist() == [1.0]


@pytest.mark.parametrize("name", ["Adam", "Adamax", "ASGD", "AdamW", "Adagrad decay"])
def test_one_count_for_the_table(device: Any, name: str) -> None:
    data = batches(every_row=True)
    embedding, optimizer = trained(device, name, data, step_count="table")
    reference, _ = dense(name, data)
    assert torch.equal(embedding.table.host_tensor(), reference.weight)
    assert float(optimizer.state_dict()["state"]["step"]) == 6
    assert "step" not in optimizer.tables


def test_one_count_for_the_table_is_that_of_sparse_adam() -> None:
    """Which adds eps before the bias correction, so that the last digits differ."""
    data = batches(every_row=False)
    embedding, _ = trained("cpu", "Adam", data, step_count="table")
    reference = nn.Embedding(ROWS, DIM, sparse=True, _weight=start())
    train(reference, optim.SparseAdam(reference.parameters(), lr=0.05), data)  # type: ignore[arg-type]
    torch.testing.assert_close(embedding.table.host_tensor(), reference.weight.detach(), rtol=0, atol=1e-3)


def test_rows_with_equal_counts_share_one_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[list[int]] = []
    step = optim.Adam.step

    def watched(self: Any, closure: Any = None) -> Any:
        sizes.append([len(p) for p in self.param_groups[0]["params"]])
        return step(self, closure)

    monkeypatch.setattr(optim.Adam, "step", watched)
    embedding = HostEmbedding(ROWS, DIM, device="cpu")
    optimizer = RowOptimizer(optim.Adam, embedding, lr=0.1)
    for ids in ([0, 1, 2], [0, 1, 2, 3], [3, 4, 0]):
        embedding(torch.tensor(ids)).sum().backward()
        optimizer.step()
    assert sizes == [[3], [1, 3], [1, 1, 1]]


# Gradients


def test_repeated_ids_are_summed_in_the_gradient(device: Any) -> None:
    embedding = HostEmbedding(ROWS, DIM, device=device, init=start())
    optimizer = RowOptimizer(optim.SGD, embedding, lr=1.0)
    weight = torch.randn(7, DIM)
    ids = torch.tensor([3, 1, 3, 3, 0, 1, 3])
    (embedding(ids) * weight).sum().backward()
    optimizer.step()
    expected = nn.Embedding(ROWS, DIM, _weight=start())
    (expected(ids) * weight).sum().backward()
    assert torch.equal(embedding.table.host_tensor(), start() - expected.weight.grad)


@pytest.mark.parametrize("name", NINE)
def test_several_forward_passes_before_one_step_add_up(device: Any, name: str) -> None:
    kind, options = OPTIMIZERS[name]
    embedding = HostEmbedding(ROWS, DIM, device=device, init=start())
    optimizer = RowOptimizer(kind, embedding, **options)
    reference = nn.Embedding(ROWS, DIM, _weight=start())
    reference_optimizer = kind(reference.parameters(), **options)
    data = batches(every_row=True, steps=6)
    for (ids, weight), (more, other) in zip(data[::2], data[1::2], strict=True):
        for module in (embedding, reference):
            loss_of(module(ids), weight).backward()
            loss_of(module(more[:4]), other[:4]).backward()
        optimizer.step()
        reference_optimizer.step()
        reference_optimizer.zero_grad()
    assert torch.equal(embedding.table.host_tensor(), reference.weight)


def test_two_lookups_in_one_loss_add_up() -> None:
    embedding = HostEmbedding(ROWS, DIM, device="cpu", init=start())
    optimizer = RowOptimizer(optim.SGD, embedding, lr=1.0)
    (embedding(torch.tensor([1, 2])) * embedding(torch.tensor([2, 1]))).sum().backward()
    optimizer.step()
    weight = start().requires_grad_()
    (weight[[1, 2]] * weight[[2, 1]]).sum().backward()
    torch.testing.assert_close(embedding.table.host_tensor(), (start() - weight.grad), rtol=1e-6, atol=1e-6)


def test_a_step_after_the_table_was_written_to_loses_no_update(device: Any) -> None:
    """Two forward passes, then two steps: the second one works on the rows as the first one left them."""
    embedding = HostEmbedding(ROWS, DIM, device=device, init=start())
    optimizer = RowOptimizer(optim.SGD, embedding, lr=1.0)
    first, second = embedding(torch.tensor([1, 2])), embedding(torch.tensor([2, 3]))
    first.sum().backward()
    optimizer.step()
    second.sum().backward()
    optimizer.step()
    embedding.table.scatter([5], torch.zeros(1, DIM))
    expected = start()
    expected[[1, 3]] -= 1
    expected[2] -= 1
    expected[2] -= 1
    expected[5] = 0
    assert torch.equal(embedding.table.host_tensor(), expected)


def test_gradients_are_used_once_and_can_be_given_up() -> None:
    embedding = HostEmbedding(ROWS, DIM, device="cpu", init=start())
    optimizer = RowOptimizer(optim.SGD, embedding, lr=1.0)
    embedding(torch.tensor([1])).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(embedding.table.host_tensor(), start())
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    optimizer.step()
    assert torch.equal(embedding.table.host_tensor()[1], start()[1] - 1)


def test_forward_without_backward_leaves_nothing_behind() -> None:
    embedding = HostEmbedding(ROWS, DIM, device="cpu")
    for _ in range(3):
        embedding(torch.tensor([1, 2]))
        with torch.no_grad():
            assert not embedding(torch.tensor([1])).requires_grad
        with torch.inference_mode():
            embedding(torch.tensor([1]))
    gc.collect()
    assert embedding.take_active() == []
    assert list(embedding.parameters()) == []


def test_an_empty_batch_and_a_batch_of_any_shape(device: Any) -> None:
    embedding = HostEmbedding(ROWS, DIM, device=device, init=start())
    optimizer = RowOptimizer(optim.Adam, embedding, lr=1.0)
    empty = embedding(torch.zeros(0, 3, dtype=torch.int64))
    assert empty.shape == (0, 3, DIM)
    empty.sum().backward()
    optimizer.step()
    assert torch.equal(embedding.table.host_tensor(), start())
    ids = torch.tensor([[[1, 2], [2, 3]]])
    assert torch.equal(embedding(ids), start()[ids])
    assert torch.equal(embedding(ids.numpy()), start()[ids])
    assert torch.equal(embedding(3), start()[3])


def test_ids_on_the_device(device: Any) -> None:
    embedding = HostEmbedding(ROWS, DIM, device=device, init=start())
    optimizer = RowOptimizer(optim.Adamax, embedding, lr=0.1)
    reference = HostEmbedding(ROWS, DIM, device="cpu", init=start())
    other = RowOptimizer(optim.Adamax, reference, lr=0.1)
    for ids, weight in batches(every_row=False):
        loss_of(embedding(on_device(device, ids)), weight).backward()
        loss_of(reference(ids), weight).backward()
        optimizer.step()
        other.step()
    assert torch.equal(embedding.table.host_tensor(), reference.table.host_tensor())


def test_an_id_out_of_range_is_named(device: Any) -> None:
    embedding = HostEmbedding(ROWS, DIM, device=device)
    with pytest.raises(IndexError, match=r"index 12 at position \(0, 1\)"):
        embedding(torch.tensor([[0, ROWS]]))


def test_with_a_closure_and_a_learning_rate_schedule() -> None:
    embedding = HostEmbedding(ROWS, DIM, device="cpu", init=start())
    optimizer = RowOptimizer(optim.SGD, embedding, lr=1.0)
    schedule = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = embedding(torch.tensor([1])).sum()
        loss.backward()
        return loss

    losses = []
    for _ in range(3):
        losses.append(float(optimizer.step(closure).detach()))
        schedule.step()
    torch.testing.assert_close(embedding.table.host_tensor()[1], start()[1] - 1.75)
    assert losses[0] == pytest.approx(float(start()[1].sum()))


SCHEDULES = {
    "warm-up": lambda optimizer: optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 * (step + 1)),
    "one cycle": lambda optimizer: optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8),
}


@pytest.mark.slow
@pytest.mark.parametrize("step_count", ["row", "table"])
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *((name, "warm-up") for name in NINE),
        *(
            (name, "one cycle")
            for name in ("SGD", "SGD dampening", "SGD momentum", "RMSprop", "Adamax", "AdamW", "Adam")
        ),
    ],
)
def test_under_a_schedule_too_rows_are_those_of_a_dense_embedding(name: str, schedule: str, step_count: str) -> None:
    """Rprop and ASGD start from the rate of the first step; one cycle switches momentum on after construction."""
    if name == "SGD dampening" and step_count == "table":
        pytest.skip("not known for it")
    kind, options = OPTIMIZERS[name]
    options = {**options, "momentum": 0.0} if name == "SGD dampening" else options
    embedding = HostEmbedding(ROWS, DIM, device="cpu", init=start())
    reference = nn.Embedding(ROWS, DIM, _weight=start())
    optimizers = [
        RowOptimizer(kind, embedding, step_count=step_count, **options),  # type: ignore[arg-type]
        kind(reference.parameters(), **options),
    ]
    schedules = [SCHEDULES[schedule](optimizer) for optimizer in optimizers]
    for batch in batches(every_row=True):
        for module, optimizer, rates in zip((embedding, reference), optimizers, schedules, strict=True):
            train(module, optimizer, [batch])  # type: ignore[arg-type]
            rates.step()
    assert torch.equal(embedding.table.host_tensor(), reference.weight)


@pytest.mark.parametrize("name", ["Rprop", "ASGD"])
def test_a_row_starts_with_the_rate_of_its_own_first_step(device: Any, capturable_here: None, name: str) -> None:
    kind, options = OPTIMIZERS[name]
    embedding = HostEmbedding(ROWS, DIM, device=device, init=start())
    optimizer = RowOptimizer(kind, embedding, **options)
    alone = start()[[2]].requires_grad_()
    for rate in (0.5, 0.25):
        optimizer.param_groups[0]["lr"] = rate
        train(embedding, optimizer, [(torch.tensor([1]), torch.ones(1, DIM))])
    stepper = kind([alone], **{**options, "lr": 0.25})
    for _ in range(2):
        train(embedding, optimizer, [(torch.tensor([2]), torch.ones(1, DIM))])
        stepper.zero_grad()
        alone.pow(2).sum().backward()
        stepper.step()
    torch.testing.assert_close(embedding.table.host_tensor()[[2]], alone.detach(), rtol=1e-6, atol=1e-7)


def test_resuming_with_momentum_that_a_schedule_switched_on() -> None:
    def make() -> Any:
        embedding = HostEmbedding(ROWS, DIM, device="cpu", init=start())
        optimizer = RowOptimizer(optim.SGD, embedding, lr=0.1)
        return embedding, optimizer, SCHEDULES["one cycle"](optimizer)

    data = batches(every_row=False)
    embedding, optimizer, schedule = make()
    again, other, rates = make()
    for step, batch in enumerate(data):
        if step == 3:
            again.load_state_dict(embedding.state_dict())
            other.load_state_dict(optimizer.state_dict())
            rates.load_state_dict(schedule.state_dict())
        train(embedding, optimizer, [batch])
        schedule.step()
        if step >= 3:
            train(again, other, [batch])
            rates.step()
    assert torch.equal(again.table.host_tensor(), embedding.table.host_tensor())
    assert not torch.equal(again.table.host_tensor(), start())


def test_gradients_that_were_given_up_do_not_come_back() -> None:
    embedding = HostEmbedding(ROWS, DIM, device="cpu", init=start())
    optimizer = RowOptimizer(optim.SGD, embedding, lr=1.0)
    for give_up in (optimizer.zero_grad, embedding.zero_grad):
        before = embedding.table.host_tensor().clone()
        loss = embedding(torch.tensor([1])).sum()
        loss.backward(retain_graph=True)
        give_up()
        loss.backward()
        optimizer.step()
        assert torch.equal(embedding.table.host_tensor()[1], before[1] - 1)


def test_without_an_optimizer_no_gradients_are_kept() -> None:
    embedding = HostEmbedding(ROWS, DIM, device="cpu", init=start())
    optimizer = RowOptimizer(optim.SGD, embedding, lr=1.0)
    del optimizer
    for _ in range(3):
        embedding(torch.tensor([1])).sum().backward()
    assert embedding.take_active() == []


def test_a_further_group_of_parameters_is_refused() -> None:
    optimizer = RowOptimizer(optim.SGD, HostTable(2, 2, device="cpu"), lr=1.0)
    with pytest.raises(TypeError, match="trains the rows of one table"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_optimizer_is_not_copied_half(twin: Any) -> None:
    with pytest.raises(TypeError, match="use state_dict"):
        twin(RowOptimizer(optim.SGD, HostTable(2, 2, device="cpu"), lr=1.0))


def test_updates_by_hand(device: Any) -> None:
    table = HostTable(ROWS, DIM, device=device, init=start())
    optimizer = RowOptimizer(optim.Adam, table, lr=0.1)
    reference = start().requires_grad_()
    other = optim.Adam([reference], lr=0.1)
    for _ in range(3):
        ids = torch.cat([torch.randperm(ROWS), torch.tensor([1, 1])]).view(2, -1)
        grad = torch.randn(*ids.shape, DIM)
        optimizer.update(ids, on_device(device, grad) if device != "cpu" else grad)
        reference.grad = torch.zeros(ROWS, DIM).index_add_(0, ids.view(-1), grad.view(-1, DIM))
        other.step()
    torch.testing.assert_close(table.host_tensor(), reference.detach(), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"grad must be torch.float32 of shape \(1, 8\)"):
        optimizer.update([1], torch.zeros(8))
    if device != "cpu":
        before = table.host_tensor().clone()
        with pytest.raises(ValueError, match="grad must be on simulated, not on cpu"):
            optimizer.update([1], torch.zeros(1, 8))
        assert torch.equal(table.host_tensor(), before)
    with pytest.raises(RuntimeError, match="call update"):
        optimizer.step()


@pytest.mark.parametrize("closed", ["rows", "exp_avg"])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_after_a_table_was_closed_is_refused(device: Any, closed: str, ahead: bool) -> None:
    embedding = HostEmbedding(ROWS, DIM, device=device, init=start())
    optimizer = RowOptimizer(optim.Adam, embedding, lr=0.1)
    for ids in embedding.lookahead([torch.tensor([1, 2, 1])], lambda ids: ids) if ahead else [torch.tensor([1, 2, 1])]:
        embedding(ids).sum().backward()
    tables = {"rows": embedding.table, **optimizer.tables}
    tables.pop(closed).close()
    before = {name: table.host_tensor().clone() for name, table in tables.items()}
    with pytest.raises(RuntimeError, match="this HostTable was closed"):
        optimizer.step()
    assert all(torch.equal(table.host_tensor(), before[name]) for name, table in tables.items())


# State


@pytest.mark.slow
@pytest.mark.parametrize("step_count", ["row", "table"])
@pytest.mark.parametrize("name", NINE)
def test_resuming_from_a_checkpoint_is_as_going_on(tmp_path: Path, name: str, step_count: str) -> None:
    kind, options = OPTIMIZERS[name]
    data = batches(every_row=False, steps=8)
    straight, straight_optimizer = trained("cpu", name, data, step_count=step_count)
    embedding, optimizer = trained("cpu", name, data[:4], step_count=step_count)
    optimizer.param_groups[0]["lr"] = options["lr"]
    torch.save([embedding.state_dict(), optimizer.state_dict()], tmp_path / "checkpoint.pt")

    resumed = HostEmbedding(ROWS, DIM, device="cpu")
    again = RowOptimizer(kind, resumed, **{**options, "lr": 9.0}, step_count=step_count)
    weights, state = torch.load(tmp_path / "checkpoint.pt")
    resumed.load_state_dict(weights)
    again.load_state_dict(state)
    assert again.param_groups[0]["lr"] == options["lr"]
    train(resumed, again, data[4:])
    assert torch.equal(resumed.table.host_tensor(), straight.table.host_tensor())
    for key, table in again.tables.items():
        assert torch.equal(table.host_tensor(), straight_optimizer.tables[key].host_tensor()), key


@pytest.mark.slow
def test_resuming_an_optimizer_that_is_not_known(tmp_path: Path) -> None:
    data = batches(every_row=False, steps=8)
    straight, _ = trained("cpu", "NAdam", data)
    embedding, optimizer = trained("cpu", "NAdam", data[:4])
    state = copy.deepcopy(optimizer.state_dict())
    other = RowOptimizer(optim.NAdam, embedding, lr=0.05)
    other.load_state_dict(state)
    train(embedding, other, data[4:])
    assert torch.equal(embedding.table.host_tensor(), straight.table.host_tensor())


def test_the_checkpoint_is_that_of_an_embedding() -> None:
    embedding = HostEmbedding(ROWS, DIM, device="cpu", init=start())
    model = nn.Sequential(embedding, nn.Linear(DIM, 2))
    other = nn.Sequential(nn.Embedding(ROWS, DIM), nn.Linear(DIM, 2))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other[0].weight, start())
    with torch.no_grad():
        other[0].weight.fill_(3)
    model.load_state_dict(other.state_dict())
    assert torch.equal(embedding.table.host_tensor(), torch.full((ROWS, DIM), 3.0))
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight"):
        model.load_state_dict({k: v for k, v in other.state_dict().items() if k != "0.weight"})
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        model.load_state_dict({**other.state_dict(), "0.weight": torch.zeros(2, 2)})


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_of_the_module_trains_apart(twin: Any) -> None:
    embedding, optimizer = trained("cpu", "Adam", batches(every_row=False))
    other = twin(embedding)
    before = other.table.host_tensor().clone()
    train(embedding, optimizer, batches(every_row=False))
    assert torch.equal(other.table.host_tensor(), before)
    train(other, RowOptimizer(optim.Adam, other, lr=0.1), batches(every_row=False))
    assert not torch.equal(other.table.host_tensor(), before)


def test_state_that_does_not_fit_changes_nothing() -> None:
    embedding, optimizer = trained("cpu", "Adam", batches(every_row=False))
    state = copy.deepcopy(optimizer.state_dict())
    other = RowOptimizer(optim.Adamax, embedding, lr=0.1)
    with pytest.raises(ValueError, match="another optimizer; they differ in"):
        other.load_state_dict(state)
    state["state"]["exp_avg"] = torch.zeros(3, 3)
    before = optimizer.tables["exp_avg"].host_tensor().clone()
    with pytest.raises(ValueError, match=r"'exp_avg' must have shape \(12, 8\), not \(3, 3\)"):
        optimizer.load_state_dict(state)
    assert torch.equal(optimizer.tables["exp_avg"].host_tensor(), before)


@pytest.mark.slow
def test_state_in_mapped_files(tmp_path: Path) -> None:
    path = tmp_path / "rows.npy"
    data = batches(every_row=False, steps=8)
    straight, _ = trained("cpu", "Adam", data)
    for part in (data[:4], data[4:]):
        init = start() if part is data[:4] or not path.exists() else None
        embedding = HostEmbedding(ROWS, DIM, device="cpu", init=init, path=path)
        optimizer = RowOptimizer(optim.Adam, embedding, lr=0.05, path=tmp_path)
        train(embedding, optimizer, part)
        del embedding, optimizer
        gc.collect()
    assert np.array_equal(np.load(path), straight.table.numpy())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["exp_avg.npy", "exp_avg_sq.npy", "rows.npy", "step.npy"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "step_count"),
    [("NAdam", "row"), ("SGD dampening", "row"), ("Adam", "table"), ("ASGD", "table"), ("ASGD", "row")],
)
def test_state_in_mapped_files_is_gone_on_with(tmp_path: Path, name: str, step_count: str) -> None:
    """Also state that is found out at the first step, and a count of the whole table."""
    kind, options = OPTIMIZERS[name]
    data = batches(every_row=False, steps=8)
    straight, _ = trained("cpu", name, data, step_count=step_count)
    embedding = HostEmbedding(ROWS, DIM, device="cpu", init=start())
    for part in (data[:3], data[3:4], data[4:]):
        optimizer = RowOptimizer(kind, embedding, path=tmp_path / "a" / "folder", step_count=step_count, **options)
        train(embedding, optimizer, part)
        del optimizer
        gc.collect()
    assert torch.equal(embedding.table.host_tensor(), straight.table.host_tensor())


@pytest.mark.parametrize("where", ["mapped", "pageable"])
@pytest.mark.parametrize("name", ["Adagrad", "Adam", "NAdam"])
def test_page_locked_rows_with_state_elsewhere(tmp_path: Path, name: str, where: str) -> None:
    """Kernels find the distinct ids and pad them; the state's rows are moved by the host."""
    more: dict[str, Any] = {"path": tmp_path} if where == "mapped" else {"max_pinned_bytes": 0}
    data = batches(every_row=False)
    if where == "pageable":
        with pytest.warns(PrefetchWarning, match="page-locked"):
            embedding, optimizer = trained(ZeroCopyDevice(), name, data, **more)
    else:
        embedding, optimizer = trained(ZeroCopyDevice(), name, data, **more)
    assert embedding.table.pinned
    assert not optimizer.tables["sum" if name == "Adagrad" else "exp_avg"].pinned
    reference, reference_optimizer = trained("cpu", name, data)
    assert torch.equal(embedding.table.host_tensor(), reference.table.host_tensor())
    for key, table in reference_optimizer.tables.items():
        assert torch.equal(optimizer.tables[key].host_tensor(), table.host_tensor()), key


def test_two_optimizers_in_one_folder_are_told(tmp_path: Path) -> None:
    first, second = (HostEmbedding(ROWS, DIM, device="cpu") for _ in range(2))
    optimizer = RowOptimizer(optim.Adam, first, path=tmp_path)
    with pytest.warns(PrefetchWarning, match="of another RowOptimizer that is in use"):
        RowOptimizer(optim.Adam, second, path=tmp_path)
    optimizer = RowOptimizer(optim.Adam, second, path=tmp_path / "second")
    again = RowOptimizer(optim.Adam, second, path=tmp_path / "second")  # a newer one takes over
    assert again.tables.keys() == optimizer.tables.keys()


# What is not taken


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (("Adam",), {}, TypeError, "kind must be a class of torch.optim"),
        ((optim.LBFGS,), {}, TypeError, "kind must be row-wise .* LBFGS does not"),
        ((optim.SparseAdam,), {}, TypeError, "kind must be row-wise"),
        ((optim.Adam,), {"lr": -1}, ValueError, "Invalid learning rate"),
        ((optim.Adam,), {"learning_rate": 1}, TypeError, "learning_rate"),
        ((optim.Adam,), {"fused": True}, ValueError, "fused=True cannot be asked for"),
        ((optim.Adam,), {"step_count": "column"}, ValueError, "step_count must be 'row' or 'table', not 'column'"),
        ((optim.NAdam,), {"step_count": "table"}, ValueError, "not known for NAdam"),
    ],
)
def test_a_wrong_option_is_named(arguments: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        RowOptimizer(arguments[0], HostTable(2, 2, device="cpu"), **options)


def test_targets_that_cannot_be_trained() -> None:
    with pytest.raises(TypeError, match="target must be a HostEmbedding or a HostTable"):
        RowOptimizer(optim.SGD, nn.Embedding(2, 2), lr=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="floating point"):
        RowOptimizer(optim.SGD, HostTable(2, 2, torch.int64, "cpu"), lr=1)
    with pytest.raises(TypeError, match="floating point"):
        HostEmbedding(2, 2, dtype=torch.int64, device="cpu", init="zeros")
    with pytest.raises(ValueError, match=r"table must have shape \(3, 2\), not \(2, 2\)"):
        HostEmbedding(3, 2, table=HostTable(2, 2, device="cpu"))


def test_rows_ahead_of_static_batches_are_refused() -> None:
    """The batch ahead is written over the one handed out, whose ids would be those of another."""
    embedding = HostEmbedding(ROWS, DIM, device="cpu", init=start())
    loaders = [GPUPrefetcher([torch.tensor([1]), torch.tensor([2])], "cpu", static=static) for static in (True, False)]
    with pytest.raises(ValueError, match="static=True"):
        embedding.lookahead(loaders[0], lambda ids: ids)
    rows = [embedding(ids) for ids in embedding.lookahead(loaders[1], lambda ids: ids)]
    assert torch.equal(torch.cat(rows), start()[1:3])


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_rows_ahead_serve_steps_in_and_out_of_inference_mode(device: Any, name: str, resident: bool) -> None:
    """A trial batch before training: the rows of the next one are made by the same `next`."""
    kind, options = OPTIMIZERS[name]
    trained_rows = []
    for depth in (0, 1, 2):
        embedding = HostEmbedding(ROWS, DIM, device=device, init=start())
        optimizer = RowOptimizer(kind, embedding, **options)
        given = [torch.tensor([row, row + 1, row]) for row in range(6)]
        if resident and device != "cpu":
            given = [on_device(device, ids) for ids in given]
        with torch.inference_mode():
            given[2] = given[2] if resident else given[2].clone()  # ids that were made in it
            loop = iter(embedding.lookahead(given, lambda ids: ids, depth=depth) if depth else given)
            embedding(next(loop))
        for number, ids in enumerate(loop):
            with torch.inference_mode(number == 2):
                loss = embedding(ids).pow(2).sum()
            if number != 2:
                loss.backward()
                optimizer.step()
        trained_rows.append(embedding.table.host_tensor())
    assert torch.equal(trained_rows[1], trained_rows[0])
    assert torch.equal(trained_rows[2], trained_rows[0])


class NotRowWise(optim.Optimizer):
    """Keeps one number for each column."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["columns"] = param.grad.abs().sum(0)
                with torch.no_grad():
                    param.sub_(param.grad)


def test_an_optimizer_that_is_not_row_wise_is_named_and_changes_nothing() -> None:
    embedding = HostEmbedding(ROWS, DIM, device="cpu", init=start())
    optimizer = RowOptimizer(NotRowWise, embedding)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match=r"NotRowWise is not row-wise: its state 'columns' has shape \(8,\)"):
        optimizer.step()
    assert torch.equal(embedding.table.host_tensor(), start())


def test_the_newest_optimizer_takes_the_gradients() -> None:
    embedding = HostEmbedding(ROWS, DIM, device="cpu", init=start())
    older = RowOptimizer(optim.SGD, embedding, lr=1.0)
    newer = RowOptimizer(optim.SGD, embedding, lr=1.0)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="newer RowOptimizer"):
        older.step()
    newer.step()
    assert torch.equal(embedding.table.host_tensor()[1], start()[1] - 1)


# Gradients of gradients


@pytest.mark.parametrize("resident", [False, True])
def test_a_gradient_has_a_gradient(device: Any, resident: bool) -> None:
    ids = torch.tensor([[3, 1, 3], [3, 0, 1]])
    weight = torch.randn(2, 3, DIM, generator=torch.Generator().manual_seed(5))
    results = []
    for module in (HostEmbedding(ROWS, DIM, device=device, init=start()), nn.Embedding(ROWS, DIM, _weight=start())):
        out = module(on_device(device, ids) if resident and isinstance(module, HostEmbedding) else ids)
        rows = out.grad_fn.next_functions[0][0].variable
        (grad,) = torch.autograd.grad((out * weight).pow(3).sum(), rows, create_graph=True)
        (second,) = torch.autograd.grad(grad.pow(2).sum(), rows)
        results.append(second if isinstance(module, HostEmbedding) else second[[0, 1, 3]])
    torch.testing.assert_close(results[0][results[0].any(1)], results[1])  # where kernels find the ids, PAD is between


def test_a_graph_that_is_kept_gives_its_gradients_again(device: Any) -> None:
    embedding = HostEmbedding(ROWS, DIM, device=device, init=start())
    optimizer = RowOptimizer(optim.SGD, embedding, lr=1.0)
    loss = embedding(torch.tensor([1, 1, 2])).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()
    assert torch.equal(embedding.table.host_tensor()[[1, 2]], start()[[1, 2]] - torch.tensor([[4.0], [2.0]]))
