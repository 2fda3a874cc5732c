"""demo, bench, doctor and breakeven through typer's runner, results files, and what is said to bad input."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from prefetchpipe.cli import bench, results
from prefetchpipe.cli.terminal import CliError
from tests.cli_support import PNG, SWEEP, document, loaders_in, one_line, run
from tests.support import our_threads


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    with loaders_in(tmp_path, monkeypatch):
        yield tmp_path


class TestHelp:
    @pytest.mark.slow
    def test_every_command_has_help_and_json(self):
        listing = run("--help").output
        for name in ("demo", "bench", "doctor", "breakeven", "sweep", "trace"):
            assert name in listing
            assert "--json" in run(name, "--help").output

    def test_version(self):
        assert run("--version").output.startswith("prefetchpipe ")


class TestDemo:
    @pytest.mark.slow
    def test_it_is_the_quickstart(self, monkeypatch, capsys):
        """Same data, same steps: the example and the command end at the same accuracy."""
        pytest.importorskip("sklearn")
        root = Path(results.__file__).parents[2]
        spec = importlib.util.spec_from_file_location("cli_quickstart", root / "examples" / "quickstart.py")
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        monkeypatch.setattr(example, "EPOCHS", 2)
        with torch.random.fork_rng():
            example.main()
        accuracy = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("test accuracy"))
        outcome = document("demo", "--epochs", 2)["outcome"]
        assert f"{outcome['test_accuracy']:.3f}" == accuracy.split()[-1]
        assert outcome["losses"][1] < outcome["losses"][0]

    def test_without_scikit_learn(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "sklearn", None)
        monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
        before = torch.random.get_rng_state()
        result = run("demo", "--epochs", 1)
        assert result.exit_code == 0, result.output
        assert "scikit-learn is not installed" in result.stdout
        assert torch.equal(before, torch.random.get_rng_state())


class TestDoctor:
    @pytest.mark.parametrize("columns", ["40", "80"])
    def test_nothing_is_cut_off_in_a_narrow_terminal(self, monkeypatch, columns):
        monkeypatch.setenv("COLUMNS", columns)
        result = run("doctor", "--no-measure", "--device", "cpu")
        assert result.exit_code == 0, result.output
        assert "…" not in result.stdout

    def test_for_a_person(self):
        result = run("doctor", "--no-measure", "--device", "cpu")
        assert result.exit_code == 0, result.output
        for word in ("Findings", "Start with", "depth=2", "num_workers=", "copy_threads=", "/dev/shm", "memlock"):
            assert word in result.stdout

    def test_json(self):
        found = document("doctor", "--no-measure", "--device", "cpu")
        assert found["checkup"]["gpu"] is None
        assert {finding["severity"] for finding in found["findings"]} <= {"ok", "note", "problem"}
        assert [item["option"] for item in found["recommendations"]] == ["depth", "num_workers", "copy_threads"]

    @pytest.mark.parametrize(("problems", "strict", "code"), [(1, True, 1), (1, False, 0), (0, True, 0)])
    def test_strict(self, monkeypatch, problems, strict, code):
        from prefetchpipe.cli import doctor
        from prefetchpipe.cli.measure.advice import Finding

        said = [Finding("x", "problem", "y")] * problems + [Finding("z", "note", "y")]
        monkeypatch.setattr(doctor, "findings", lambda found: said)
        arguments = ["--strict"] if strict else []
        assert run("doctor", "--no-measure", "--device", "cpu", *arguments).exit_code == code


QUICK = ("--sizes", "2,4", "--seconds", 0, "--repeats", 2, "--device", "cpu")


class TestBreakeven:
    @pytest.mark.slow
    def test_table_chart_and_what_is_missing(self, folder):
        result = run("breakeven", *QUICK, "--chart", "out/curves.png")
        assert result.exit_code == 0, result.output
        assert (folder / "out/curves.png").read_bytes().startswith(PNG)
        for name in ("multiply", "matmul", "reduce", "mlp", "torch CPU against NumPy", "Not measured: torch GPU"):
            assert name in result.stdout

    def test_the_headline_says_what_is_worth_it(self):
        from prefetchpipe.cli.breakeven import _headline
        from prefetchpipe.cli.measure.crossover import Crossover

        def found(*kinds):
            return [Crossover("a", "b", kind, 70.0 if kind == "at" else None) for kind in kinds]

        gpu = {"multiply": found("at", "at", "at"), "reduce": found("at", "at", "not reached")}
        assert _headline(gpu, 2048) == (
            "The GPU, copies included, is faster than the CPU: multiply from n = 70; not up to n = 2048: reduce"
        )
        cpu = {"multiply": found("from the start", "not measured", "not measured")}
        assert _headline(cpu, 8) == "torch on the CPU is faster than NumPy: at every size: multiply"
        assert "nothing to compare" in _headline({"mlp": found(*["not measured"] * 3)}, 8)

    @pytest.mark.slow
    def test_json_file_and_back(self, folder):
        found = document("breakeven", *QUICK, "--ops", "reduce", "--no-chart", "--out", "a.json")
        assert json.loads((folder / "a.json").read_text()) == found
        assert [curve["side"] for curve in found["curves"]] == ["NumPy", "torch CPU"]
        assert [item["kind"] for item in found["crossovers"]["reduce"][1:]] == ["not measured"] * 2
        again = document("breakeven", "--from", "a.json", "--chart", "a.png")
        assert again == found
        assert (folder / "a.png").read_bytes().startswith(PNG)

    @pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
    def test_dtypes(self, dtype):
        found = document("breakeven", *QUICK, "--ops", "multiply,mlp", "--no-chart", "--dtype", dtype)
        assert ("NumPy" in found["missing"]) == (dtype == "bfloat16")

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("--ops", "multiply,conv"), "--ops: unknown 'conv'; allowed: multiply, matmul, reduce, mlp"),
            (("--ops", ","), "--ops: unknown ','; allowed: multiply"),
            (("--sizes", "8,x"), "--sizes: '8,x'; allowed: whole numbers of at least 1"),
            (("--sizes", "0"), "--sizes: '0'; allowed"),
            (("--dtype", "int3"), "--dtype: unknown 'int3'; allowed: float32, float64, float16, bfloat16"),
            (("--chart", "a.svg"), "--chart: 'a.svg'; allowed: a name that ends in .png"),
            (("--device", "tpu"), "--device: device must be"),
            (("--repeats", "x"), "--repeats"),
            (("--nope",), "--nope"),
            (("--seconds", "inf"), "--seconds"),
            (("--out", "."), "--out: '.' is a folder; allowed: the name of a file"),
        ],
    )
    def test_bad_input_is_one_line(self, arguments, said):
        assert said in one_line(run("breakeven", *arguments))

    def test_without_matplotlib(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert "pip install 'prefetchpipe[cli]'" in one_line(run("breakeven", *QUICK))


class TestResultsFiles:
    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (
                '{"schema": 99, "command": "sweep", "prefetchpipe": "9.0"}',
                "has schema 99, written by prefetchpipe 9.0; allowed: schema 1",
            ),
            ('{"schema": 1, "command": "breakeven"}', "was written by `breakeven`; allowed: a file of `sweep`"),
            ('{"schema": 1, "command": "sweep"}', "is no results file of sweep"),
            ('{"schema": 1, "command": "sweep", "points": [{"a": 1}]}', "is no results file of sweep"),
            ('{"schema": 1, "command": "sweep", "points": []}', "is no results file of sweep"),
            ("[1]", "is no results file"),
            ("{", "is no JSON"),
            ("\xff", "is no"),
            ("[" * 100_000, "is no JSON"),
            ('{"schema": 1, "command": "sweep", "points": [NaN]}', "is no JSON"),
        ],
    )
    def test_another_file_is_one_line(self, folder, text, said):
        (folder / "old.json").write_bytes(text.encode("latin-1"))
        assert said in one_line(run("sweep", "cli_loaders:plain", "--compare", "old.json", "--no-chart", *SWEEP))

    @pytest.mark.parametrize(
        "content",
        [
            {},
            {"curves": [], "crossovers": {}, "missing": {}},
            {"curves": [], "crossovers": {"conv": []}, "missing": {}},
            {"curves": [{"op": "reduce"}], "crossovers": {}},
            {"curves": 3, "crossovers": []},
        ],
    )
    def test_a_damaged_file_of_breakeven_is_one_line(self, folder, content):
        (folder / "old.json").write_text(json.dumps({"schema": 1, "command": "breakeven", **content}))
        assert "is no results file of breakeven" in one_line(run("breakeven", "--from", "old.json"))

    @pytest.mark.parametrize(
        "damage",
        [
            lambda curve: curve.update(seconds=[]),
            lambda curve: curve.update(seconds=[[], []]),
            lambda curve: curve.update(seconds=[[0.0], [1.0]]),
            lambda curve: curve.update(seconds=[[10**400], [1.0]]),
            lambda curve: curve.update(side="nobody"),
            lambda curve: curve.update(sizes=["a", "b"]),
            lambda curve: curve.update(sizes=[4, 2]),
            lambda curve: curve.update(sizes=[], seconds=[]),
            lambda curve: curve.update(op="mlp"),
        ],
    )
    def test_a_damaged_curve_is_one_line(self, folder, damage):
        measured = document("breakeven", "--ops", "reduce", "--sizes", "2,4", "--seconds", "0", "--no-chart")
        damage(measured["curves"][0])
        (folder / "old.json").write_text(json.dumps(measured))
        assert "is no results file of breakeven" in one_line(run("breakeven", "--from", "old.json"))

    def test_a_damaged_point_is_one_line(self, folder):
        measured = document("sweep", "cli_loaders:plain", "--no-chart", *SWEEP)
        measured["points"][0]["windows"][0]["samples"] = 10**400
        (folder / "old.json").write_text(json.dumps(measured))
        result = run("sweep", "cli_loaders:plain", "--compare", "old.json", "--no-chart", *SWEEP)
        assert "is no results file of sweep" in one_line(result)

    def test_a_run_without_samples_can_be_compared_with(self, folder):
        measured = document("sweep", "cli_loaders:plain", "--no-chart", *SWEEP)
        for point in measured["points"]:
            for window in point["windows"]:
                window["samples"] = 0
        (folder / "old.json").write_text(json.dumps(measured))
        assert document("sweep", "cli_loaders:plain", "--compare", "old.json", "--no-chart", *SWEEP)["comparison"] == []

    @pytest.mark.parametrize("command", ["sweep", "trace"])
    def test_a_folder_to_write_to_is_said_before_anything_runs(self, folder, command):
        assert "--out: '.' is a folder" in one_line(run(command, "nowhere:loader", "--no-chart", "--out", "."))

    def test_a_file_that_is_not_there_or_cannot_be_written(self, folder):
        assert "No such file" in one_line(run("breakeven", "--from", "nowhere.json"))
        (folder / "file").write_text("")
        result = run("breakeven", *QUICK, "--ops", "reduce", "--no-chart", "--out", "file/a.json")
        assert "cannot write file/a.json" in one_line(result)


class TestBench:
    @pytest.mark.slow
    def test_further_arguments_go_to_the_suite(self):
        result = run("bench", "list")
        assert result.exit_code == 0, result.output
        assert "images" in result.stdout
        assert run("bench", "run", "--rows", "nope").exit_code == 2

    def test_from_an_installed_package_it_says_what_is_missing(self, folder):
        with pytest.raises(CliError, match="needs the benchmarks folder of a source checkout"):
            bench.find_suite(folder / "site" / "prefetchpipe" / "__init__.py")

    def test_json_where_nothing_is_measured(self):
        assert "--json: 'list' measures nothing" in one_line(run("bench", "list", "--json"))

    def test_json_and_a_file_of_ones_own(self):
        assert "--out: with --json" in one_line(run("bench", "--json", "--out=own.json"))

    def test_json_is_the_results_file_and_the_tables_go_to_stderr(self, monkeypatch):
        suite = importlib.import_module("benchmarks.cli")

        def main(arguments):
            print("a table")
            *rest, option, path = arguments
            Path(path).write_text(json.dumps({"given": [*rest, option]}))
            return 0

        monkeypatch.setattr(suite, "main", main)
        result = run("bench", "--quick", "--json", "--rows", "tiny")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout) == {"given": ["--quick", "--rows", "tiny", "--out"]}
        assert "a table" in result.stderr


def test_an_option_before_the_command_is_one_line():
    assert "No such option: --json" in one_line(run("--json", "demo"))


class TestInterrupt:
    @pytest.mark.parametrize("arguments", [("sweep", "cli_loaders:plain", "--no-chart", *SWEEP), ("demo",)])
    def test_it_ends_with_130_and_says_nothing(self, monkeypatch, arguments):
        def interrupted(*_, **__):
            raise KeyboardInterrupt

        monkeypatch.setattr("prefetchpipe.cli.sweep.measure_grid", interrupted)
        monkeypatch.setattr("prefetchpipe.cli.demo.train", interrupted)
        result = run(*arguments)
        assert (result.exit_code, result.output.replace("said by the loader\n", "")) == (130, "")
        assert not our_threads()
