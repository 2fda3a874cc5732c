"""Helpers of the command line's tests: loaders to name, and runs through typer's runner."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from typer.testing import CliRunner

from prefetchpipe.cli import results
from prefetchpipe.cli.app import app

PNG = b"\x89PNG\r\n\x1a\n"
SWEEP = ("--batches", 2, "--warm", 0, "--repeats", 2)
"""A quick sweep."""
LOADERS = """
import torch
ready = [torch.ones(4, 2) for _ in range(3)]
def plain():
    print("said by the loader")
    return ready
def both(batch_size, num_workers):
    return [torch.ones(batch_size, 2) for _ in range(3)]
def open_ended(**options):
    return [torch.ones(options["batch_size"], 2)]
def other(path):
    return ready
def positional(batch_size, /):
    return ready
def empty():
    return []
def raises():
    raise KeyError("row 2")
def number():
    return 3
def late():
    yield torch.ones(2)
    raise ValueError("row 2")
def step(batch):
    assert batch.shape[1] == 2
def bad_step(batch):
    raise ValueError("no step")
def ends():
    raise SystemExit(3)
def once():
    yield torch.ones(2)
class Rows:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        raise ValueError("row\\nand more")
def in_workers():
    return torch.utils.data.DataLoader(Rows(), num_workers=1)
class Namespace:
    @staticmethod
    def inner():
        return ready
class Odd:
    @property
    def loader(self):
        raise ValueError("not yet")
odd = Odd()
"""


@contextmanager
def loaders_in(folder, monkeypatch) -> Iterator[None]:
    """A working directory with loaders; the import state is put back."""
    (folder / "cli_loaders.py").write_text(LOADERS)
    (folder / "cli_broken.py").write_text("import cli_missing\n")
    (folder / "cli_script.py").write_text("raise SystemExit(0)\n")
    (folder / "json.py").write_text("f = list\n")
    (folder / "cli_wrong.py").write_text("def f(:\n")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("cli_"):
            del sys.modules[name]


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def document(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["schema"], found["command"]) == (results.SCHEMA, arguments[0])
    return found


def one_line(result, code=2):
    assert result.exit_code == code, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert result.stdout == ""
    return line
