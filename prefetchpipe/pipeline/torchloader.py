"""What must be known of ``torch.utils.data.DataLoader``: its worker processes, and how its iterator ends.

Source: torch/utils/data/dataloader.py, "Data Loader Multiprocessing Shutdown Logic" (torch 2.8 to 2.13).
"""

from __future__ import annotations

import pickle
import threading
import weakref
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, default_collate
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _BaseDataLoaderIter

if TYPE_CHECKING:
    from prefetchpipe.pipeline.producer import Producer

__all__ = [
    "claim",
    "error_of",
    "gives_up_memory",
    "has_dead_worker",
    "has_workers",
    "is_torchs",
    "prepare",
    "shut_down",
    "wake",
]

_WAKE_SECONDS = 0.5
_DEATH_SECONDS = 0.5
_POLL_SECONDS = 0.001
_TAKE_OVER_SECONDS = 10.0

_lock = threading.RLock()  # guards _owners: two threads may start passes over one loader
_owners: weakref.WeakKeyDictionary[Any, weakref.ref[Producer]] = weakref.WeakKeyDictionary()


def prepare(loader: Any) -> None:
    """Before ``iter(loader)``: end the older pass over a loader whose workers persist.

    There is one set of workers, and torch resets it; without this, torch's ``_reset`` and the older producer would
    wait for each other's messages.
    """
    if not _workers_persist(loader):
        return
    with _lock:
        reference = _owners.pop(loader, None)
    older = reference() if reference is not None else None
    if older is not None:
        why = "a newer pass over the same DataLoader took over its persistent workers (there is one set)"
        older.stop(seconds=_TAKE_OVER_SECONDS, why=why)


def claim(loader: Any, producer: Producer) -> None:
    """After ``iter(loader)``: remember which pass uses the workers that persist."""
    if _workers_persist(loader):
        with _lock:
            _owners[loader] = weakref.ref(producer)


def _workers_persist(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and bool(loader.persistent_workers)


def is_torchs(iterator: Any) -> bool:
    """Whether ``iterator`` is a DataLoader's own: each pass has a new one, or torch resets it."""
    return isinstance(iterator, _BaseDataLoaderIter)


def has_workers(iterator: Any) -> bool:
    """Whether ``iterator`` is torch's iterator over worker processes."""
    return isinstance(iterator, _BaseDataLoaderIter) and hasattr(iterator, "_worker_result_queue")


def has_dead_worker(iterator: Any) -> bool:
    """Whether a worker process behind ``iterator`` has gone although more was to come."""
    if not has_workers(iterator) or iterator._shutdown:
        return False
    # A worker that persists never ends by itself; another one may, when its share of the data set is through.
    expected = [iterator._persistent_workers or status for status in iterator._workers_status]
    return any(due and not worker.is_alive() for due, worker in zip(expected, iterator._workers, strict=True))


def error_of(iterator: Any, error: BaseException) -> BaseException:
    """What torch would have raised in the main thread for ``error``, met in ours.

    When a worker dies, a thread that is receiving from it sees a broken connection, while torch's child-process
    handler is about to raise the real reason in the main thread. Asking here gives that reason, once.
    """
    if not has_workers(iterator) or not isinstance(error, (OSError, EOFError, RuntimeError)):
        return error
    deadline = monotonic() + (_DEATH_SECONDS if isinstance(error, (OSError, EOFError)) else 0.0)
    while True:
        try:
            signal_handling._error_if_any_worker_fails()  # type: ignore[attr-defined]
        except RuntimeError as reason:
            reason.__cause__ = error
            return reason
        if monotonic() >= deadline:
            return error
        sleep(_POLL_SECONDS)  # its pipe breaks a moment before a process can be waited for


def wake(iterator: Any) -> None:
    """Bring a thread back that waits inside ``next(iterator)``: up to five seconds otherwise.

    A message that torch cannot place makes that call fail, in a pass that has ended. A later ``_reset`` skips it.
    """
    if not has_workers(iterator):
        return
    message = (-1, None)
    queue = iterator._data_queue
    try:
        if hasattr(iterator, "_pin_memory_thread"):
            queue.put(message)
        elif queue._wlock is not None and queue._wlock.acquire(timeout=_WAKE_SECONDS):
            # Past Queue.put, which would start a feeder thread that outlives the pass.
            try:
                if queue._sem.acquire(block=False):
                    queue._writer.send_bytes(pickle.dumps(message))
            finally:
                queue._wlock.release()
    except (OSError, ValueError, AttributeError):
        pass  # the queue is closed already: nobody waits there


def shut_down(iterator: Any, loader: Any) -> None:
    """End the workers after one of them died; torch would raise again from its child-process handler otherwise."""
    if not has_workers(iterator):
        return
    iterator._shutdown_workers()
    # A worker that died in the middle of a message leaves a thread of ours waiting for its rest; now it meets the end.
    iterator._worker_result_queue._writer.close()
    if getattr(loader, "_iterator", None) is iterator:
        loader._iterator = None


def gives_up_memory(loader: Any) -> bool:
    """Whether the source never writes again into a batch that it has handed out.

    A list runs no code of its own between two batches. What comes from worker processes is pinned into fresh pages, and
    so is what the default collate has stacked (anything else may be a tensor of the data set's that is pinned already).
    """
    if type(loader) in (list, tuple):
        return True
    if not isinstance(loader, DataLoader) or not loader.pin_memory:
        return False
    return loader.num_workers > 0 or (loader.batch_sampler is not None and loader.collate_fn is default_collate)
