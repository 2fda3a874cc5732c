"""Keeps the performance section of the README equal to results files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.schema import Result
from benchmarks.table import explanation, heading, limits_line, race_table, summary_table, values_table

__all__ = ["BEGIN", "END", "rewrite"]

BEGIN = "<!-- performance table -->"
END = "<!-- /performance table -->"


def rewrite(text: str, results: Sequence[tuple[Result, str]]) -> str:
    """``text`` with the block between the two markers made anew: one part for each result and the path of its file.

    Raises:
        ValueError: The markers are not there once each, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the text needs {BEGIN} and {END} once each, in this order")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    made_by = "Made by `python -m benchmarks readme FILE ...` from the results files that each table names."
    parts = [f"{explanation()} {made_by}"]
    first = results[0][0] if results else None
    races = [f"{Path(file).name}: {race}" for result, file in results if (race := race_table(result))]
    for result, file in results:
        is_same = first is not None and (first.machine, first.versions) == (result.machine, result.versions)
        what = (
            heading(result)
            if result is first or not is_same
            else f"same machine and versions; {result.date[:10]}, commit {result.git_commit}."
        )
        parts += [f"[{Path(file).name}]({file}): {what} {limits_line(result)}".strip()]
        parts += [summary_table(result), values_table(result)]
    parts += races
    block = "\n\n".join(part for part in parts if part)
    return f"{before}{BEGIN}\n{block}\n{END}{after}"
