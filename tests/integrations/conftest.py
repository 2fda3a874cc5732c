"""Two ranks are started once for all tests that look at what they did: importing a framework twice takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.support import run_two_ranks


@pytest.fixture(scope="session")
def lightning_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What ``ranks_lightning.py`` says of Lightning and of Fabric, rank by rank."""
    return run_two_ranks(Path(__file__).with_name("ranks_lightning.py"), tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="session")
def accelerate_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What ``ranks_accelerate.py`` says of Accelerate and of Transformers, rank by rank."""
    return run_two_ranks(Path(__file__).with_name("ranks_accelerate.py"), tmp_path_factory.mktemp("ranks"))
