"""Two ranks are started once for all tests that look at what they did: importing a framework twice takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.support import run_two_ranks


@pytest.fixture(autouse=True)
def one_thread_of_torchs() -> Iterator[None]:
    """Tensors here are tiny; threads that wait for each other are all that they would cost."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def lightning_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What ``ranks_lightning.py`` says of Lightning and of Fabric, rank by rank."""
    return run_two_ranks(Path(__file__).with_name("ranks_lightning.py"), tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="session")
def accelerate_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What ``ranks_accelerate.py`` says of Accelerate and of Transformers, rank by rank."""
    return run_two_ranks(Path(__file__).with_name("ranks_accelerate.py"), tmp_path_factory.mktemp("ranks"))
