"""Arguments, refused at construction where they are wrong; closing and what works after it; contracts C9, C15, C18."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch

from prefetchpipe import GPUPrefetcher, errors
from prefetchpipe.errors import IteratorClosedError
from tests.support import Source, collect, settle

pytestmark = pytest.mark.timeout(60)


def constant(index: int) -> torch.Tensor:
    return torch.full((8,), float(index))


class Untouchable:
    """Nothing of it may be used while the arguments are checked."""

    def __iter__(self) -> Any:
        raise AssertionError("pulled at construction")


WRONG: list[tuple[str, Any]] = [
    ("depth", 0),
    ("depth", -1),
    ("depth", 1.5),
    ("depth", "2"),
    ("depth", None),
    ("transform", 3),
    ("transform", "augment"),
    ("fetch", "process"),
    ("fetch", 1),
    ("fetch", None),
    ("workers", "fork"),
    ("workers", 4),
    ("copy_threads", 0),
    ("copy_threads", -2),
    ("copy_threads", 1.5),
    ("copy_threads", "all"),
    ("max_pinned_bytes", -1),
    ("max_pinned_bytes", "1G"),
    ("max_pinned_bytes", 1.5),
    ("static", "yes"),
    ("checked", "yes"),
    ("device", "tpu"),
    ("device", "cpuu"),
    ("device", "cuda:x"),
    ("device", 1.5),
    ("device", object),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{name}={value!r}" for name, value in WRONG])
def test_wrong_value_is_refused_at_construction_by_name(name: str, value: Any) -> None:
    arguments = {"device": "cpu", name: value}
    with pytest.raises((ValueError, TypeError)) as caught:
        GPUPrefetcher(Untouchable(), **arguments)
    message = str(caught.value)
    assert name in message
    shown = value if isinstance(value, str) else repr(value)
    assert shown in message


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("fetch", ["thread", "caller", "auto"]), ("workers", ["auto", "shared", "plain"]), ("depth", ["1"])],
)
def test_refusal_says_what_is_allowed(name: str, allowed: list[str]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        GPUPrefetcher([], "cpu", **{name: 0 if name == "depth" else "nonsense"})
    assert all(word in str(caught.value) for word in allowed)


@pytest.mark.parametrize("loader", [42, None, object(), 1.5])
def test_loader_that_is_not_iterable(loader: Any) -> None:
    with pytest.raises(TypeError, match="loader"):
        GPUPrefetcher(loader, "cpu")


def test_options_are_keywords() -> None:
    with pytest.raises(TypeError):
        GPUPrefetcher([], "cpu", 2)
    with pytest.raises(TypeError, match="dept"):
        GPUPrefetcher([], "cpu", dept=2)


def test_right_values_are_accepted(device: Any) -> None:
    for options in (
        {"depth": 1, "fetch": "auto", "workers": "auto"},
        {"depth": 64, "fetch": "thread", "workers": "plain", "copy_threads": 1},
        {"max_pinned_bytes": 1 << 30, "checked": True},
        {"transform": None, "copy_threads": None, "max_pinned_bytes": None, "static": False, "checked": False},
    ):
        prefetcher = GPUPrefetcher(Source(constant, 4), device, **options)
        assert [int(batch[3]) for batch in collect(device, prefetcher)] == [0, 1, 2, 3]


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "cpu:0"])
def test_ways_to_name_the_cpu(device: Any) -> None:
    assert [int(batch[0]) for batch in GPUPrefetcher([constant(4)], device)] == [4]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7", torch.device("cuda"), torch.device("cuda", 7)])
def test_c15_cuda_without_cuda_is_a_clear_error_at_construction(device: Any) -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"(?i)cuda"):
        GPUPrefetcher(Untouchable(), device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_c15_no_device_named_and_no_cuda_is_the_cpu() -> None:
    (batch,) = GPUPrefetcher([constant(4)])
    assert batch.device == torch.device("cpu")
    assert int(batch[0]) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_c18_cuda_index_out_of_range_is_a_clear_error_at_construction() -> None:
    count = torch.cuda.device_count()
    with pytest.raises((RuntimeError, ValueError), match=rf"cuda:{count + 3}"):
        GPUPrefetcher(Untouchable(), f"cuda:{count + 3}")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("device", [None, "cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0)])
def test_c18_ways_to_name_the_gpu(device: Any) -> None:
    (batch,) = GPUPrefetcher([constant(4)], device)
    assert batch.device == torch.device("cuda", 0)
    assert int(batch[0]) == 4


# The transform


@pytest.mark.parametrize("batch", [torch.ones(3), {"x": torch.ones(3)}, 0, [], "s"])
def test_transform_that_returns_nothing_is_named(device: Any, fetch: str, batch: Any) -> None:
    def augment(batch: Any) -> None:
        """Forgets its return."""

    iterator = iter(GPUPrefetcher([batch, batch], device, transform=augment, fetch=fetch))
    with pytest.raises(TypeError, match="transform"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


def test_transform_may_return_none_for_none(device: Any, fetch: str) -> None:
    assert list(GPUPrefetcher([None, 1, None], device, transform=lambda batch: batch, fetch=fetch)) == [None, 1, None]


def test_transform_may_change_the_structure(device: Any, fetch: str) -> None:
    def transform(batch: Any) -> Any:
        return {"image": batch[0], "rest": (batch[1], "s")}

    source = Source(lambda index: (constant(index), index), 6)
    kept = list(GPUPrefetcher(source, device, transform=transform, fetch=fetch))
    settle(device)
    assert [(int(b["image"][0]), b["rest"]) for b in kept] == [(index, (index, "s")) for index in range(6)]


# Closing


def test_c9_closed_prefetcher_is_iterable_again(device: Any, fetch: str) -> None:
    prefetcher = GPUPrefetcher(Source(constant, 6), device, fetch=fetch)
    for _ in range(3):
        head = collect(device, itertools.islice(prefetcher, 2))
        prefetcher.close()
        prefetcher.close()
        whole = collect(device, prefetcher)
        assert [int(batch[0]) for batch in head + whole] == [0, 1, 0, 1, 2, 3, 4, 5]


def test_c9_closed_before_the_first_pass(device: Any, fetch: str) -> None:
    prefetcher = GPUPrefetcher(Source(constant, 3), device, fetch=fetch)
    prefetcher.close()
    assert [int(batch[0]) for batch in collect(device, prefetcher)] == [0, 1, 2]


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_c9_closed_iterator_says_so(device: Any, fetch: str, taken: int) -> None:
    prefetcher = GPUPrefetcher(Source(constant, 12), device, depth=2, fetch=fetch)
    iterators = [iter(prefetcher), iter(prefetcher)]
    kept = [next(iterator) for iterator in iterators for _ in range(taken)]
    prefetcher.close()
    for iterator in iterators:
        with pytest.raises(IteratorClosedError):
            next(iterator)
    settle(device)
    assert [int(batch[0]) for batch in kept] == [*range(taken), *range(taken)]


def test_c9_close_in_the_body_ends_the_loop_with_an_error(device: Any, fetch: str) -> None:
    prefetcher = GPUPrefetcher(Source(constant, 12), device, fetch=fetch)
    seen = 0
    with pytest.raises(IteratorClosedError):
        for _ in prefetcher:
            seen += 1
            if seen == 3:
                prefetcher.close()
    assert seen == 3


def test_c9_with_statement(device: Any, fetch: str) -> None:
    with GPUPrefetcher(Source(constant, 6), device, fetch=fetch) as prefetcher:
        assert isinstance(prefetcher, GPUPrefetcher)
        iterator = iter(prefetcher)
        batch = next(iterator)
        settle(device)
        assert int(batch[0]) == 0
    with pytest.raises(IteratorClosedError):
        next(iterator)
    assert int(batch[0]) == 0


def test_c9_with_statement_lets_errors_through(device: Any) -> None:
    with pytest.raises(KeyError, match="mine"), GPUPrefetcher(Source(constant, 6), device) as prefetcher:
        for _ in prefetcher:
            raise KeyError("mine")


def test_error_tree() -> None:
    assert issubclass(errors.PrefetchError, Exception)
    for kind, base in (("IteratorClosedError", RuntimeError), ("CorruptBatchError", RuntimeError)):
        assert issubclass(getattr(errors, kind), errors.PrefetchError)
        assert issubclass(getattr(errors, kind), base)
    assert issubclass(errors.PinnedMemoryError, errors.PrefetchError)
    assert issubclass(errors.PrefetchWarning, RuntimeWarning)
    assert re.match(r"\S", errors.__doc__ or "")
