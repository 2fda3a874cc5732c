"""The benchmark suite: what it writes, reads and prints, and a run of a few cells on the CPU."""

from __future__ import annotations

import json
import os

import pytest
import torch

from benchmarks import readme, schema
from benchmarks.batches import filled, leaves, nbytes
from benchmarks.cli import main
from benchmarks.compare import compare
from benchmarks.contenders import all_contenders, select
from benchmarks.contenders.ours import Ours
from benchmarks.contenders.plain import Plain
from benchmarks.environment import Env
from benchmarks.measure import interleaved, seconds_per_step
from benchmarks.race import BATCHES, count_wrong, run_race
from benchmarks.rows import all_rows
from benchmarks.rows import select as select_rows
from benchmarks.rows.base import LoaderRow
from benchmarks.rows.ranks import _devices, _Rank
from benchmarks.rows.ready import dlrm_batch, images_batch
from benchmarks.schema import Cell, RaceCount, Regime, Result, RowResult, Value
from benchmarks.table import full_table, race_table, summary_table
from tests.support import worker_processes


def result_of(ours=(1.0, 1.1, 0.9), peer=(2.0, 2.2, 1.8), wrong=0, date="2026-01-01T00:00:00Z"):
    cells = [Cell("plain", 10, [4.0, 4.0, 4.0]), Cell("torchtnt", 10, list(peer)), Cell("prefetchpipe", 10, list(ours))]
    cells.append(Cell("spdl", error="RuntimeError: no"))
    race = [RaceCount("images", "torchtnt", "depth 2", wrong, 60), RaceCount("images", "prefetchpipe", "", 0, 60)]
    row = RowResult(
        "images", "a title", "batches are ready", 38_500_000, 2, {"link_ms": 0.7, "source_ms": 0.0},
        [Regime("transfer", 0.01, 0.8, "link", cells)], race, [Value("import", 30.0, "ms", "<= 50", ok=True)],
        {"by-hand": "no index"},
    )  # fmt: skip
    machine = {"name": "one H200, 16 cores", "quick": False}
    return Result(
        date, ["rows=images"], machine, {"torch": "2.11"}, "abc", {"h2d_gb_per_s": 55.0}, {"timm": "not there"}, [row],
        complete=True,
    )  # fmt: skip


class TestSchema:
    def test_a_file_reads_back_as_it_was(self, tmp_path):
        result = result_of()
        schema.save(result, tmp_path / "a.json")
        assert schema.load(tmp_path / "a.json") == result
        assert [path.name for path in tmp_path.iterdir()] == ["a.json"]

    def test_another_schema_is_refused(self, tmp_path):
        (tmp_path / "a.json").write_text(json.dumps({"schema": 99}))
        with pytest.raises(ValueError, match="schema 99"):
            schema.load(tmp_path / "a.json")

    def test_a_missing_field_is_refused(self, tmp_path):
        (tmp_path / "a.json").write_text(json.dumps({"schema": schema.SCHEMA, "rows": []}))
        with pytest.raises(ValueError, match="no results file"):
            schema.load(tmp_path / "a.json")

    def test_median_and_spread(self):
        cell = Cell("plain", 5, [3.0, 1.0, 2.0])
        assert (cell.median, cell.spread) == (2.0, 1.0)
        assert Cell("plain").median is None

    def test_newest_goes_by_the_date_inside_and_leaves_quick_runs_aside(self, tmp_path):
        schema.save(result_of(date="2026-01-02T00:00:00Z"), tmp_path / "a.json")
        schema.save(result_of(date="2026-01-01T00:00:00Z"), tmp_path / "b.json")
        quick = result_of(date="2026-01-03T00:00:00Z")
        quick.machine["quick"] = True
        schema.save(quick, tmp_path / "c.json")
        assert schema.newest(tmp_path) == tmp_path / "a.json"

    @pytest.mark.parametrize(("wrong", "best"), [(0, "torchtnt"), (57, "plain")])
    def test_only_a_right_peer_is_the_best(self, wrong, best):
        row = result_of(wrong=wrong).rows[0]
        assert row.best_right_peer(row.regimes[0]).contender == best

    def test_a_peer_whose_race_failed_is_not_right(self):
        row = result_of().rows[0]
        row.race[0].wrong, row.race[0].error = None, "RuntimeError: no"
        assert row.best_right_peer(row.regimes[0]).contender == "plain"


class TestTables:
    def test_summary_has_the_ratios(self):
        line = summary_table(result_of()).splitlines()[-1]
        start = "| images | 38.5 MB, 2 | transfer-bound | 0.800 (link) |"
        assert line == f"{start} 2.000 ± 10 % torchtnt | 1.000 ± 10 % | 2.00 | 0.25 | 1.25 |"

    def test_a_lost_row_is_shown(self):
        assert "| 0.50 |" in summary_table(result_of(ours=(4.0, 4.0, 4.0)))

    def test_every_contender_error_and_reason_is_in_the_full_table(self):
        text = full_table(result_of(wrong=57))
        for part in ("torchtnt | 2.000", "no, 57 wrong", "RuntimeError: no", "by-hand: no index", "timm (not there)"):
            assert part in text

    def test_race_shows_the_worst_variant(self):
        result = result_of()
        result.rows[0].race.append(RaceCount("images", "torchtnt", "depth 4", 12, 60))
        assert "| torchtnt | 12 |" in race_table(result)

    def test_readme_block_is_replaced_and_the_rest_stays(self):
        text = f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n"
        made = readme.rewrite(text, [(result_of(), "benchmarks/results/a.json")])
        assert made.startswith("before\n")
        assert made.endswith(f"{readme.END}\nafter\n")
        assert "old" not in made
        assert summary_table(result_of()) in made
        two = readme.rewrite(made, [(result_of(), "a.json"), (result_of(ours=(0.5, 0.5, 0.5)), "b.json")])
        assert two.count("same machine and versions") == 1
        assert readme.rewrite(made, [(result_of(), "benchmarks/results/a.json")]) == made

    def test_readme_without_markers_is_an_error(self):
        with pytest.raises(ValueError, match="once each"):
            readme.rewrite("nothing", [(result_of(), "a.json")])

    def test_compare_marks_what_is_outside_the_spread(self):
        text = compare(result_of(), result_of(ours=(0.5, 0.5, 0.5), peer=(2.1, 2.1, 2.1)))
        ours = next(line for line in text.splitlines() if "prefetchpipe" in line)
        peer = next(line for line in text.splitlines() if "torchtnt" in line)
        assert " 0.50 " in ours
        assert ours.endswith("faster")
        assert not peer.endswith(("faster", "slower"))


class TestMeasuring:
    def test_the_window_leaves_out_what_is_before_and_after(self):
        waits, seen = [], []
        seconds_per_step(range(20), seen.append, lambda: waits.append(len(seen)), warm=3, steps=10, drain=True)
        assert waits == [3, 13, 20]
        assert len(seen) == 20

    def test_without_drain_the_pass_is_left_after_the_window(self):
        seen = []
        seconds_per_step(range(20), seen.append, lambda: None, warm=3, steps=10, drain=False)
        assert len(seen) == 13

    def test_a_pass_that_is_too_short_is_an_error(self):
        with pytest.raises(RuntimeError, match="after 5 batches"):
            seconds_per_step(range(5), lambda _: None, lambda: None, warm=3, steps=10, drain=True)

    def test_turns_are_taken_and_their_order_moves_on(self):
        order = []
        names = {name: lambda name=name: order.append(name) or 1.0 for name in "abc"}
        assert interleaved(names, 3) == {name: [1.0] * 3 for name in "abc"}
        assert "".join(order) == "abcbcacab"

    def test_a_failing_contender_is_told_once_and_the_others_go_on(self):
        told = []
        names = {"bad": lambda: 1 / 0, "good": lambda: 2.0}
        taken = interleaved(names, 3, failed=lambda name, error: told.append((name, type(error))))
        assert taken == {"bad": [], "good": [2.0] * 3}
        assert told == [("bad", ZeroDivisionError)]


class TestRowsAndContenders:
    def test_batches_are_what_the_titles_say(self):
        images = images_batch(1, small=False)
        assert images[0].shape == (256, 3, 224, 224)
        dlrm = dlrm_batch(1, small=False)
        assert len(leaves(dlrm)) == 41
        assert 5.0e6 < nbytes(dlrm) < 5.2e6
        assert {leaf.dtype for leaf in dlrm.values()} == {torch.float32, torch.int32, torch.int64}

    def test_names_and_groups(self):
        assert {row.name for row in select_rows(["workers"])} == {"workers-images", "workers-dlrm", "workers-tokens"}
        with pytest.raises(ValueError, match="no row or group 'nothing'"):
            select_rows(["nothing"])
        with pytest.raises(ValueError, match="no contender nobody"):
            select(("nobody",))

    def test_a_contender_that_cannot_take_part_says_why(self):
        env = Env(torch.device("cpu"), small=True)
        reasons = {contender.name: contender.missing(env) for contender in all_contenders()}
        assert reasons["side-stream"] == "needs a CUDA device"
        assert reasons["plain"] is None

    def test_variants_carry_their_options(self):
        variant = Ours.variant_of("depth=4,fetch=caller")
        assert variant.name == "prefetchpipe(depth=4, fetch=caller)"
        with pytest.raises(ValueError, match="option=value"):
            Ours.variant_of("depth")

    @pytest.mark.slow
    @pytest.mark.parametrize("name", [r.name for r in all_rows().values() if r.group == "loader" and r.name != "big"])
    def test_race_sources_give_what_they_promise(self, name):
        row = all_rows()[name]
        assert isinstance(row, LoaderRow)
        count = run_race(row, Plain(), Env(torch.device("cpu"), small=True))
        row.release()
        assert (count.wrong, count.of, count.error) == (0, BATCHES, None)

    def test_wrong_missing_and_extra_batches_are_counted(self):
        env = Env(torch.device("cpu"), small=True)
        good = [filled({"x": torch.zeros(3)}, value) for value in (1, 2, 3)]
        assert count_wrong(good, [1, 2, 3], env, 0.0) == 0
        assert count_wrong(good, [1, 7, 3], env, 0.0) == 1
        assert count_wrong(good, [1, 2, 3, 4], env, 0.0) == 1
        assert count_wrong(good, [1, 2], env, 0.0) == 1


@pytest.mark.slow
def test_a_quick_run_writes_a_complete_file(tmp_path, capsys):
    out = tmp_path / "a.json"
    arguments = ["--quick", "--device", "cpu", "--rows", "tiny", "dlrm", "--contenders", "plain", "--quiet"]
    assert main([*arguments, "--out", str(out)]) == 0
    result = schema.load(out)
    assert result.complete
    assert [row.name for row in result.rows] == ["tiny", "dlrm"]
    assert result.missing["side-stream"] == "needs a CUDA device"
    for row in result.rows:
        (regime,) = row.regimes
        (cell,) = regime.cells
        assert (cell.contender, len(cell.ms), cell.error) == ("plain", 3, None)
        assert 0 < min(cell.ms) <= regime.ideal_ms + max(cell.ms)
    assert "| plain |" in capsys.readouterr().out
    assert main(["table", str(out)]) == 0
    assert main(["compare", str(out), str(out)]) == 0


def test_what_is_wrong_on_the_command_line_is_said(capsys):
    assert main(["run", "--regimes", "fast"]) == 2
    assert "no regime fast" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_side_by_side(tmp_path):
    out = tmp_path / "a.json"
    assert main(["--quick", "--device", "cpu", "--rows", "two-gpus", "--quiet", "--out", str(out)]) == 0
    (row,) = schema.load(out).rows
    (value,) = row.values
    assert (value.name, value.target, value.ok, row.error) == ("transfer, 2 processes", ">= 1.95", None, None)
    assert len(value.raw) == 3
    assert min(value.raw) > 0
    assert value.note.endswith(" with 1") or value.note.endswith(f" with {len(os.sched_getaffinity(0)) // 2}")
    assert not worker_processes()


def test_a_process_that_dies_ends_the_row_with_its_status():
    with (
        _Rank("nowhere", 0, 1, seconds=0.1, small=True, compute={}) as rank,
        pytest.raises(RuntimeError, match="ended"),
    ):
        rank.wait_ready()


def test_a_row_for_more_gpus_than_there_are_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RuntimeError, match="2 processes need 2 GPUs, and there are 1"):
        _devices(Env(torch.device("cuda", 0)), 2)


@pytest.mark.filterwarnings(
    "ignore:Sparse invariant checks are implicitly disabled:UserWarning"
)  # torch's own optimizers
def test_the_rows_of_tables_run_without_a_gpu(tmp_path, capsys):
    out = tmp_path / "a.json"
    rows = ["gather", "scatter", "embedding-adagrad", "embedding-adam", "table-memory"]
    arguments = ["--quick", "--device", "cpu", "--rows", *rows, "--repeats", "1", "--quiet", "--out", str(out)]
    assert main(arguments) == 0
    result = schema.load(out)
    assert [row.name for row in result.rows] == rows
    for row in result.rows[:-1]:
        assert row.left_out == {
            name: "needs a CUDA device"
            for name in ("speedtorch", "speedtorch(numpy ids)", "gpu")
            if name in row.left_out
        }
        cells = {cell.contender: cell for cell in row.regimes[0].cells}
        assert {"prefetchpipe"} < set(cells)
        assert [cell.error for cell in cells.values()] == [None] * len(cells)
    assert "prefetchpipe(no lookahead)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["fly"], "invalid choice: 'fly'"),
        (["race", "--delay-ms", "slow"], "argument --delay-ms: invalid float value: 'slow'"),
    ],
)
def test_bad_arguments_end_in_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n")) == (2, 1)
    assert error.startswith("error: ")
    assert said in error
