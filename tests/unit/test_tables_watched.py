"""Steps without torch's frame: whoever looks into them still sees them, and what is cached follows what it is of."""

from __future__ import annotations

import ctypes
import importlib
from collections import ChainMap
from typing import Any

import pytest
import torch
from torch import optim
from torch.optim.adam import adam
from torch.optim.optimizer import register_optimizer_step_post_hook

from prefetchpipe import HostEmbedding
from prefetchpipe.device.arguments import Arguments
from prefetchpipe.tables import RowOptimizer
from prefetchpipe.tables.rules import READ, rule_for
from tests.support_tables import ZeroCopyDevice


def step(embedding: HostEmbedding, optimizer: RowOptimizer) -> None:
    embedding(torch.tensor([1, 2, 1])).sum().backward()
    optimizer.step()


def test_hooks_see_every_step() -> None:
    embedding = HostEmbedding(5, 2, device="cpu")
    optimizer = RowOptimizer(optim.SGD, embedding, lr=0.1)
    seen: list[Any] = []
    step(embedding, optimizer)
    handles = [
        optimizer.register_step_pre_hook(lambda who, args, kwargs: seen.append(("before", who, args))),
        optimizer.register_step_post_hook(lambda who, args, kwargs: seen.append(("after", who, args))),
        register_optimizer_step_post_hook(lambda who, args, kwargs: seen.append(("any", who, args))),
    ]
    step(embedding, optimizer)
    inner = optimizer._inner
    assert seen == [
        ("before", optimizer, (optimizer,)),
        ("any", inner, (inner,)),
        ("after", optimizer, (optimizer,)),
        ("any", optimizer, (optimizer,)),
    ]
    for handle in handles:
        handle.remove()
    handle = inner.register_step_pre_hook(lambda who, args, kwargs: seen.append("inner"))
    step(embedding, optimizer)
    handle.remove()
    step(embedding, optimizer)
    assert seen[4:] == ["inner"]


def test_a_profiler_sees_every_step() -> None:
    embedding = HostEmbedding(5, 2, device="cpu")
    optimizer = RowOptimizer(optim.SGD, embedding, lr=0.1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(embedding, optimizer)
    names = {event.key for event in profile.key_averages()}
    assert names >= {"Optimizer.step#RowOptimizer.step", "Optimizer.step#SGD.step"}


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.Adam])
def test_a_rule_reads_what_is_watched_for_changes(kind: Any) -> None:
    class Seen(ChainMap[str, Any]):
        def __getitem__(self, name: str) -> Any:
            read.add(name)
            return super().__getitem__(name)

    read: set[str] = set()
    rule_for(kind, Seen(kind([torch.zeros(1, requires_grad=True)]).defaults))
    assert read <= set(READ)


def test_numbers_that_grow_on_the_way_back_are_ordered_with_reads() -> None:
    device = ZeroCopyDevice()
    embedding = HostEmbedding(5, 2, device=device)
    optimizer = RowOptimizer(optim.Adagrad, embedding, lr=0.1)
    assert optimizer._counted is optimizer.tables["step"]
    assert optimizer.tables["step"] not in optimizer.tables_ahead()
    for number in range(1, 4):
        step(embedding, optimizer)
        assert optimizer.state_dict()["state"]["step"][:, 0].tolist() == [0, number, number, 0, 0]


def test_arguments_lie_where_the_driver_looks() -> None:
    tensor = torch.arange(3)
    first = Arguments.of((tensor, -1, 1 << 40))
    second = Arguments.of((7, 8, tensor[1:]))  # of a launch that is under way in another thread
    for arguments, wanted in ((first, [tensor.data_ptr(), -1, 1 << 40]), (second, [7, 8, tensor.data_ptr() + 8])):
        params = ctypes.cast(arguments.address, ctypes.POINTER(ctypes.POINTER(ctypes.c_longlong)))
        assert [params[k][0] for k in range(3)] == wanted
    second.leave()
    assert Arguments.of((1, 2, 3)) is second


@pytest.mark.parametrize("kind", [optim.Adam, optim.AdamW])
@pytest.mark.parametrize(
    "options",
    [{}, {"amsgrad": True, "weight_decay": 0.1}, {"maximize": True, "betas": (0.5, 0.9), "eps": 1e-3}],
    ids=["plain", "amsgrad", "maximize"],
)
def test_the_short_way_into_adam_is_that_of_its_class(
    kind: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA, one count a row; a hook on the class sees to it that its own ``step`` is called."""
    monkeypatch.setattr(
        importlib.import_module("torch.optim.adam"), "_get_capturable_supported_devices", lambda: ["cpu"]
    )
    monkeypatch.setattr("prefetchpipe.tables.optimizer._capturable_devices", lambda: ["cpu"])
    calls: list[str] = []
    monkeypatch.setattr(
        "prefetchpipe.tables.updates.adam", lambda *args, **given: (calls.append("short"), adam(*args, **given))
    )
    ended = []
    for is_watched in (False, True):
        embedding = HostEmbedding(5, 2, device="cpu", init=lambda rows: rows.copy_(torch.arange(10.0).view(5, 2)))
        optimizer = RowOptimizer(kind, embedding, lr=0.1, **options)
        if is_watched:
            optimizer._inner.register_step_pre_hook(lambda *_: calls.append("hook"))
        for batch in range(5):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + batch)
            embedding(torch.tensor([batch % 3, 4, batch % 3])).pow(2).sum().backward()
            optimizer.step()
        ended.append({"rows": embedding.table, **optimizer.tables})
    assert calls == ["short"] * 5 + ["hook"] * 5
    assert all(torch.equal(table.host_tensor(), ended[1][name].host_tensor()) for name, table in ended[0].items())
    assert ended[0]["step"][:, 0].tolist() == [2, 2, 1, 0, 5]


def test_adam_of_another_version_is_called_by_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.import_module("torch.optim.adam"), "_get_capturable_supported_devices", lambda: ["cpu"]
    )
    monkeypatch.setattr("prefetchpipe.tables.optimizer._capturable_devices", lambda: ["cpu"])
    monkeypatch.setattr("prefetchpipe.tables.updates._ADAM_IS_KNOWN", False)
    monkeypatch.setattr("prefetchpipe.tables.updates.adam", None)
    embedding = HostEmbedding(5, 2, device="cpu")
    optimizer = RowOptimizer(optim.Adam, embedding, lr=0.1)
    step(embedding, optimizer)
    assert optimizer.tables["step"][:, 0].tolist() == [0, 1, 1, 0, 0]
