"""Keeps the performance section of the README equal to the newest results file."""

from __future__ import annotations

from pathlib import Path

from benchmarks.schema import Result
from benchmarks.table import summary

__all__ = ["BEGIN", "END", "rewrite"]

BEGIN = "<!-- performance table -->"
END = "<!-- /performance table -->"


def rewrite(text: str, result: Result, results_file: str) -> str:
    """``text`` with the block between the two markers made anew.

    Raises:
        ValueError: The markers are not there once each, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the text needs {BEGIN} and {END} once each, in this order")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = f"Made by `python -m benchmarks readme` from [{Path(results_file).name}]({results_file})."
    return f"{before}{BEGIN}\n{summary(result)}\n\n{made}\n{END}{after}"
