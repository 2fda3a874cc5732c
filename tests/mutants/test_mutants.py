"""Each mutant of the package is caught by the tests that it names.

Every one runs in a fork of its own on a copy of package and tests, two at a time.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from prefetchpipe import native
from tests.mutants import mutants, two_ways
from tests.mutants.mutants import Mutant

MUTANTS = (*mutants.MUTANTS, *two_ways.MUTANTS)
NATIVE = {mutant.name for mutant in MUTANTS if "native cop" in mutant.name or "test_native" in "".join(mutant.tests)}
ROOT = Path(__file__).resolve().parents[2]
AT_ONCE = 2
SECONDS = 180
NOT_THE_COPY = 90

# Started once for each of the two at a time. It imports what takes long, and forks for every mutant; the package itself
# is imported in the fork, before pytest, which puts its root in front of the path as well.
ZYGOTE = f"""
import json, os, signal, sys, time, traceback
import numpy, pytest, torch, torch.utils.data

def run(folder, tests):
    os.setsid()
    os.chdir(folder)
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.path.insert(0, folder)
    import prefetchpipe
    if not prefetchpipe.__file__.startswith(folder):
        print(prefetchpipe.__file__)
        return {NOT_THE_COPY}
    return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--tb=line", "--timeout=20", *tests]))

for line in sys.stdin:
    folder, tests = json.loads(line)
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 1
        try:
            code = run(folder, tests)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + {SECONDS}
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            status = None
            break
        time.sleep(0.01)
    print("done", -1 if status is None else os.waitstatus_to_exitcode(status), file=sys.__stdout__, flush=True)
"""

CONTROL = "nothing is removed"


@dataclasses.dataclass(frozen=True)
class Outcome:
    returncode: int
    output: str

    @property
    def failed(self) -> bool:
        """Whether a test failed or hung; an error while collecting is neither."""
        return self.returncode == 1 and re.search(r"^\d+ failed", self.output, re.MULTILINE) is not None


def mutated(find: str, replace: str, text: str) -> str:
    assert text.count(find) == 1, f"{text.count(find)} places to mutate, not one: {find!r}"
    return text.replace(find, replace)


class Zygote:
    """A process that runs one mutant after the other, each in a fork."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", ZYGOTE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, folder: Path, tests: Sequence[str]) -> Outcome:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([str(folder), list(tests)]) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline().split()
        output = folder / "output.txt"
        code = int(answer[1]) if answer else -2
        return Outcome(code, output.read_text() if output.exists() else f"the process that forks ended: {answer}")

    def close(self) -> None:
        assert self._process.stdin is not None
        with self._process:
            self._process.stdin.close()


def run(mutant: Mutant | None, folder: Path, zygotes: SimpleQueue[Zygote]) -> Outcome:
    ignore = shutil.ignore_patterns("__pycache__", ".*")
    for name in ("prefetchpipe", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("pyproject.toml", "hatch_build.py"):
        shutil.copy(ROOT / name, folder)
    if mutant is not None:
        path = folder / "prefetchpipe" / mutant.file
        path.write_text(mutated(mutant.find, mutant.replace, path.read_text()))
    tests = sorted({test for m in MUTANTS for test in m.tests}) if mutant is None else mutant.tests
    zygote = zygotes.get()
    try:
        return zygote.run(folder, tests)
    finally:
        zygotes.put(zygote)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One future for each mutant that is to be tested; they run ahead of the tests that look at them."""
    names = {item.callspec.params["name"] for item in request.session.items if "outcomes" in item.fixturenames}
    zygotes: SimpleQueue[Zygote] = SimpleQueue()
    started = [Zygote() for _ in range(AT_ONCE)]
    for zygote in started:
        zygotes.put(zygote)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures: dict[str, Future[Outcome]] = {}
        for mutant in (None, *MUTANTS):
            name = CONTROL if mutant is None else mutant.name
            if name in names:
                futures[name] = pool.submit(run, mutant, tmp_path_factory.mktemp("mutant"), zygotes)
        yield futures
        pool.shutdown(cancel_futures=True)
    for zygote in started:
        zygote.close()


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 4)
@pytest.mark.parametrize("name", [CONTROL])
def test_the_tests_pass_where_nothing_is_removed(outcomes: Any, name: str) -> None:
    outcome = outcomes[name].result()
    assert outcome.returncode == 0, outcome.output


@pytest.mark.slow
@pytest.mark.timeout(SECONDS * 4)
@pytest.mark.parametrize("name", [mutant.name for mutant in MUTANTS])
def test_the_mutant_is_caught(outcomes: Any, name: str) -> None:
    if name in NATIVE and not native.is_available():
        pytest.skip(f"no native copies: {native.why_not()}")
    outcome = outcomes[name].result()
    assert outcome.failed, f"survives: {name}\n{outcome.returncode}\n{outcome.output}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_place_of_the_mutant_is_in_the_code(mutant: Mutant) -> None:
    text = (ROOT / "prefetchpipe" / mutant.file).read_text()
    code = mutated(mutant.find, mutant.replace, text)
    compile(code, mutant.file, "exec")
    assert code != text


def test_the_names_of_mutants_differ() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
