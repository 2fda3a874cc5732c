"""The command line of the suite."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from benchmarks import schema

if TYPE_CHECKING:
    from benchmarks.rows.base import Row

__all__ = ["main"]

_FOLDER = Path(__file__).resolve().parent
_RESULTS = _FOLDER / "results"
_README = _FOLDER.parent / "README.md"
_QUICK_ROWS = [
    "images",
    "dlrm",
    "tiny",
    "tokens",
    "arrays",
    "tabular",
    "cpu-pass",
    "import",
    "leaves",
    "d2h",
    "both",
    "loop-hold",
]


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or (arguments[0].startswith("--") and arguments[0] != "--help"):
        arguments.insert(0, "run")
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        status: int = options.command(options)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage."""
        self.exit(2, f"error: {message} (see: {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m benchmarks", description="prefetchpipe next to its peers.")
    commands = parser.add_subparsers(required=True, metavar="run | race | table | compare | charts | readme | list")

    run = commands.add_parser("run", help="measure rows (the default command)")
    _common(run)
    run.add_argument("--rows", nargs="+", default=None, help="rows or groups; default: the groups loader and measure")
    run.add_argument("--regimes", nargs="+", default=["transfer", "balanced", "compute"])
    run.add_argument("--repeats", type=int, default=5)
    run.add_argument("--seconds-per-cell", type=float, default=0.15, help="aimed-for length of one timed window")
    run.add_argument("--no-race", action="store_true", help="do not check contenders for wrong batches first")
    run.add_argument("--charts", action="store_true", help="draw charts beside the results file")
    run.set_defaults(command=_run)

    race = commands.add_parser("race", help="wrong batches out of 60 for each contender")
    _common(race)
    race.add_argument("--rows", nargs="+", default=None, help="workloads; default: all of the group loader")
    race.add_argument("--delay-ms", type=float, default=0.0, help="GPU work per step; default: by the batch's size")
    race.set_defaults(command=_race)

    table = commands.add_parser("table", help="markdown from a results file")
    table.add_argument("result", type=Path, nargs="?")
    table.add_argument("--all", action="store_true", help="every contender, not the best right peer alone")
    table.set_defaults(command=_table)

    compare = commands.add_parser("compare", help="two results files side by side")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    compare.set_defaults(command=_compare)

    charts = commands.add_parser("charts", help="PNG charts of a results file")
    charts.add_argument("result", type=Path, nargs="?")
    charts.add_argument("--out", type=Path, default=None, help="folder; default: beside the results file")
    charts.set_defaults(command=_charts)

    readme = commands.add_parser("readme", help="rewrite README.md's tables from results files; default: the newest")
    readme.add_argument("results", type=Path, nargs="*")
    readme.add_argument("--readme", type=Path, default=_README)
    readme.set_defaults(command=_readme)

    listing = commands.add_parser("list", help="rows and contenders")
    listing.set_defaults(command=_list)
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--contenders", nargs="+", default=[], help="default: all")
    parser.add_argument("--variant", action="append", default=[], help="a further prefetchpipe, as option=value,...")
    parser.add_argument("--workers", type=int, default=8, help="worker processes of the workers-* rows")
    parser.add_argument("--device", default=None)
    parser.add_argument("--quick", action="store_true", help="scaled-down batches, few repeats: does the suite work?")
    parser.add_argument(
        "--out", type=Path, default=None, help="results file; default: benchmarks/results/DATE.json, none if quick"
    )
    parser.add_argument("--commit", default=None, help="commit to record where the tree is no git checkout")
    parser.add_argument("--quiet", action="store_true")


def _run(options: argparse.Namespace) -> int:
    from benchmarks.rows import select
    from benchmarks.runner import FACTORS

    unknown = [name for name in options.regimes if name not in FACTORS]
    if unknown:
        raise ValueError(f"no regime {', '.join(unknown)}; there are {', '.join(FACTORS)}")
    rows = select(options.rows or (_QUICK_ROWS if options.quick else ["loader", "measure"]))
    return _measure(options, rows, regimes=tuple(options.regimes), race=not options.no_race)


def _race(options: argparse.Namespace) -> int:
    from benchmarks.rows import select
    from benchmarks.rows.race import RaceRow

    names = tuple(row.name for row in select(options.rows)) if options.rows else None
    return _measure(options, [RaceRow(names, options.delay_ms)])


def _measure(options: argparse.Namespace, rows: Sequence[Row], **chosen: object) -> int:
    from benchmarks.contenders import select
    from benchmarks.environment import Env, now
    from benchmarks.progress import Progress
    from benchmarks.rows.base import Context, Options
    from benchmarks.runner import run
    from benchmarks.table import full_table, race_table, values_table

    settings = Options(
        repeats=getattr(options, "repeats", 5),
        seconds=getattr(options, "seconds_per_cell", 0.15),
        contenders=tuple(options.contenders),
        variants=tuple(options.variant),
        **chosen,  # type: ignore[arg-type]
    )
    if options.quick:
        settings = dataclasses.replace(settings, repeats=min(settings.repeats, 3), seconds=0.03)
    select(settings.contenders, settings.variants)
    env = Env.detect(device=options.device, small=options.quick, workers=options.workers)
    out = options.out
    if out is None and not options.quick:
        out = _RESULTS / f"{now().replace(':', '').replace('-', '')}.json"
    context = Context(env, settings, Progress(quiet=options.quiet))
    result = run(rows, context, _recorded(options), out, commit=options.commit)  # type: ignore[arg-type]
    parts = [full_table(result), race_table(result), values_table(result)]
    print("\n\n".join(part for part in parts if part))
    if getattr(options, "charts", False) and out is not None:
        _draw(result, out.with_suffix(""))
    if not options.quiet:
        print(f"\n{out or 'no results file (--out)'}: {result.seconds:.0f} s", file=sys.stderr)
    return 1 if any(row.error for row in result.rows) else 0


def _recorded(options: argparse.Namespace) -> list[str]:
    """The choices of this run, without paths."""
    left_out = ("command", "commit", "out", "quiet", "charts")
    chosen = {name: value for name, value in vars(options).items() if name not in left_out and value not in (None, [])}
    return [f"{name}={value}" for name, value in chosen.items()]


def _table(options: argparse.Namespace) -> int:
    from benchmarks.table import full_table, summary

    result = schema.load(_chosen(options.result))
    print(full_table(result) if options.all else summary(result))
    return 0


def _compare(options: argparse.Namespace) -> int:
    from benchmarks.compare import compare

    print(compare(schema.load(options.before), schema.load(options.after)))
    return 0


def _charts(options: argparse.Namespace) -> int:
    path = _chosen(options.result)
    return _draw(schema.load(path), options.out or path.with_suffix(""))


def _draw(result: schema.Result, folder: Path) -> int:
    from benchmarks.charts import draw

    try:
        paths = draw(result, folder)
    except ImportError as error:
        print(f"no charts: {error}", file=sys.stderr)
        return 1
    for path in paths:
        print(path, file=sys.stderr)
    return 0


def _readme(options: argparse.Namespace) -> int:
    from benchmarks.readme import rewrite

    root = options.readme.resolve().parent
    results = []
    for chosen in options.results or [None]:
        path = _chosen(chosen).resolve()
        shown = path.relative_to(root) if path.is_relative_to(root) else path
        results.append((schema.load(path), shown.as_posix()))
    text = rewrite(options.readme.read_text(encoding="utf-8"), results)
    options.readme.write_text(text, encoding="utf-8")
    return 0


def _list(options: argparse.Namespace) -> int:
    from benchmarks.contenders import all_contenders
    from benchmarks.environment import Env
    from benchmarks.rows import GROUPS, all_rows

    env = Env.detect()
    for row in all_rows().values():
        print(f"{row.group:8} {row.name:16} {row.title}")
    print("\ngroups: " + "; ".join(f"{name}: {what}" for name, what in GROUPS.items()) + "\n")
    for contender in all_contenders():
        print(f"{contender.name:16} {contender.missing(env) or 'can take part'}")
    return 0


def _chosen(path: Path | None) -> Path:
    chosen = path or schema.newest(_RESULTS)
    if chosen is None:
        raise FileNotFoundError(f"no complete results file with times of loops in {_RESULTS}; name the file to take")
    return chosen
