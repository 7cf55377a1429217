"""A report on the terminal, as CSV, and as files beside the runs."""

from __future__ import annotations

import csv
import importlib
import io
import math
import shlex
import sys
from pathlib import Path

import pytest

from harness.files import write_json
from harness.sweep import report_cli, report_text
from harness.sweep.compare import compare
from harness.sweep.comparison import Comparison
from harness.sweep.report import write_report
from harness.sweep.report_csv import csv_text
from harness.sweep.report_text import text
from tests.helpers_reports import make_template, write_job
from tests.helpers_runs import ROOT, write_text_set


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three groups of two seeds, of which one failed and one ran into nothing."""
    folder = tmp_path_factory.mktemp("files")
    template = make_template(write_text_set(folder / "set"), folder / "template")
    losses = {(1, 0): 2.00, (1, 1): 2.02, (2, 0): 2.03, (2, 1): 2.02, (3, 0): 2.5, (3, 1): math.nan}
    for (layer, seed), loss in losses.items():
        words = [f"model.n_layer={layer}", f"seed={seed}"]
        write_job(template, folder / "s" / f"n_layer-{layer}_seed-{seed}", words, loss)
    words = ["model.n_layer=4", "seed=0"]
    write_job(
        template, folder / "s" / "bad", words, state="failed", reason="error", error="RuntimeError: é\nmore"
    )
    return folder / "s"


@pytest.fixture(scope="module")
def comparison(sweep: Path) -> Comparison:
    return compare(sweep)


def test_the_table_fits_a_terminal_and_says_what_its_marks_mean(comparison: Comparison) -> None:
    heading, table, marks, others, best = text(comparison).split("\n\n")
    assert heading.splitlines() == [
        "s: 7 jobs, 6 done, 1 failed",
        "val_loss after 768 tokens, 5 jobs in 3 groups of 1 to 2 seeds, the best first",
    ]
    header, *lines = table.splitlines()
    assert header.split()[:3] == ["model.n_layer", "seeds", "val_loss"]
    assert [line.split()[:4] for line in lines] == [
        ["*", "1", "2", "2.0100"],
        ["~", "2", "2", "2.0250"],
        ["3", "1", "2.5000", *lines[2].split()[3:4]],
    ]
    assert max(map(len, table.splitlines())) <= 110
    assert "+- 95 % interval" in marks
    assert "one seed's standard deviation is 0.0112" in marks  # of 0.0141 and 0.0071
    assert "~ no further from the best (*) than the noise of the seeds" in marks
    assert "n_layer-3_seed-1: diverged: val_loss is nan at step 12" in others
    assert "failed" in others
    assert "bad: error: RuntimeError: é" in others
    assert best.splitlines()[0] == "the best job of the best group, val_loss 2.0000:"
    assert shlex.split(best.splitlines()[1])[2:] == ["model.n_layer=1", "seed=0"]
    assert best.splitlines()[2] == "to go on with it:"
    resume, *words = shlex.split(best.splitlines()[3])[2:]
    assert resume.endswith("n_layer-1_seed-0")
    assert words == ["run.name=NEW_NAME", "trainer.max_tokens=1536"]


def test_many_and_long_keys_still_give_a_table(sweep: Path, tmp_path: Path) -> None:
    keys = ["loader.batch_size", "optimizer.weight_decay", "trainer.grad_clip", "schedule.min_lr_ratio"]
    template = sweep / "n_layer-1_seed-0"
    for number in (1, 2):
        words = [f"{key}={number}" for key in keys] + [f"init_from=/{'deep/' * 20}{number}"]
        write_job(template, tmp_path / f"{number}", words)
    table = text(compare(tmp_path)).split("\n\n")[1].splitlines()
    assert table[0].split()[:5] == ["batch_size", "weight_decay", "min_lr_ratio", "grad_clip", "init_from"]
    assert [line.split()[-3] for line in table[1:]] == [f"...ep/{'deep/' * 5}{number}" for number in (1, 2)]
    assert max(map(len, table)) <= 110


def test_without_a_finished_job_it_says_so(sweep: Path, tmp_path: Path) -> None:
    write_job(sweep / "n_layer-1_seed-0", tmp_path / "on", [], state="running", pid=2**22 + 1)
    said = text(compare(tmp_path))
    assert "nothing to compare yet" in said
    assert "died" in said


def test_csv_has_every_job_and_figure_in_full(comparison: Comparison) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(comparison))))
    assert len(rows) == 7
    for row, entry in zip(rows, comparison.entries, strict=True):
        assert (row["state"], row["path"], row["command"]) == (entry.state, str(entry.path), entry.command)
        assert row["reason"] == entry.reason
        assert {name: row[name] for name in comparison.columns} == {
            name: "" if value is None else str(value) for name, value in entry.values.items()
        }
    first, alone = rows[0], rows[4]
    assert (first["model.n_layer"], first["seed"], first["seeds"], first["is_best"]) == (
        "1",
        "0",
        "2",
        "true",
    )
    assert float(first["mean"]) == comparison.groups[0].mean
    assert float(first["interval_95"]) == comparison.groups[0].half_width
    assert (alone["model.n_layer"], alone["seeds"], alone["interval_95"]) == ("3", "1", "")
    assert {row["mean"] for row in rows[5:]} == {""}


def test_values_that_differ_in_a_late_digit_are_told_apart(sweep: Path, tmp_path: Path) -> None:
    for lr in ("0.0012345678", "0.0012345679"):
        write_job(sweep.parent / "template", tmp_path / lr, [f"optimizer.lr={lr}"])
    result = compare(tmp_path)
    table = text(result).split("\n\n")[1]
    rows = csv.DictReader(io.StringIO(csv_text(result)))
    assert {row["optimizer.lr"] for row in rows} == {"0.0012345678", "0.0012345679"}
    assert "0.0012345678" in table
    assert "0.0012345679" in table


def _report(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The exit code of the script."""
    monkeypatch.setattr(sys, "argv", ["report.py", *words])
    try:
        report_cli.main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def test_a_folder_s_report_lies_in_it_and_of_several_paths_where_it_is_told(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in sweep.glob("report.*"):
        path.unlink()
    monkeypatch.chdir(tmp_path)
    assert _report(monkeypatch, str(sweep)) == 0
    assert capsys.readouterr().out.startswith(text(compare(sweep)))
    assert sorted(path.name for path in sweep.glob("*report*")) == ["report.csv", "report.html"]
    runs = [str(path) for path in sorted(sweep.glob("n_layer-1_*"))]
    assert _report(monkeypatch, *runs) == 0
    assert "--output DIR writes report.csv and report.html" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert _report(monkeypatch, *runs, "--output", "new/folder") == 0
    assert _report(monkeypatch, f"--output={tmp_path / 'equal'}", *runs) == 0
    assert (tmp_path / "new/folder/report.csv").read_text() == (tmp_path / "equal/report.csv").read_text()
    assert (tmp_path / "new/folder/report.html").stat().st_size > 10_000
    assert not list(Path(runs[0]).glob("report*"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--outptu", "x"], "there is no option --outptu"),
        (["--output"], "--output needs a folder"),
        (["--output", "x"], "give a sweep's folder"),
        (["nowhere"], "nowhere does not exist"),
    ],
)
def test_what_cannot_be_compared_is_exit_code_2_in_words(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _report(monkeypatch, *words) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")


def test_the_files_are_there_before_a_reader_of_the_table_may_leave(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "report.html"
    monkeypatch.setattr(report_text, "text", lambda comparison: f"written: {file.exists()}")
    assert _report(monkeypatch, str(sweep), "--output", str(file.parent)) == 0
    assert capsys.readouterr().out.startswith("written: True")


def test_a_folder_that_cannot_be_written_costs_the_files_and_not_the_table(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert _report(monkeypatch, str(sweep), "--output", str(tmp_path / "file")) == 1
    streams = capsys.readouterr()
    assert streams.out.startswith("s: 7 jobs")
    assert f"error: {tmp_path / 'file'}: File exists. --output DIR" in streams.err


def test_the_benchmark_s_directories_are_a_sweep_of_which_some_jobs_went_wrong(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    bench = importlib.import_module("bench_report")
    words = [
        "loader=sliding_window",
        "loader.stride=8",
        "optimizer.weight_decay=0.1",
        "optimizer.lr=0.001",
        "seed=0",
    ]
    job = write_job(sweep / "n_layer-1_seed-0", tmp_path / "job", words)
    write_json(job / "job.json", {"identity": "0" * 64, "words": words})
    bench.write_jobs(job, tmp_path / "sweep", 100)
    seconds, lines = bench.measure(tmp_path / "sweep", 1)
    assert lines[0] == "sweep: 100 jobs, 98 done, 1 failed, 1 died"
    assert "97 jobs in 20 groups of 2 to 5 seeds" in lines[1]
    assert min(seconds[0]) > 0
    assert (tmp_path / "sweep" / "report.html").stat().st_size > 100_000


def test_help_is_asked_for_or_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _report(monkeypatch, "--help") == 0
    assert _report(monkeypatch) == 2
    assert capsys.readouterr().out.count("report.py multirun/NAME") == 2


def test_the_report_of_a_sweep_is_written_whole(sweep: Path) -> None:
    comparison = write_report(sweep)
    assert (sweep / "report.csv").read_text() == csv_text(comparison)
    assert comparison.name in (sweep / "report.html").read_text()
    assert compare(sweep) == comparison  # its own files are no runs
