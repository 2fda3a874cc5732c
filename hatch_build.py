"""Compiles prefetchpipe/native/copies.c when a wheel, or an editable install, is built.

Without a C compiler, or off Linux, the package is built all the same, and packs with torch's threads.
``python hatch_build.py`` does it in a source tree that is used where it lies.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "prefetchpipe" / "native"
FLAGS = ("-std=gnu11", "-O3", "-shared", "-fPIC", "-pthread")


def build(folder: Path = FOLDER) -> Path | None:
    """The shared library beside its source; None, with a reason on standard error, where it cannot be.

    Whatever goes wrong, the package is built: a compiler is no condition for it.
    """
    try:
        return _built(folder)
    except (OSError, ValueError) as error:  # a tree that cannot be written, or a CC that is no command line
        return _without(str(error))


def _built(folder: Path) -> Path | None:
    source, library = folder / "copies.c", folder / "_copies.so"
    for old in folder.glob("_copies.so*"):  # also of a build that was ended in the middle
        old.unlink(missing_ok=True)
    if not sys.platform.startswith("linux"):
        return _without("this is not Linux")
    # The compiler of the user's choice, else the usual names; not the one that Python itself was built with.
    found = [name for name in ("cc", "gcc", "clang") if shutil.which(name)]
    command = shlex.split(os.environ.get("CC", "")) or found[:1]
    if not command:
        return _without("no C compiler was found (cc, gcc, clang, or what CC names)")
    fresh = folder / f"_copies.so.{os.getpid()}"  # a running process keeps the library that it has opened
    try:
        result = subprocess.run(  # noqa: S603 - the compiler that the user has chosen, on our own source
            [*command, *FLAGS, "-o", fresh, source], capture_output=True, text=True, check=False
        )
    except OSError as error:
        return _without(f"{command[0]} could not be run: {error}")
    if result.returncode or not fresh.exists():
        fresh.unlink(missing_ok=True)
        return _without(f"{shlex.join(command)} failed:\n{result.stderr}")
    fresh.replace(library)
    return library


def _without(reason: str) -> None:
    sys.stderr.write(f"prefetchpipe is built without native copies: {reason}\n")


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # a source tree without the build's own tools
    pass
else:

    class NativeHook(BuildHookInterface):  # type: ignore[type-arg]
        """What hatchling calls before it builds a wheel."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
            """See hatchling's build hooks: https://hatch.pypa.io/latest/plugins/build-hook/reference/."""
            library = build()
            if library is not None:
                platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
                build_data["artifacts"].append(f"/{library.relative_to(self.root)}")
                build_data["pure_python"] = False
                build_data["tag"] = f"py3-none-{platform}"  # ctypes loads it: any Python, this platform


if __name__ == "__main__":
    sys.exit(build() is None)
