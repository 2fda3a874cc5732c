"""Integrations are optional: versions are checked, absent frameworks are named, and the core imports none of them."""

from __future__ import annotations

import importlib
import sys
import tomllib
from importlib import metadata
from typing import Any

import pytest

from prefetchpipe.integrations._versions import RANGES, require
from tests.integrations.support import ROOT

MODULES = {"lightning": "lightning", "fabric": "lightning", "accelerate": "accelerate", "transformers": "transformers"}


def import_anew(module: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    name = f"prefetchpipe.integrations.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    try:
        return importlib.import_module(name)
    finally:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("module", MODULES)
def test_a_framework_that_is_absent(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, real = MODULES[module], metadata.version

    def version(name: str) -> str:
        if name == package:
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(ImportError, match=rf"is not installed: pip install 'prefetchpipe\[{package}\]'"):
        import_anew(module, monkeypatch)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("place", ["below", "above"])
def test_a_version_that_is_not_served(module: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (low, below), real = RANGES[MODULES[module]], metadata.version
    found = "0.1.5" if place == "below" else f"{below}.0.0rc1"
    monkeypatch.setattr(metadata, "version", lambda name: found if name == MODULES[module] else real(name))
    with pytest.raises(ImportError, match=rf"works with {MODULES[module]}>={low},<{below}, and {found} is installed"):
        import_anew(module, monkeypatch)


@pytest.mark.parametrize("version", ["1.0", "1.0.0", "1.15.0.dev0", "1.999"])
def test_versions_that_are_served(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: version)
    require("accelerate")


def test_pyproject_states_the_same_ranges() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for package, (low, below) in RANGES.items():
        assert f"{package}>={low},<{below}" in extras[package]
