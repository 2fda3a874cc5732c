"""``prefetchpipe bench``: the benchmark suite, which is part of the source checkout and not of the wheel."""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

import prefetchpipe
from prefetchpipe.cli.terminal import CliError, only_json_on_stdout, print_json

__all__ = ["bench", "find_suite"]

_MEASURING = ("run", "race")


def bench(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="The results file on standard output.")] = False,
) -> None:
    """Run the benchmark suite of a source checkout; further arguments are those of `python -m benchmarks`.

    For example: prefetchpipe bench --quick; prefetchpipe bench race; prefetchpipe bench list.
    """
    root = find_suite(Path(prefetchpipe.__file__))
    arguments = list(context.args)
    command = arguments[0] if arguments and not arguments[0].startswith("-") else "run"
    if as_json and command not in _MEASURING:
        raise CliError(f"--json: {command!r} measures nothing; allowed with {' and '.join(_MEASURING)}")
    if as_json and any(argument.partition("=")[0] == "--out" for argument in arguments):
        raise CliError("--out: with --json the results file goes to standard output; allowed: one of the two")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    suite = importlib.import_module("benchmarks.cli")
    if not as_json:
        raise typer.Exit(suite.main(arguments))
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "results.json"
        with only_json_on_stdout(active=True):
            status = suite.main([*arguments, "--out", str(written)])
        if written.exists():
            print_json(json.loads(written.read_text(encoding="utf-8")))
    raise typer.Exit(status)


def find_suite(package: Path) -> Path:
    """The root of the checkout.

    Args:
        package: The ``__init__.py`` of the package that runs.

    Raises:
        CliError: The package is an installed one.
    """
    root = package.resolve().parents[1]
    if not (root / "benchmarks" / "cli.py").is_file():
        raise CliError(
            "bench needs the benchmarks folder of a source checkout, and this prefetchpipe is installed without it "
            f"({package.resolve().parent}); run it there, or measure a loader of yours with `prefetchpipe sweep`"
        )
    return root
