"""Results files: one JSON document with a schema version, what wrote it, where and when."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path
from typing import Any

import torch

import prefetchpipe
from prefetchpipe.cli.measure.machine import Machine, read_machine
from prefetchpipe.cli.terminal import CliError

__all__ = ["SCHEMA", "check_out", "document", "load", "save"]

SCHEMA = 1


def document(command: str, options: dict[str, Any], device: torch.device | None, **content: Any) -> dict[str, Any]:
    """What ``--json`` prints and ``--out`` writes: the head that all commands share, then ``content``."""
    return {
        "schema": SCHEMA,
        "command": command,
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "prefetchpipe": prefetchpipe.__version__,
        "torch": torch.__version__,
        "machine": _where(read_machine(), device),
        "options": options,
        **content,
    }


def check_out(path: Path | None) -> None:
    """Before anything is measured: is ``path`` the name of a file?

    Raises:
        CliError: It is a folder.
    """
    if path is not None and path.is_dir():
        raise CliError(f"--out: {str(path)!r} is a folder; allowed: the name of a file")


def save(result: dict[str, Any], path: Path) -> None:
    """Write ``result``; a reader never sees half a file.

    Raises:
        CliError: The file cannot be written.
    """
    partial = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}") from error


def load(path: Path, command: str) -> dict[str, Any]:
    """Read a results file of ``command``.

    Raises:
        CliError: No such file, no results file, one of another command, or one of another schema version.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse)
    except OSError as error:
        raise CliError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise CliError(f"{path} is no JSON; allowed: a file that `prefetchpipe {command} --out` wrote") from None
    if not isinstance(result, dict) or "schema" not in result or "command" not in result:
        raise CliError(f"{path} is no results file; allowed: one that `prefetchpipe {command} --out` wrote")
    if result["schema"] != SCHEMA:
        raise CliError(
            f"{path} has schema {result['schema']!r}, written by prefetchpipe {result.get('prefetchpipe', '?')}; "
            f"allowed: schema {SCHEMA}, so measure again with prefetchpipe {prefetchpipe.__version__}"
        )
    if result["command"] != command:
        raise CliError(f"{path} was written by `{result['command']}`; allowed: a file of `{command}`")
    return result


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _where(machine: Machine, device: torch.device | None) -> dict[str, Any]:
    where: dict[str, Any] = {
        "system": machine.system,
        "cpu": machine.cpu,
        "cores": machine.usable_cores,
        "torch_threads": torch.get_num_threads(),
        "device": str(device) if device is not None else None,
    }
    if device is not None and device.type == "cuda":
        where["gpu"] = torch.cuda.get_device_name(device)
    return where
