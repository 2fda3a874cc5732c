"""Who fetches: what the first batches of a pass decide (contract 16)."""

from __future__ import annotations

import pytest

from prefetchpipe.device.cpu import cpu_device
from prefetchpipe.pipeline.pace import Pace


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def starts(*, body: float, fetch: float, send: float, waits: float = 0.0, comes_packed: bool = False) -> bool:
    """Whether a thread starts within 20 batches whose parts take so many microseconds.

    Args:
        waits: For the device, after the loop has asked for a batch.
    """
    clock = Clock()
    pace = Pace(cpu_device(), has_workers=comes_packed, comes_packed=comes_packed, clock=clock)
    for _ in range(20):
        clock.now += body * 1e-6
        pace.enter()
        clock.now += waits * 1e-6
        pace.begin()
        clock.now += (fetch + send) * 1e-6
        if pace.end(fetch * 1e-6, send * 1e-6):
            return True
    return False


@pytest.mark.parametrize(
    ("body", "fetch", "send", "expected"),
    [
        (10, 500, 50, True),  # the loader works
        (200, 5, 200, True),  # the loop works meanwhile
        (20, 5, 200, False),  # nothing to hide it behind
    ],
)
def test_a_thread_starts_where_it_hides_more_than_it_costs(
    body: float, fetch: float, send: float, expected: bool
) -> None:
    assert starts(body=body, fetch=fetch, send=send) is expected


def test_waiting_for_a_worker_is_nothing_that_a_thread_hides() -> None:
    assert not starts(body=40, fetch=1500, send=140, comes_packed=True)
    assert starts(body=300, fetch=1500, send=140, comes_packed=True)


def test_waiting_for_the_device_is_no_work_of_the_loop() -> None:
    assert not starts(body=20, fetch=5, send=200, waits=3000)
