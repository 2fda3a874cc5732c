"""Whether a framework is there, and in a version that these integrations were made for."""

from __future__ import annotations

import re
from importlib import metadata

__all__ = ["RANGES", "require"]

RANGES = {
    "accelerate": ("1.0", "2"),
    "lightning": ("2.4", "3"),
    "transformers": ("4.46", "6"),
}
"""Lowest version served, and the first that is not: as in the extras of pyproject.toml."""


def require(package: str) -> None:
    """Check the installed version of ``package``, without importing it.

    Raises:
        ImportError: It is not installed, or in a version outside of the range.
    """
    low, below = RANGES[package]
    install = f"pip install 'prefetchpipe[{package}]'"
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError as error:
        raise ImportError(
            f"prefetchpipe.integrations.{package} needs {package}>={low},<{below}, which is not installed: {install}",
            name=package,
        ) from error
    if not _numbers(low) <= _numbers(installed) < _numbers(below):
        raise ImportError(
            f"prefetchpipe.integrations.{package} works with {package}>={low},<{below}, and {installed} is installed: "
            f"{install}",
            name=package,
        )


def _numbers(version: str) -> tuple[int, ...]:
    """The release segment; a pre-release counts as its release."""
    release = re.match(r"[\d.]*", version)
    assert release is not None
    return tuple(int(part) for part in release[0].strip(".").split(".") if part)
