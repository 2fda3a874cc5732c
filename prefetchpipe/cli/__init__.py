"""The command line: ``prefetchpipe`` and ``python -m prefetchpipe``. Nothing in the package imports it."""

from __future__ import annotations

import importlib.util
import sys

__all__ = ["main"]

_NEEDED = ("typer", "rich")
_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Command and options; None: those of the process.

    Returns:
        The exit status: 0; 1 if what was asked for failed; 2 for bad input; 130 after Ctrl-C.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"error: the command line needs {' and '.join(missing)}; install it with: pip install 'prefetchpipe[cli]'\n"
        )
        return 2
    try:
        from prefetchpipe.cli.app import app

        app(arguments, prog_name="prefetchpipe")
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0
