"""The race row: every contender, every loader row, every depth, ours with and without a transform."""

from __future__ import annotations

from benchmarks.contenders import select
from benchmarks.race import BATCHES, run_race
from benchmarks.rows.base import Context, LoaderRow
from benchmarks.schema import OURS, RowResult

__all__ = ["ROWS", "RaceRow"]


class RaceRow:
    """Runs races for all loader rows, or for those of ``rows``.

    Args:
        rows: Names of loader rows; ``None``: all of the groups ``loader``.
        delay: Milliseconds of GPU work per step; 0: by the size of the batch.
    """

    name = "race"
    group = "race"
    rank = 1
    title = f"wrong batches out of {BATCHES}: slow GPU, fast CPU"

    def __init__(self, rows: tuple[str, ...] | None = None, delay: float = 0.0) -> None:
        self._rows = rows
        self._delay = delay

    def run(self, context: Context) -> RowResult:
        """See :class:`benchmarks.rows.base.Row`."""
        from benchmarks.rows import all_rows

        result = RowResult(self.name, self.title)
        contenders = select(context.options.contenders, context.options.variants)
        for row in all_rows().values():
            if not isinstance(row, LoaderRow) or not self._wanted(row):
                continue
            for contender in contenders:
                if contender.missing(context.env) is not None:
                    continue
                if row.allowed is not None and not contender.name.startswith(row.allowed):
                    continue
                transforms = (False, True) if contender.name.startswith(OURS) else (False,)
                for depth in contender.depths or (None,):
                    for transform in transforms:
                        context.watch()
                        count = run_race(
                            row, contender, context.env, depth=depth, transform=transform, delay=self._delay
                        )
                        result.race.append(count)
                        said = count.error if count.wrong is None else f"{count.wrong} of {count.of} wrong"
                        context.progress.say(f"race  {row.name:14} {contender.name} {count.variant}: {said}")
            row.release()
        return result

    def _wanted(self, row: LoaderRow) -> bool:
        return row.name in self._rows if self._rows is not None else row.group == "loader"


ROWS = (RaceRow(),)
