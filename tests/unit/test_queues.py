"""Queues that write small messages at once: the bytes and the order of ``multiprocessing.Queue``, and no thread."""

from __future__ import annotations

import multiprocessing
import pickle
import select
import threading
from queue import Empty
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from prefetchpipe.pipeline.queues import DirectQueue, direct_context
from tests.support import TIMEOUT, Thread

SMALL = b"x" * 100
LARGE = b"y" * (1 << 20)
"""More than a pipe holds."""


@pytest.fixture
def queue() -> Any:
    made = DirectQueue(ctx=multiprocessing.get_context("fork"))
    yield made
    made.close()
    made.join_thread()


def get(queue: Any) -> Any:
    return queue.get(timeout=TIMEOUT)


def test_small_messages_need_no_thread(queue: Any) -> None:
    for index in range(5):
        queue.put((index, SMALL))
    assert queue._thread is None
    assert [get(queue) for _ in range(5)] == [(index, SMALL) for index in range(5)]
    assert queue.empty()


def test_a_pipe_that_is_full_blocks_nobody(queue: Any) -> None:
    """Nothing is read until all is put."""
    putting = Thread(lambda: [queue.put((index, SMALL)) for index in range(3000)])
    putting.join(TIMEOUT)
    assert not putting.is_alive()
    assert queue._thread is not None
    assert [get(queue)[0] for _ in range(3000)] == list(range(3000))


@pytest.mark.parametrize("large", [LARGE, b"z" * select.PIPE_BUF])
def test_c1_what_follows_a_large_message_stays_behind_it(queue: Any, large: bytes) -> None:
    for message in (SMALL, large, SMALL, 1, large, 2):
        queue.put(message)
    assert [get(queue) for _ in range(6)] == [SMALL, large, SMALL, 1, large, 2]


def test_a_tensor_crosses(queue: Any) -> None:
    queue.put(torch.arange(5))
    assert get(queue).tolist() == [0, 1, 2, 3, 4]


def test_what_cannot_be_pickled_is_lost_as_in_the_base(queue: Any, capfd: pytest.CaptureFixture[str]) -> None:
    queue.put(lambda: None)
    queue.put(1)
    assert get(queue) == 1
    assert "pickle" in capfd.readouterr().err


def test_nothing_there(queue: Any) -> None:
    for call in (queue.get_nowait, lambda: queue.get(timeout=0.001)):
        with pytest.raises(Empty):
            call()
    assert queue.empty()
    queue.put(1)
    assert not queue.empty()
    assert queue.get_nowait() == 1


def test_a_message_that_arrives_in_parts_is_waited_for(queue: Any) -> None:
    body = pickle.dumps("all of it")
    message = len(body).to_bytes(4, "big") + body
    queue._sem.acquire()
    for part in (message[:2], message[2:4], message[4:9]):
        queue._writer._send(part)
        with pytest.raises(Empty):
            queue.get(timeout=0.001)
    queue._writer._send(message[9:])
    assert get(queue) == "all of it"


def test_several_messages_that_arrive_at_once(queue: Any) -> None:
    for index in range(4):
        queue._sem.acquire()
        queue._writer.send_bytes(pickle.dumps(index))  # as the base writes, and `torchloader.wake`
    assert [get(queue) for _ in range(4)] == [0, 1, 2, 3]


def test_the_end_of_all_writers_ends_a_wait(queue: Any) -> None:
    queue._writer._send(b"\0\0")
    queue._writer.close()
    with pytest.raises(OSError, match="end of file"):
        get(queue)
    queue._arrived.clear()
    with pytest.raises(EOFError):
        get(queue)


def test_a_closed_queue(queue: Any) -> None:
    queue.close()
    for call in (lambda: queue.put(1), queue.get):
        with pytest.raises(ValueError, match="closed"):
            call()


def answer(incoming: Any, outgoing: Any) -> None:
    while (number := incoming.get(timeout=TIMEOUT)) is not None:
        outgoing.put(number + 1)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_between_processes(method: str) -> None:
    context = direct_context(multiprocessing.get_context(method))
    there, back = context.Queue(), context.Queue()
    process = context.Process(target=answer, args=(there, back))
    process.start()
    for number in (1, 10, 100):
        there.put(number)
    assert [get(back) for _ in range(3)] == [2, 11, 101]
    there.put(None)
    process.join(TIMEOUT)
    assert process.exitcode == 0


@pytest.mark.slow
def test_a_writer_that_was_killed_with_the_lock_blocks_nobody(queue: Any) -> None:
    queue._wlock.acquire()
    queue.put(1)
    assert queue._thread is not None
    queue._wlock.release()
    assert get(queue) == 1


def test_contexts_of_unknown_kinds_stay() -> None:
    other: Any = object()
    assert direct_context(other) is other
    for known in (None, torch.multiprocessing, multiprocessing.get_context("spawn")):
        assert type(direct_context(known).Queue()) is DirectQueue
    assert direct_context(None).Process is torch.multiprocessing.Process


@pytest.mark.slow
def test_workers_need_no_feeder_thread_in_this_process() -> None:
    from prefetchpipe import GPUPrefetcher

    loader = DataLoader(range(40), batch_size=2, num_workers=2)
    before, seen = set(threading.enumerate()), set()
    with GPUPrefetcher(loader, "cpu", workers="shared") as prefetcher:
        for _ in prefetcher:
            seen |= set(threading.enumerate()) - before
    assert "QueueFeederThread" not in {thread.name for thread in seen}
