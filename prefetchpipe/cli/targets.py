"""``module:function``: finding a function of the user's, and calling it for a loader."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefetchpipe.cli.terminal import CliError

__all__ = ["AXES", "axes_of", "find", "make_loader", "said_by_user"]

AXES = ("batch_size", "num_workers")
"""What a loader factory may take, by these names."""

_FROM_WORKER = "in DataLoader worker process"
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+).*$', re.MULTILINE)
_FORMAT = "allowed: module:function, package.module:function or path/to/file.py:function"


def find(argument: str, spec: str) -> Callable[..., Any]:
    """The function that ``spec`` names.

    The working directory (or the file's folder) is put in front of the import path, where ``python`` itself has it,
    so that worker processes find the module too.

    Args:
        argument: The name of the argument, for the error.
        spec: ``module:function``, dots allowed on both sides, or ``path/to/file.py:function``.

    Raises:
        CliError: Another format, a module that does not import, no such attribute, or one that is not callable.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name or not all(part.isidentifier() for part in name.split(".")):
        raise CliError(f"{argument}: {spec!r} is not of the right form; {_FORMAT}")
    found: Any = _import(argument, spec, place)
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            names = getattr(found, "__dict__", {})  # a number has none
            public = [key for key, value in names.items() if callable(value) and not key.startswith("_")]
            there = f"; it has {', '.join(public[:8])}" if public else ""
            raise CliError(f"{argument}: {spec!r}: {place} has no {name!r}{there}") from None
        except Exception as error:
            raise CliError(f"{argument}: {spec!r} raised {said_by_user(error)}; {_FORMAT}") from error
    if not callable(found):
        raise CliError(f"{argument}: {spec!r} is a {type(found).__name__}; allowed: a function")
    return found  # type: ignore[no-any-return]


def axes_of(spec: str, function: Callable[..., Any]) -> set[str]:
    """Which of :data:`AXES` the factory takes.

    Raises:
        CliError: It has a parameter without a default that is none of them.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return set()
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in open_ended
        and (parameter.name not in AXES or parameter.kind is parameter.POSITIONAL_ONLY)
    ]
    if required:
        raise CliError(
            f"{spec!r} needs {', '.join(map(repr, required))}; allowed parameters: {', '.join(AXES)} (by these names), "
            "and any that have a default"
        )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return set(AXES)
    return {parameter.name for parameter in parameters if parameter.name in AXES}


def make_loader(spec: str, function: Callable[..., Any], **chosen: int) -> Any:
    """Call the factory.

    Args:
        spec: What the user wrote.
        function: The factory.
        **chosen: Values for the axes that it takes.

    Raises:
        CliError: The factory raised (exit code 1), or what it gave is not iterable.
    """
    try:
        loader = function(**chosen)
    except (Exception, SystemExit) as error:
        raise CliError(f"{spec!r} raised {said_by_user(error)}", exit_code=1) from error
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise CliError(f"{spec!r} returned a {type(loader).__name__}; allowed: an iterable of batches")
    return loader


def said_by_user(error: BaseException) -> str:
    """One line about an error of the user's code: type, first line of the text, and where it was raised."""
    text = str(error).strip()
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_machinery(frame.filename)]
    where = (frames[-1].filename, frames[-1].lineno) if frames else None
    inner = list(_FRAME.finditer(text)) if _FROM_WORKER in text else []
    if inner:  # the traceback of a worker process, which torch puts into the text
        where = (inner[-1]["file"], int(inner[-1]["line"]))
        said = [line for line in text[inner[-1].end() :].splitlines() if line and not line.startswith(" ")]
        text = (said or [""])[0].removeprefix(f"{type(error).__name__}:").strip()
    place = "" if where is None else f" ({Path(where[0]).name}:{where[1]})"
    return f"{type(error).__name__}: {(text.splitlines() or [''])[0]}".rstrip(": ") + place


def _is_machinery(filename: str) -> bool:
    return filename in {__file__, importlib.__file__} or filename.startswith("<frozen importlib")


def _import(argument: str, spec: str, place: str) -> Any:
    path = Path(place)
    folder, module = Path.cwd(), place
    if path.suffix == ".py":
        if not path.is_file():
            raise CliError(f"{argument}: {spec!r}: there is no file {place}; {_FORMAT}")
        folder, module = path.resolve().parent, path.stem
    elif not all(part.isidentifier() for part in place.split(".")):
        raise CliError(f"{argument}: {spec!r} is not of the right form; {_FORMAT}")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        found = importlib.import_module(module)
    except Exception as error:
        raise CliError(f"{argument}: {spec!r}: cannot import {module}: {said_by_user(error)}; {_FORMAT}") from error
    except SystemExit as error:
        raise CliError(
            f"{argument}: {spec!r}: importing {module} ends the program; allowed: a module that can be imported "
            "(put what it runs under `if __name__ == '__main__':`)"
        ) from error
    if path.suffix == ".py" and Path(found.__file__ or "").resolve() != path.resolve():
        raise CliError(
            f"{argument}: {spec!r}: a module {module!r} is imported already, from {found.__file__}; "
            "allowed: a file whose name no other module has"
        )
    return found
