"""Beginning, failing, leaving: cases L1-L7; contracts C7 (errors), C9 (leaving), and what of C1 belongs to them."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from prefetchpipe import GPUPrefetcher
from prefetchpipe.errors import IteratorClosedError
from tests.support import (
    THREAD_PREFIX,
    TIMEOUT,
    Finished,
    Source,
    Surroundings,
    Thread,
    assert_same,
    collect,
    frame_names,
    is_simulated,
    join_ours,
    no_gc,
    our_threads,
    run_script,
    script_environment,
    settle,
    to_plain,
)

pytestmark = pytest.mark.timeout(90)


def constant(index: int) -> torch.Tensor:
    return torch.full((64,), float(index))


def first_values(batches: list[torch.Tensor]) -> list[int]:
    return [int(batch[0]) for batch in batches]


# Case L1, errors


class TwoArgumentsError(Exception):
    """Cannot be made again from its own `args`."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"row {row}: {reason}")
        self.row = row
        self.reason = reason


class KeywordOnlyError(Exception):
    def __init__(self, *, row: int) -> None:
        super().__init__()
        self.row = row


class FailsOnce:
    """Yields `good` batches and then raises, on the first pass only; three batches on later passes."""

    def __init__(self, good: int, error: Callable[[], BaseException]) -> None:
        self.good = good
        self.error = error
        self.passes = 0
        self.raised: BaseException | None = None
        self.raised_at = 0.0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.passes += 1
        return self.rows_of_the_loader(failing=self.passes == 1)

    def rows_of_the_loader(self, *, failing: bool) -> Iterator[torch.Tensor]:
        for index in range(self.good if failing else 3):
            yield constant(index)
        if failing:
            self.a_frame_of_the_loader()

    def a_frame_of_the_loader(self) -> None:
        self.raised = self.error()
        self.raised_at = time.monotonic()
        raise self.raised


ERRORS: dict[str, Callable[[], BaseException]] = {
    "KeyError": lambda: KeyError("row 2"),
    "two arguments": lambda: TwoArgumentsError(2, "torn"),
    "keyword only": lambda: KeywordOnlyError(row=2),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    "OSError": lambda: FileNotFoundError(2, "gone", "rows.bin"),
    "group": lambda: ExceptionGroup("two", [KeyError("a"), ValueError("b")]),
    "MemoryError": MemoryError,
    "StopAsyncIteration": StopAsyncIteration,
    "SystemExit": lambda: SystemExit(3),
    "GeneratorExit": GeneratorExit,
    "KeyboardInterrupt": KeyboardInterrupt,
    "CancelledError": asyncio.CancelledError,
}


@pytest.mark.parametrize("good", [0, 1, 2, 5])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_c7_l1_error_follows_all_good_batches(device: Any, fetch: str, depth: int, good: int) -> None:
    loader = FailsOnce(good, lambda: KeyError("row 2"))
    prefetcher = GPUPrefetcher(loader, device, depth=depth, fetch=fetch)
    iterator = iter(prefetcher)
    seen = []
    with pytest.raises(KeyError) as caught:
        for batch in iterator:
            seen.append(batch)  # noqa: PERF402  what came before the error counts
    assert time.monotonic() - loader.raised_at < 1.0
    settle(device)
    assert first_values(seen) == list(range(good))
    assert caught.value.args == ("row 2",)
    assert "a_frame_of_the_loader" in frame_names(caught.value.__traceback__)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)
    assert first_values(collect(device, prefetcher)) == [0, 1, 2]


@pytest.mark.parametrize("name", list(ERRORS))
def test_c7_l1_every_kind_of_error_arrives_as_itself(device: Any, fetch: str, name: str) -> None:
    loader = FailsOnce(2, ERRORS[name])
    prefetcher = GPUPrefetcher(loader, device, fetch=fetch)
    iterator = iter(prefetcher)
    seen = [next(iterator), next(iterator)]
    settle(device)
    assert first_values(seen) == [0, 1]
    with pytest.raises(BaseException) as caught:
        next(iterator)
    assert type(caught.value) is type(loader.raised)
    assert caught.value.args == loader.raised.args
    assert vars(caught.value) == vars(loader.raised)
    assert "a_frame_of_the_loader" in frame_names(caught.value.__traceback__)
    with pytest.raises(StopIteration):
        next(iterator)
    assert first_values(collect(device, prefetcher)) == [0, 1, 2]


def test_c7_l1_cause_and_notes_stay(fetch: str) -> None:
    def rows() -> Iterator[int]:
        yield 0
        try:
            {}["shard"]
        except KeyError as error:
            wrapped = RuntimeError("cannot read")
            wrapped.add_note("shard 7")
            raise wrapped from error

    iterator = iter(GPUPrefetcher(rows(), "cpu", fetch=fetch))
    assert next(iterator) == 0
    with pytest.raises(RuntimeError, match="cannot read") as caught:
        next(iterator)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.__notes__ == ["shard 7"]


def test_c7_l1_one_exception_object_raised_on_every_pass(fetch: str) -> None:
    error = ValueError("the same object")

    class Loader:
        def __iter__(self) -> Iterator[int]:
            yield 1
            raise error

    prefetcher = GPUPrefetcher(Loader(), "cpu", fetch=fetch)
    for _ in range(3):
        seen = []
        with pytest.raises(ValueError, match="the same object"):
            for batch in prefetcher:
                seen.append(batch)  # noqa: PERF402
        assert seen == [1]


class FailsAtIter:
    def __init__(self) -> None:
        self.passes = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.passes += 1
        if self.passes == 1:
            self.opens_the_file()
        return iter([constant(0), constant(1)])

    def opens_the_file(self) -> None:
        raise TwoArgumentsError(0, "cannot open")


def test_c7_l1_error_in_iter_of_the_loader(device: Any, fetch: str) -> None:
    prefetcher = GPUPrefetcher(FailsAtIter(), device, fetch=fetch)
    with pytest.raises(TwoArgumentsError) as caught:
        list(prefetcher)
    assert caught.value.reason == "cannot open"
    assert "opens_the_file" in frame_names(caught.value.__traceback__)
    assert first_values(collect(device, prefetcher)) == [0, 1]


@pytest.mark.parametrize("bad", [0, 2])
def test_c7_l1_error_in_the_transform(device: Any, fetch: str, bad: int) -> None:
    calls = itertools.count()

    def augments(batch: torch.Tensor) -> torch.Tensor:
        if next(calls) == bad:
            raise TwoArgumentsError(bad, "cannot augment")
        return batch

    prefetcher = GPUPrefetcher(Source(constant, 5), device, transform=augments, fetch=fetch)
    iterator = iter(prefetcher)
    seen = []
    with pytest.raises(TwoArgumentsError) as caught:
        for batch in iterator:
            seen.append(batch)  # noqa: PERF402
    settle(device)
    assert first_values(seen) == list(range(bad))
    assert caught.value.row == bad
    assert "augments" in frame_names(caught.value.__traceback__)
    with pytest.raises(StopIteration):
        next(iterator)
    assert first_values(collect(device, prefetcher)) == [0, 1, 2, 3, 4]


def test_c7_l1_stop_iteration_in_the_transform_is_an_error(device: Any, fetch: str) -> None:
    def transform(batch: torch.Tensor) -> torch.Tensor:
        raise StopIteration("not an end")

    iterator = iter(GPUPrefetcher(Source(constant, 3), device, transform=transform, fetch=fetch))
    with pytest.raises(RuntimeError) as caught:
        next(iterator)
    assert isinstance(caught.value.__cause__, StopIteration)
    with pytest.raises(StopIteration):
        next(iterator)


class CannotMove:
    def to(self, *args: Any, **kwargs: Any) -> Any:
        raise TwoArgumentsError(1, "cannot move")


def test_c7_l1_error_in_the_copy(device: Any, fetch: str) -> None:
    batches = [constant(0), constant(1), {"x": constant(2), "graph": CannotMove()}, constant(3)]
    iterator = iter(GPUPrefetcher(batches, device, fetch=fetch))
    seen = [next(iterator), next(iterator)]
    settle(device)
    assert first_values(seen) == [0, 1]
    with pytest.raises(TwoArgumentsError) as caught:
        next(iterator)
    assert caught.value.reason == "cannot move"
    assert "to" in frame_names(caught.value.__traceback__)
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.filterwarnings("ignore::prefetchpipe.errors.PrefetchWarning")
def test_c7_l1_batch_that_fits_no_device_memory(fetch: str) -> None:
    from prefetchpipe.testing import SimulatedDevice

    device = SimulatedDevice(memory_limit=1 << 20)
    batches = [constant(0), constant(1), torch.zeros(1 << 20), constant(3)]
    prefetcher = GPUPrefetcher(batches, device, fetch=fetch)
    iterator = iter(prefetcher)
    seen = [next(iterator), next(iterator)]
    settle(device)
    assert first_values(seen) == [0, 1]
    del seen
    with pytest.raises(torch.OutOfMemoryError):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)


def test_c7_l1_error_in_a_worker_reads_as_torch_words_it() -> None:
    def run(iterable: Any) -> tuple[list[int], str]:
        seen: list[int] = []
        try:
            seen.extend(int(batch) for batch in iterable)
        except KeyError as error:
            text = str(error)
            # A torch iterator that the collector finds in a cycle waits five seconds for each of its workers.
            error.__traceback__ = None
            return seen, text
        raise AssertionError("no error")

    loader = DataLoader(RaisesAtThree(), batch_size=1, num_workers=2)
    for seen, text in (run(loader), run(GPUPrefetcher(loader, "cpu"))):
        assert seen == [0, 1, 2]
        assert "a_frame_of_the_dataset" in text


class RaisesAtThree(Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 3:
            self.a_frame_of_the_dataset()
        return torch.tensor([index])

    def a_frame_of_the_dataset(self) -> None:
        raise KeyError("row 3")


@pytest.mark.parametrize("where", ["transform", "break", "end", "close"])
def test_c9_l1_the_loaders_generator_is_closed_with_the_pass(fetch: str, where: str) -> None:
    closed = threading.Event()

    def rows() -> Iterator[torch.Tensor]:
        try:
            for index in range(10):
                yield constant(index)
        finally:
            closed.set()

    def transform(batch: torch.Tensor) -> torch.Tensor:
        if where == "transform":
            raise ValueError("bad")
        return batch

    prefetcher = GPUPrefetcher(rows(), "cpu", transform=transform, fetch=fetch)
    iterator = iter(prefetcher)
    if where == "transform":
        with pytest.raises(ValueError, match="bad"):
            next(iterator)
    elif where == "end":
        assert len(list(iterator)) == 10
    else:
        next(iterator)
    if where == "close":
        prefetcher.close()
    del iterator, prefetcher
    gc.collect()
    assert closed.wait(TIMEOUT)


# Case L2, leaving


class Range(Dataset):
    def __init__(self, count: int = 12) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index])


def leave_next(p: GPUPrefetcher) -> None:
    next(iter(p))


def leave_break(p: GPUPrefetcher) -> None:
    for _ in p:
        break


def leave_return(p: GPUPrefetcher) -> Any:
    for batch in p:
        return batch
    return None


def leave_islice(p: GPUPrefetcher) -> None:
    assert len(list(itertools.islice(p, 3))) == 3


def leave_zip_longer(p: GPUPrefetcher) -> None:
    assert len(list(zip(p, range(2), strict=False))) == 2


def leave_zip_shorter_first(p: GPUPrefetcher) -> None:
    assert len(list(zip(range(2), p, strict=False))) == 2


def leave_del(p: GPUPrefetcher) -> None:
    it = iter(p)
    next(it)
    del it


def leave_unstarted(p: GPUPrefetcher) -> None:
    iter(p)


def leave_exception(p: GPUPrefetcher) -> None:
    with contextlib.suppress(ValueError):
        raise_in_body(p)


def raise_in_body(p: GPUPrefetcher) -> None:
    for _ in p:
        raise ValueError("in the body")


def leave_generator(p: GPUPrefetcher) -> None:
    generator = (batch for batch in p)
    next(generator)
    generator.close()


def leave_with(p: GPUPrefetcher) -> None:
    with p:
        next(iter(p))


def leave_close(p: GPUPrefetcher) -> None:
    next(iter(p))
    p.close()
    p.close()


def leave_rerun(p: GPUPrefetcher) -> None:
    it = iter(p)
    next(it)
    it = iter(p)
    next(it)


def leave_at_the_end(p: GPUPrefetcher) -> None:
    for _ in p:
        pass


LEAVE = [
    leave_next,
    leave_break,
    leave_return,
    leave_islice,
    leave_zip_longer,
    leave_zip_shorter_first,
    leave_del,
    leave_unstarted,
    leave_exception,
    leave_generator,
    leave_with,
    leave_close,
    leave_rerun,
    leave_at_the_end,
]


@pytest.mark.parametrize("leave", LEAVE)
def test_c9_l2_leaving_without_gc_restores_everything(device: Any, fetch: str, leave: Callable[[Any], Any]) -> None:
    before = Surroundings(device)
    with no_gc():
        for _ in range(3):
            loader = Source(constant, 12)
            alive = weakref.ref(loader)
            leave(GPUPrefetcher(loader, device, fetch=fetch))
            del loader
            before.assert_restored()
            assert alive() is None


@pytest.mark.slow
def test_c9_l2_fifty_times_next_iter(device: Any, fetch: str) -> None:
    before = Surroundings(device)
    refs = []
    with no_gc():
        for _ in range(50):
            loader = Source(constant, 12)
            refs.append(weakref.ref(loader))
            batch = next(iter(GPUPrefetcher(loader, device, depth=3, fetch=fetch)))
            settle(device)
            assert batch[0] == 0
            del loader, batch
        before.assert_restored()
        assert [ref() for ref in refs] == [None] * 50


@pytest.mark.slow
@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
def test_c9_l2_leaving_ends_worker_processes(leave: Callable[[Any], Any], persistent: bool) -> None:
    before = Surroundings()
    loader = DataLoader(Range(), batch_size=2, num_workers=1, persistent_workers=persistent)
    alive = weakref.ref(loader)
    with no_gc():
        leave(GPUPrefetcher(loader, "cpu"))
        del loader
        before.assert_restored()
        assert alive() is None


@pytest.mark.slow
def test_c9_l2_workers_many_times() -> None:
    before = Surroundings()
    with no_gc():
        for _ in range(10):
            batch = next(iter(GPUPrefetcher(DataLoader(Range(), batch_size=2, num_workers=2), "cpu")))
            assert batch.tolist() == [[0], [1]]
        before.assert_restored()


@pytest.mark.slow
def test_c9_l2_descriptors_and_mappings_are_given_back() -> None:
    """Segments shared with workers are files too."""
    process = psutil.Process()

    def one_pass() -> None:
        with GPUPrefetcher(DataLoader(Range(8), batch_size=2, num_workers=1), "cpu") as prefetcher:
            assert [b.flatten().tolist() for b in prefetcher] == [[0, 1], [2, 3], [4, 5], [6, 7]]

    one_pass()
    gc.collect()
    descriptors = process.num_fds()
    shared = set(Path("/dev/shm").iterdir())
    for _ in range(5):
        one_pass()
    gc.collect()
    assert process.num_fds() <= descriptors
    assert {path for path in set(Path("/dev/shm").iterdir()) - shared if not path.name.startswith("sem.")} == set()


def test_c9_l2_a_kept_batch_outlives_its_prefetcher(device: Any, fetch: str) -> None:
    prefetcher = GPUPrefetcher(Source(constant, 9), device, fetch=fetch)
    kept = list(itertools.islice(prefetcher, 4))
    prefetcher.close()
    del prefetcher
    gc.collect()
    settle(device)
    assert first_values(kept) == [0, 1, 2, 3]
    assert all(bool((batch == batch[0]).all()) for batch in kept)


def test_c9_close_from_another_thread_wakes_a_waiting_consumer() -> None:
    release = threading.Event()
    entered = threading.Event()

    def rows() -> Iterator[int]:
        yield 0
        entered.set()
        release.wait(TIMEOUT)
        yield 1

    prefetcher = GPUPrefetcher(rows(), "cpu", fetch="thread")

    def consume() -> list[int]:
        return list(prefetcher)

    consumer = Thread(consume)
    try:
        assert entered.wait(TIMEOUT)
        closer = Thread(prefetcher.close)
        with pytest.raises(IteratorClosedError):
            consumer.result(5.0)
    finally:
        release.set()
    closer.result()


def test_c9_collected_in_a_cycle() -> None:
    """An iterator in a reference cycle ends with the collector's next run, whichever thread that is in."""
    before = Surroundings()

    class Trainer:
        def __init__(self) -> None:
            self.prefetcher = GPUPrefetcher(Source(constant, 12), "cpu", fetch="thread")
            self.iterator = iter(self.prefetcher)
            self.me = self

    next(Trainer().iterator)
    Thread(gc.collect).result()
    before.assert_restored()


def test_the_check_for_leftover_threads_notices_one() -> None:
    before, stop = our_threads(), threading.Event()
    left = threading.Thread(target=stop.wait, name=f"{THREAD_PREFIX}left", daemon=True)
    left.start()
    assert join_ours(before, timeout=0.05) == {left}
    stop.set()
    assert join_ours(before) == set()


# Case L3, interpreter exit and Ctrl-C, each in a process of its own

WORKERS = """
import time
import torch
from torch.utils.data import DataLoader
from prefetchpipe import GPUPrefetcher
"""

BODIES = {
    "live iterator over persistent workers": """
    prefetcher = GPUPrefetcher(DataLoader(range(100), batch_size=2, num_workers=2, persistent_workers=True), "cpu")
    iterator = iter(prefetcher)
    assert next(iterator).tolist() == [0, 1]
""",
    "live iterator over workers": """
    iterator = iter(GPUPrefetcher(DataLoader(range(100), batch_size=2, num_workers=2), "cpu"))
    assert next(iterator).tolist() == [0, 1]
""",
    "live iterator without workers": """
    iterator = iter(GPUPrefetcher([torch.ones(3)] * 10, "cpu", fetch="thread"))
    next(iterator)
""",
    "never advanced": """
    iterator = iter(GPUPrefetcher([torch.ones(3)] * 10, "cpu", fetch="thread"))
""",
    "source that never delivers": """
    import threading
    def rows():
        yield torch.ones(3)
        threading.Event().wait()
    iterator = iter(GPUPrefetcher(rows(), "cpu", fetch="thread"))
    next(iterator)
""",
    "simulated device": """
    from prefetchpipe.testing import SimulatedDevice
    iterator = iter(GPUPrefetcher([torch.ones(3)] * 10, SimulatedDevice(), depth=4, fetch="thread"))
    batch = next(iterator)
""",
    "in a cycle": """
    class Trainer: pass
    trainer = Trainer()
    trainer.me = trainer
    trainer.iterator = iter(GPUPrefetcher([torch.ones(3)] * 10, "cpu", fetch="thread"))
    next(trainer.iterator)
""",
    "sys.exit": """
    import sys
    for batch in GPUPrefetcher(DataLoader(range(100), batch_size=2, num_workers=2, persistent_workers=True), "cpu"):
        print("END", time.time())
        sys.exit(0)
""",
}


def script(body: str, *, mark: bool = True) -> str:
    end = '    print("END", time.time())\n' if mark else ""
    return f'{WORKERS}\nif __name__ == "__main__":\n{body}\n{end}'


@pytest.mark.slow
@pytest.mark.parametrize("name", list(BODIES))
def test_c9_l3_exit_in_mid_epoch_is_silent(tmp_path: Path, name: str) -> None:
    done = run_script(tmp_path, script(BODIES[name], mark="END" not in BODIES[name]))
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.exit_seconds < 5.0


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_c9_l3_exception_in_the_body_is_all_that_is_said(tmp_path: Path, workers: int) -> None:
    options = "num_workers=2, persistent_workers=True" if workers else "num_workers=0"
    body = f"""
    for index, batch in enumerate(GPUPrefetcher(DataLoader(range(100), batch_size=2, {options}), "cpu")):
        if index == 2:
            print("END", time.time())
            raise ValueError("the user's own")
"""
    done: Finished = run_script(tmp_path, script(body, mark=False))
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert done.stderr.rstrip().endswith("ValueError: the user's own")
    assert done.exit_seconds < 5.0


@pytest.mark.slow
def test_c1_l3_a_users_thread_still_gets_every_batch_while_the_main_thread_has_ended(tmp_path: Path) -> None:
    body = """
    import threading
    main = threading.main_thread()
    def consume():
        count = 0
        for batch in GPUPrefetcher([torch.ones(3)] * 20, "cpu", fetch="thread"):
            if count == 3:
                main.join()
            count += 1
        print("COUNT", count)
    threading.Thread(target=consume).start()
"""
    done = run_script(tmp_path, script(body))
    assert done.stderr == ""
    assert "COUNT 20" in done.stdout
    assert done.returncode == 0


INTERRUPTED = {
    "in the body": """
    iterator = iter(GPUPrefetcher([torch.ones(3)] * 10, "cpu", fetch="thread"))
    next(iterator)
    def work(): threading.Event().wait(30)
""",
    "waiting for a source that never delivers": """
    def rows():
        yield torch.ones(3)
        threading.Event().wait()
    iterator = iter(GPUPrefetcher(rows(), "cpu", fetch="thread"))
    next(iterator)
    def work(): next(iterator)
""",
    "waiting for slow workers": """
    loader = DataLoader(Slow(), batch_size=1, num_workers=1, persistent_workers=True)
    iterator = iter(GPUPrefetcher(loader, "cpu"))
    next(iterator)
    def work(): next(iterator)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(INTERRUPTED))
def test_c9_l3_ctrl_c_within_a_second(tmp_path: Path, name: str) -> None:
    source = f"""{WORKERS}
import threading
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index):
        if index: time.sleep(3)
        return torch.ones(1)

if __name__ == "__main__":
{INTERRUPTED[name]}
    try:
        print("READY", flush=True)
        work()
    except KeyboardInterrupt:
        print("INTERRUPTED", flush=True)
"""
    path = tmp_path / "script.py"
    path.write_text(source)
    child = subprocess.Popen(
        [sys.executable, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=script_environment(),
        stdin=subprocess.DEVNULL,
    )
    try:
        assert child.stdout.readline() == "READY\n"
        sent = time.monotonic()
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "INTERRUPTED\n"
        assert time.monotonic() - sent < 1.0
        _, stderr = child.communicate(timeout=10)
        assert time.monotonic() - sent < 6.0
    finally:
        child.kill()
        child.wait()
    assert stderr == ""
    assert child.returncode == 0


@pytest.mark.slow
def test_c9_l3_ctrl_c_ends_the_pass_and_the_next_one_works(tmp_path: Path) -> None:
    body = """
    import os, signal
    seen = []
    prefetcher = GPUPrefetcher(DataLoader(range(20), batch_size=2, num_workers=2), "cpu")
    try:
        for batch in prefetcher:
            seen.append(batch.tolist())
            if len(seen) == 3:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(10)
    except KeyboardInterrupt:
        pass
    print("SEEN", seen)
    print("AGAIN", [b.tolist() for b in prefetcher] == [[i, i + 1] for i in range(0, 20, 2)])
"""
    done = run_script(tmp_path, script(body))
    assert done.stderr == ""
    assert "SEEN [[0, 1], [2, 3], [4, 5]]" in done.stdout
    assert "AGAIN True" in done.stdout


# Case L4, a worker process that dies


class DiesAtThree(Dataset):
    """Kills its own worker process at item 3, as long as no file says that it has done so."""

    def __init__(self, marker: Path, how: str) -> None:
        self.marker = marker
        self.how = how

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 3 and not self.marker.exists():
            self.marker.touch()
            if self.how == "exit":
                os._exit(7)
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor([index])


def fails_within(iterable: Any) -> tuple[list[int], BaseException, float]:
    """Torch says that a worker has died; or that its socket has, if it was taking over a tensor at that moment."""
    seen: list[int] = []
    begin = time.monotonic()
    with pytest.raises((RuntimeError, OSError, EOFError)) as caught:
        seen.extend(int(batch) for batch in iterable)
    assert type(caught.value) is not RuntimeError or "DataLoader worker" in str(caught.value)
    return seen, caught.value, time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True], ids=["", "persistent"])
@pytest.mark.parametrize("how", ["kill", "exit"])
@pytest.mark.parametrize("workers", [1, 2])
def test_c7_l4_dead_worker_is_reported_like_torch_does(
    tmp_path: Path, workers: int, how: str, persistent: bool
) -> None:
    dataset = DiesAtThree(tmp_path / "dead", how)
    prefetcher = GPUPrefetcher(
        DataLoader(dataset, batch_size=1, num_workers=workers, persistent_workers=persistent), "cpu"
    )
    seen, error, seconds = fails_within(prefetcher)
    assert seen == list(range(len(seen)))
    assert len(seen) <= 3
    assert seconds < 3.0  # the plain loader is told by a signal and takes a tenth of a second
    # The dead pass must not raise again out of torch's handler for child processes, though its traceback is kept.
    assert [int(batch) for batch in prefetcher] == list(range(10))
    del error
    gc.collect()
    assert [int(batch) for batch in prefetcher] == list(range(10))
    prefetcher.close()


@pytest.mark.slow
def test_c7_l4_worker_killed_from_outside_between_two_steps() -> None:
    before = Surroundings()
    loader = DataLoader(Range(40), batch_size=1, num_workers=2)
    prefetcher = GPUPrefetcher(loader, "cpu", depth=1)
    seen: list[int] = []
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        for batch in prefetcher:
            seen.append(int(batch))
            if len(seen) == 2:
                for child in psutil.Process().children():
                    child.kill()
    assert seen == list(range(len(seen)))
    assert [int(batch) for batch in prefetcher] == list(range(40))
    prefetcher.close()
    gc.collect()
    before.assert_restored()


# Case L5, several passes


def test_c1_l5_full_pass_after_a_dropped_one(device: Any, fetch: str) -> None:
    prefetcher = GPUPrefetcher(Source(constant, 10), device, fetch=fetch)
    for _ in range(3):
        assert first_values(collect(device, itertools.islice(prefetcher, 3))) == [0, 1, 2]
        assert first_values(collect(device, prefetcher)) == list(range(10))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_c1_l5_the_end_stays_the_end(device: Any, fetch: str, count: int) -> None:
    iterator = iter(GPUPrefetcher(Source(constant, count), device, fetch=fetch))
    assert len(list(iterator)) == count
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(iterator)
    assert list(iterator) == []


def test_c1_l5_iter_of_the_iterator_is_itself(device: Any, fetch: str) -> None:
    iterator = iter(GPUPrefetcher(Source(constant, 4), device, fetch=fetch))
    head = [next(iterator)]
    assert iter(iterator) is iterator
    assert first_values(collect(device, [*head, *iterator])) == [0, 1, 2, 3]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_c1_l5_two_live_passes_are_independent(device: Any, fetch: str, workers: int) -> None:
    prefetcher = GPUPrefetcher(DataLoader(Range(10), batch_size=1, num_workers=workers), device, fetch=fetch)
    first, second = iter(prefetcher), iter(prefetcher)
    pairs = [(next(first), next(first), next(second)) for _ in range(5)]
    rest = list(second)
    with pytest.raises(StopIteration):
        next(first)
    settle(device)
    assert [int(a) for pair in pairs for a in pair[:2]] == list(range(10))
    assert [int(pair[2]) for pair in pairs] + [int(batch) for batch in rest] == list(range(10))


def test_c1_l5_nested_loops_over_one_prefetcher(fetch: str) -> None:
    prefetcher = GPUPrefetcher([0, 1, 2], "cpu", fetch=fetch)
    assert [(a, b) for a in prefetcher for b in prefetcher] == [(a, b) for a in range(3) for b in range(3)]


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_c9_l5_persistent_workers_go_to_the_newer_pass() -> None:
    loader = DataLoader(Range(10), batch_size=1, num_workers=2, persistent_workers=True)
    with GPUPrefetcher(loader, "cpu") as prefetcher:
        older = iter(prefetcher)
        assert int(next(older)) == 0
        newer = iter(prefetcher)
        assert int(next(newer)) == 0
        with pytest.raises(IteratorClosedError):
            next(older)
        assert [int(batch) for batch in newer] == list(range(1, 10))
        assert [int(batch) for batch in prefetcher] == list(range(10))


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_c9_l5_persistent_workers_broken_off_again_and_again() -> None:
    loader = DataLoader(Range(10), batch_size=1, num_workers=2, persistent_workers=True)
    with GPUPrefetcher(loader, "cpu") as prefetcher:
        for taken in (1, 3, 0, 9, 10, 2):
            assert [int(b) for b in itertools.islice(prefetcher, taken)] == list(range(taken))
        assert [int(batch) for batch in prefetcher] == list(range(10))


@pytest.mark.slow
def test_c9_l5_two_prefetchers_over_one_loader() -> None:
    loader = DataLoader(Range(6), batch_size=1, num_workers=1)
    one, other = GPUPrefetcher(loader, "cpu"), GPUPrefetcher(loader, "cpu")
    assert [(int(a), int(b)) for a, b in zip(one, other, strict=True)] == [(i, i) for i in range(6)]


def test_c1_l5_a_one_shot_generator_is_empty_on_the_second_pass(fetch: str) -> None:
    prefetcher = GPUPrefetcher((index for index in range(4)), "cpu", fetch=fetch)
    assert list(prefetcher) == [0, 1, 2, 3]
    assert list(prefetcher) == []


def test_c1_l5_several_threads_at_one_iterator_neither_hang_nor_share_a_batch(device: Any) -> None:
    """Like a generator, it may refuse the second thread with an error."""
    iterator = iter(GPUPrefetcher(Source(constant, 40), device, fetch="thread"))

    def consume() -> list[torch.Tensor]:
        mine = []
        with contextlib.suppress(RuntimeError, ValueError):
            for batch in iterator:
                mine.append(batch)  # noqa: PERF402  what came before an error counts
        return mine

    threads = [Thread(consume) for _ in range(4)]
    parts = [first_values(collect(device, thread.result())) for thread in threads]
    seen = [value for part in parts for value in part]
    assert len(set(seen)) == len(seen)
    assert all(part == sorted(part) for part in parts)


# Case L6, an interrupted pass that something keeps alive


def interrupted(prefetcher: GPUPrefetcher) -> ValueError:
    """An exception whose traceback holds the iterator, as a notebook does after a failed cell."""

    def body() -> None:
        iterator = iter(prefetcher)
        for index, batch in enumerate(iterator):
            if index == 2:
                raise ValueError("in the body", batch.shape)

    with pytest.raises(ValueError, match="in the body") as caught:
        body()
    return caught.value


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 3])
def test_c9_l6_a_kept_traceback_costs_neither_cpu_nor_more_batches(device: Any, depth: int) -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def make(index: int) -> torch.Tensor:
        batch = constant(index)
        alive.add(batch)
        return batch

    source = Source(make, 100)
    prefetcher = GPUPrefetcher(source, device, depth=depth, fetch="thread")
    error = interrupted(prefetcher)
    overrun = source.wait_pulled(3 + depth + 2, timeout=0.3)
    assert not overrun
    gc.collect()
    assert len(alive) <= 1 + depth + 1

    mine = {thread.native_id for thread in our_threads()}
    spent = {t.id: t.user_time + t.system_time for t in psutil.Process().threads() if t.id in mine}
    source.wait_pulled(1000, timeout=0.5)
    for thread in psutil.Process().threads():
        if thread.id in spent:
            assert thread.user_time + thread.system_time - spent[thread.id] <= 0.05

    assert first_values(collect(device, prefetcher)) == list(range(100))
    prefetcher.close()
    with pytest.raises(IteratorClosedError):
        next(error.__traceback__.tb_next.tb_frame.f_locals["iterator"])


@pytest.mark.slow
def test_c9_l6_close_gives_the_memory_of_a_kept_pass_back(device: Any, fetch: str) -> None:
    before = Surroundings(device)
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def make(index: int) -> torch.Tensor:
        batch = constant(index)
        alive.add(batch)
        return batch

    prefetcher = GPUPrefetcher(Source(make, 100), device, depth=3, fetch=fetch)
    error = interrupted(prefetcher)
    assert len(collect(device, prefetcher)) == 100
    prefetcher.close()
    # The frame itself still holds the batch that it was working on.
    if is_simulated(device):
        settle(device)
        assert device.pinned_bytes == before.memory["pinned"]
        assert device.allocated_bytes <= before.memory["device"] + 4096
    gc.collect()
    assert len(alive) <= 1
    error.__traceback__ = None
    del error
    gc.collect()
    before.assert_restored()


# Case L7, copies of a prefetcher


class Rows:
    """Module level, so that pickle finds it; notes which thread pulls."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.pulled_by: list[str] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(self.count):
            self.pulled_by.append(threading.current_thread().name)
            yield constant(index)


def adds_hundred(batch: torch.Tensor) -> torch.Tensor:
    return batch + 100


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda p: pickle.loads(pickle.dumps(p))}


@pytest.mark.parametrize("when", ["before", "during", "after", "closed"])
@pytest.mark.parametrize("way", list(COPIES))
@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_c9_l7_copies_carry_the_configuration_and_no_live_state(kind: str, way: str, when: str, fetch: str) -> None:
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    original = GPUPrefetcher(Rows(6), kind, depth=3, transform=adds_hundred, fetch=fetch)
    iterator = iter(original) if when != "before" else iter(())
    if when == "during":
        next(iterator)
    elif when != "before":
        list(iterator)
    if when == "closed":
        original.close()
    twin = COPIES[way](original)
    assert type(twin) is GPUPrefetcher
    assert twin.stats().batches == 0
    assert twin.pulled_by is not original.pulled_by
    pulled = len(twin.pulled_by)
    batches = list(twin)
    settle(kind)
    assert [int(b[0]) for b in batches] == [100, 101, 102, 103, 104, 105]
    assert {batch.device.type for batch in batches} == {kind}
    mine = {name == threading.current_thread().name for name in twin.pulled_by[pulled:]}
    assert mine == {fetch == "caller"}
    if when != "closed":
        assert len(list(iterator)) == (5 if when == "during" else 0)
    assert first_values(collect(kind, original)) == [100, 101, 102, 103, 104, 105]


def test_c9_l7_depth_travels() -> None:
    source = DeepRows()
    twin = copy.deepcopy(GPUPrefetcher(source, "cpu", depth=4, fetch="thread"))
    iterator = iter(twin)
    next(iterator)
    assert twin.reached.wait(TIMEOUT)
    assert to_plain(next(iterator))[0] == 1


class DeepRows:
    """Says when the fifth item was pulled: one in use and four ahead."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def __deepcopy__(self, memo: dict[int, Any]) -> DeepRows:
        return DeepRows()

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(20):
            if index == 4:
                self.reached.set()
            yield constant(index)


def test_c9_l7_the_original_is_not_disturbed_by_being_copied(device: Any, fetch: str) -> None:
    if is_simulated(device):
        device = "cpu"
    prefetcher = GPUPrefetcher(Rows(6), device, fetch=fetch)
    iterator = iter(prefetcher)
    seen = [next(iterator), next(iterator)]
    twin = copy.deepcopy(prefetcher)
    seen += list(itertools.islice(iterator, 2))
    seen_by_twin = collect(device, twin)
    seen += list(iterator)
    settle(device)
    assert_same([to_plain(b) for b in seen], seen_by_twin)


class _BlockedDataset(torch.utils.data.Dataset):
    """Item 2 waits for the parent; by pipes, which do not mind that torch ends a worker that waits."""

    def __init__(self):
        self.reached, self.release = os.pipe(), os.pipe()

    def __len__(self):
        return 10

    def __getitem__(self, index):
        if index == 2:
            os.write(self.reached[1], b".")
            os.read(self.release[0], 1)
        return index


@pytest.mark.parametrize("workers", ["plain", "shared"])
def test_l2_a_pass_left_while_its_thread_waits_for_a_worker_leaves_nothing_to_the_collector(workers):
    data = _BlockedDataset()
    loader = DataLoader(data, batch_size=1, num_workers=1, prefetch_factor=1, multiprocessing_context="fork")
    prefetcher = GPUPrefetcher(loader, device="cpu", fetch="thread", workers=workers)
    gc.disable()
    try:
        iterator = iter(prefetcher)
        source = weakref.ref(next(iter(prefetcher._passes)).source)
        next(iterator)
        os.read(data.reached[0], 1)
        thread = next(iter(prefetcher._passes))._thread
        del iterator  # the thread is woken; torch then waits for its worker
        os.write(data.release[1], b".")
        thread.join(30)
        left = source()
    finally:
        gc.enable()
        for fd in (*data.reached, *data.release):
            os.close(fd)
    assert left is None
