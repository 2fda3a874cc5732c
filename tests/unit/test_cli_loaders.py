"""sweep and trace with loaders named as module:function, and what is said about one that is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prefetchpipe.cli.targets import axes_of, find, make_loader
from tests.cli_support import PNG, SWEEP, document, loaders_in, one_line, run


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    with loaders_in(tmp_path, monkeypatch):
        yield tmp_path


class TestSweep:
    @pytest.mark.slow
    def test_table_chart_and_comparison(self, folder):
        chosen = ("--batch-sizes", "4,8", "--depths", "1,2", "--workers", "0", "--step", "cli_loaders:step", *SWEEP)
        first = run("sweep", "cli_loaders:both", *chosen, "--out", "first.json")
        assert first.exit_code == 0, first.output
        assert (folder / "sweep.png").read_bytes().startswith(PNG)
        assert "Most samples a second: batch size" in first.stdout
        second = run("sweep", "cli_loaders:open_ended", *chosen, "--compare", "first.json", "--no-chart")
        assert second.exit_code == 0, second.output
        assert "Against the earlier run" in second.stdout
        assert "Not the same loader: cli_loaders:both then, cli_loaders:open_ended now." in second.stdout

    def test_json_is_alone_on_stdout_whatever_the_loader_prints(self):
        found = document("sweep", "cli_loaders:plain", "--depths", "2", "--no-chart", *SWEEP)
        (only,) = found["points"]
        assert (only["batch_size"], only["depth"], only["num_workers"]) == (None, 2, None)
        assert [window["samples"] for window in only["windows"]] == [8, 8]

    @pytest.mark.slow
    def test_a_chart_without_any_axis(self, folder):
        assert run("sweep", "cli_loaders:plain", *SWEEP).exit_code == 0
        assert (folder / "sweep.png").read_bytes().startswith(PNG)

    @pytest.mark.parametrize(
        ("spec", "said"),
        [
            ("cli_loaders", "'cli_loaders' is not of the right form; allowed: module:function"),
            ("cli loaders:f", "is not of the right form"),
            (":f", "is not of the right form"),
            ("cli_nowhere:f", "cannot import cli_nowhere: ModuleNotFoundError: No module named 'cli_nowhere'"),
            ("cli_broken:f", "ModuleNotFoundError: No module named 'cli_missing' (cli_broken.py:1)"),
            ("cli_wrong.py:f", "cannot import cli_wrong: SyntaxError"),
            ("cli_script.py:f", "importing cli_script ends the program"),
            ("json.py:f", "a module 'json' is imported already"),
            ("nowhere.py:f", "there is no file nowhere.py"),
            ("cli_loaders:nope", "cli_loaders has no 'nope'; it has plain, both"),
            ("cli_loaders:ready.__len__.nope", "cli_loaders has no 'ready.__len__.nope'"),
            ("cli_loaders:odd.loader", "'cli_loaders:odd.loader' raised ValueError: not yet (cli_loaders.py:"),
            ("cli_loaders:ready", "is a list; allowed: a function"),
            ("cli_loaders:other", "needs 'path'; allowed parameters: batch_size, num_workers"),
            ("cli_loaders:positional", "needs 'batch_size'; allowed parameters"),
        ],
    )
    def test_a_loader_that_is_none(self, spec, said):
        assert said in one_line(run("sweep", spec, "--no-chart", *SWEEP))

    @pytest.mark.parametrize(
        ("spec", "said"),
        [
            ("cli_loaders:empty", "the loader gave no batch in a whole pass"),
            ("cli_loaders:raises", "'cli_loaders:raises' raised KeyError: 'row 2' (cli_loaders.py:18)"),
            ("cli_loaders:late", "ValueError: row 2 (cli_loaders.py:23)"),
            ("cli_loaders:number", "returned a int; allowed: an iterable of batches"),
            ("cli_loaders:ends", "'cli_loaders:ends' raised SystemExit: 3 (cli_loaders.py:29)"),
            (
                "cli_loaders:once",
                "gave 1 batch and then none in a further pass; allowed: a loader that can be iterated",
            ),
            pytest.param("cli_loaders:in_workers", ": ValueError: row (cli_loaders.py:36)", marks=pytest.mark.slow),
        ],
    )
    def test_a_loader_that_fails(self, spec, said):
        assert said in one_line(run("sweep", spec, "--no-chart", *SWEEP), code=1)

    def test_nothing_is_cut_off_in_a_terminal_of_80_columns(self, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        result = run("sweep", "cli_loaders:plain", "--depths", 1, "--no-chart", *SWEEP)
        assert result.exit_code == 0, result.output
        assert "samples/s" in result.stdout
        assert "…" not in result.stdout

    def test_a_step_that_fails(self):
        result = run("sweep", "cli_loaders:plain", "--step", "cli_loaders:bad_step", "--no-chart", *SWEEP)
        assert result.exit_code == 1
        assert "ValueError: no step (cli_loaders.py:27)" in result.stderr

    def test_an_axis_that_the_function_does_not_take(self):
        line = one_line(run("sweep", "cli_loaders:plain", "--batch-sizes", "4", "--no-chart", *SWEEP))
        assert "--batch-sizes: 'cli_loaders:plain' has no parameter 'batch_size'" in line

    def test_a_file_and_a_nested_name(self):
        assert find("LOADER", "cli_loaders.py:Namespace.inner")()[0].shape == (4, 2)

    @pytest.mark.slow
    def test_the_example(self):
        example = Path(__file__).parents[2] / "examples" / "loader_for_cli.py"
        chosen = ("--step", f"{example}:step", "--batch-sizes", 4, "--depths", 1, "--workers", 0, "--no-chart", *SWEEP)
        (point,) = document("sweep", f"{example}:make_loader", *chosen)["points"]
        assert point["error"] == ""
        assert [window["nbytes"] for window in point["windows"]] == [2 * 4 * (3 * 64 * 64 + 8)] * 2

    def test_a_factory_takes_what_it_names(self):
        assert axes_of("x", lambda num_workers=0, other=1: []) == {"num_workers"}
        assert make_loader("x", lambda batch_size: [batch_size], batch_size=3) == [3]


class TestTrace:
    @pytest.mark.slow
    def test_trace_chart_and_table(self, folder):
        result = run("trace", "cli_loaders:both", "--batch-size", 4, "--batches", 3, "--step", "cli_loaders:step",
                     "--workers", 0)  # fmt: skip
        assert result.exit_code == 0, result.output
        assert json.loads((folder / "trace.json").read_text())["traceEvents"]
        assert (folder / "trace.png").read_bytes().startswith(PNG)
        assert "compute" in result.stdout

    def test_json(self):
        found = document("trace", "cli_loaders:plain", "--batches", 2, "--no-chart")
        assert {span["batch"] for span in found["spans"] if span["lane"] == "compute"} == {0, 1}

    @pytest.mark.parametrize(
        ("arguments", "said", "code"),
        [
            (("cli_loaders:empty",), "the loader gave no batch", 1),
            (("cli_loaders:raises",), "raised KeyError: 'row 2'", 1),
            (("cli_loaders:late",), "ValueError: row 2", 1),
            (("cli_loaders:ends",), "'cli_loaders:ends' raised SystemExit: 3", 1),
            (("cli_loaders:plain", "--step", "cli_loaders:nope"), "--step: 'cli_loaders:nope'", 2),
            (("cli_loaders:plain", "--transform", "x"), "--transform: 'x' is not of the right form", 2),
            (("cli_loaders:plain", "--batch-size", "3"), "has no parameter 'batch_size'", 2),
            (("cli_loaders:plain", "--batches", "0"), "--batches", 2),
        ],
    )
    def test_bad_input_is_one_line(self, arguments, said, code):
        result = run("trace", *arguments)
        assert result.exit_code == code
        assert said in result.stderr
        assert "Traceback" not in result.output
