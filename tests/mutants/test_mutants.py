"""Each mutant of the package is caught by the tests that it names.

Every one runs in a process of its own on a copy of package and tests, two at a time.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.mutants import mutants, two_ways
from tests.mutants.mutants import Mutant

MUTANTS = (*mutants.MUTANTS, *two_ways.MUTANTS)
ROOT = Path(__file__).resolve().parents[2]
AT_ONCE = 2
SECONDS = 90
NOT_THE_COPY = 90

# The package is imported before pytest, which puts its root in front of the path as well.
SCRIPT = f"""
import sys
sys.path.insert(0, ".")
import prefetchpipe
if not prefetchpipe.__file__.startswith(sys.argv[1]):
    print(prefetchpipe.__file__)
    sys.exit({NOT_THE_COPY})
import pytest
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "--tb=line", "--timeout=20", *sys.argv[2:]]))
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


def run(mutant: Mutant | None, folder: Path) -> Outcome:
    ignore = shutil.ignore_patterns("__pycache__", ".*")
    for name in ("prefetchpipe", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    if mutant is not None:
        path = folder / "prefetchpipe" / mutant.file
        path.write_text(mutated(mutant.find, mutant.replace, path.read_text()))
    tests = sorted({test for m in MUTANTS for test in m.tests}) if mutant is None else mutant.tests
    try:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(folder), *tests],
            cwd=folder,
            check=False,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as expired:
        return Outcome(-1, f"{expired}\n{expired.stdout!r}")
    return Outcome(done.returncode, done.stdout + done.stderr)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One future for each mutant that is to be tested; they run ahead of the tests that look at them."""
    names = {item.callspec.params["name"] for item in request.session.items if "outcomes" in item.fixturenames}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures: dict[str, Future[Outcome]] = {}
        for mutant in (None, *MUTANTS):
            name = CONTROL if mutant is None else mutant.name
            if name in names:
                futures[name] = pool.submit(run, mutant, tmp_path_factory.mktemp("mutant"))
        yield futures
        pool.shutdown(cancel_futures=True)


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
