"""`inspect_batch.py` and `audit_data.py`, as they are called: what they print, and their exit codes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.auditing import audit_cli, inspect_cli
from tests.helpers_audit import edit_rows, other_hash
from tests.helpers_runs import (
    ROOT,
    run,
    tiny_config,
    train_rows,
    write_pair_set,
    write_row_set,
    write_text_set,
)
from tests.helpers_sets import write_set

Call = Callable[..., tuple[int, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Call a script's main with words: exit code, and what it printed on either stream."""

    def calling(main: Callable[[], None], *words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["script.py", *map(str, words)])
        code: int | str | None = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        assert isinstance(code, int)
        return code, captured.out + captured.err

    return calling


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a set and a run of 8 steps over it."""
    folder = tmp_path_factory.mktemp("folder")
    data = write_text_set(folder / "set", train_tokens=500)
    run(tiny_config(data, trainer__max_steps=8, loader__mask_boundary="target"), folder / "run")
    return folder


def test_a_logged_step_is_shown_and_equal(folder: Path, call: Call) -> None:
    code, said = call(inspect_cli.main, folder / "run", "step=4", "rows=2")
    assert code == 0
    row = train_rows(folder / "run")[3]
    assert f"batch_sha256 {row['batch_sha256']}" in said
    assert "equal to the one logged in metrics.jsonl" in said
    assert "step 4 of 8\n" in said
    assert "epoch     0, position 192 before the batch and 256 after it" in said
    # Shards of 250 tokens: the row at token 240 lies in two.
    assert "row 0    token 192: train_00000.npy[192:209]; 16 of 16 targets count" in said
    assert "... 2 more rows: rows=4" in said
    _, said = call(inspect_cli.main, folder / "run", "step=4")
    assert "row 3    token 240: train_00000.npy[240:250] + train_00001.npy[0:7]" in said


def test_a_future_step_is_the_one_that_is_trained_then(folder: Path, tmp_path: Path, call: Call) -> None:
    path = Path(shutil.copytree(folder / "run", tmp_path / "run"))
    code, said = call(inspect_cli.main, path, "step=12")
    assert code == 0
    assert "step 12 of 8 (not trained yet)" in said
    assert "not compared: this step was not logged" in said
    data = folder / "set"
    run(tiny_config(data, loader__mask_boundary="target", resume=str(path)), path)
    assert f"batch_sha256 {train_rows(path)[11]['batch_sha256']}" in said


def test_a_difference_from_the_log_is_exit_code_1(folder: Path, tmp_path: Path, call: Call) -> None:
    path = Path(shutil.copytree(folder / "run", tmp_path / "run"))
    edit_rows(path, lambda rows: [row | {"batch_sha256": "0" * 64} for row in rows if "loss" in row])
    code, said = call(inspect_cli.main, path, "step=3")
    assert code == 1
    assert "DIFFERS from what metrics.jsonl says of this step:\n  batch_sha256: logged " in said


def test_text_is_escaped_and_what_does_not_count_is_marked(tmp_path: Path, call: Call) -> None:
    ids = [0, *(byte + 1 for byte in b"a\x1b[2Jb\n"), 0, 0, *(byte + 1 for byte in b"xyz")]
    write_set(tmp_path / "own", {"train": [ids], "val": [ids]}, preparation={"corpus": "stdlib"})
    words = ("loader.seq_len=11", "loader.batch_size=1", "batches=1")
    code, said = call(
        inspect_cli.main, f"data.path={tmp_path / 'own'}", *words, "loader.mask_boundary=target"
    )
    assert code == 0
    assert "\x1b" not in said
    assert "inputs   <boundary> 'a\\x1b[2Jb\\n' <boundary>x2 'x'" in said
    assert "targets  'a\\x1b[2Jb\\n' <masked>x2 'xy'" in said
    assert "9 of 11 targets count" in said


def test_the_first_batches_of_a_set_are_shown_without_a_run(tmp_path: Path, call: Call) -> None:
    data = write_row_set(tmp_path / "rows")
    words = (f"data.path={data}", "loader=padded_rows", "loader.seq_len=16", "loader.batch_size=4")
    code, said = call(inspect_cli.main, *words, "batches=3", "rows=1")
    assert code == 0
    assert said.count("inputs    (4, 16) int64") == said.count("batch_sha256") == 3
    assert "row 0    row " in said
    code, said = call(inspect_cli.main, *words, "loader.batch_siz=4")
    assert code == 2
    assert "batch_size" in said


def test_the_two_sides_of_a_pair_are_shown_together(tmp_path: Path, call: Call) -> None:
    words = (
        f"data.path={write_pair_set(tmp_path / 'pairs')}",
        "loader=contrastive_rows",
        "loader.seq_len=16",
    )
    _, said = call(inspect_cli.main, *words, "loader.batch_size=4", "batches=1", "rows=4")
    shown = re.findall(r"row (\d) +(pos|neg) (\d+):", said)
    assert [(row, side) for row, side, _ in shown] == [("0", "pos"), ("4", "neg"), ("1", "pos"), ("5", "neg")]
    assert shown[0][2] == shown[1][2] != shown[2][2] == shown[3][2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["RUN"], "which step of .*step=N"),
        (["RUN", "step=0"], "step=0 must be at least 1"),
        (["RUN", "step=x"], "step=x must be"),
        (["RUN", "step=1", "rows=-1"], "rows=-1 must be at least 0"),
        (["RUN", "stepp=1"], "there is no option stepp; did you mean step?"),
        (["RUN", "step=1", "data.path=nowhere"], "does not exist"),
        (["nowhere", "step=1"], "is no run"),
        (["data.path=nowhere", "batches=0"], "batches=0 must be at least 1"),
    ],
)
def test_mistakes_are_exit_code_2(words: list[str], message: str, folder: Path, call: Call) -> None:
    code, said = call(inspect_cli.main, *(word.replace("RUN", str(folder / "run")) for word in words))
    assert code == 2
    assert re.search(message, said), said
    assert "Traceback" not in said


def test_an_audit_confirms_and_says_what_a_branch_inherited(folder: Path, tmp_path: Path, call: Call) -> None:
    code, said = call(audit_cli.main, folder / "run")
    assert code == 0
    assert "8 steps, 512 tokens" in said
    assert "confirmed: 8 of 8 steps saw exactly what the run claims" in said
    config = tiny_config(
        folder / "set", loader__mask_boundary="target", resume=str(folder / "run/checkpoints/step-00000004")
    )
    run(config, tmp_path / "branch")
    code, said = call(audit_cli.main, tmp_path / "branch")
    assert code == 0
    assert f"inherited  steps 1 to 4 of {folder / 'run'}: recomputed, and as the chain says" in said
    code, said = call(audit_cli.main, folder / "run/checkpoints/step-00000004")
    assert "4 steps, 256 tokens" in said
    assert code == 0


def test_an_audit_that_fails_names_the_first_step_and_exits_with_1(
    folder: Path, tmp_path: Path, call: Call
) -> None:
    path = Path(shutil.copytree(folder / "run", tmp_path / "run"))
    edit_rows(path, lambda rows: [row | {"data_chain": other_hash(row["data_chain"])} for row in rows])
    code, said = call(audit_cli.main, path)
    assert code == 1
    assert "DIFFERS    metrics.jsonl line 1 was changed: data_chain" in said
    assert "not confirmed: the first step concerned is 1 " in said
    code, said = call(audit_cli.main, path, "threads=0")
    assert (code, "threads=0 must be at least 1" in said) == (2, True)


def test_steps_without_a_chain_are_not_called_confirmed(folder: Path, tmp_path: Path, call: Call) -> None:
    path = Path(shutil.copytree(folder / "run", tmp_path / "run"))
    options = {
        "loader__mask_boundary": "target",
        "trainer__log_batch_hash": False,
        "trainer__log_interval": 1,
    }
    config = tiny_config(folder / "set", resume=str(path), trainer__data_chain=False, **options)
    run(config, path)
    code, said = call(audit_cli.main, path)
    assert code == 0
    assert "unclaimed  4 steps, the first is 9: neither chain nor batch hash" in said
    assert "\nconfirmed: 8 of 12 steps saw exactly what the run claims" in said

    settings = path / "config.yaml"
    settings.write_text(settings.read_text().replace("data_chain: false", "data_chain: true"))
    code, said = call(audit_cli.main, path)
    assert code == 1  # the run is to keep a chain, and has none: it may have been taken out
    assert "not confirmed as a whole, only 8 of 12 steps" in said


def test_output_that_nobody_reads_any_more_is_no_error_of_the_run(folder: Path) -> None:
    """Exit code 1 would say that the batch differs."""
    data = [f"data.path={folder / 'set'}", "loader.seq_len=16", "loader.batch_size=4"]
    for script, words in (
        ("inspect_batch.py", [str(folder / "run"), "step=4"]),
        ("inspect_batch.py", [*data, "batches=2"]),
        ("audit_data.py", [str(folder / "run")]),
    ):
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(
            [sys.executable, str(ROOT / "scripts" / script), *words],
            stdout=write, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
        os.close(write)
        assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("script", ["inspect_batch.py", "audit_data.py"])
def test_help_needs_no_heavy_package(script: str) -> None:
    watched = "import sys; sys.argv = ['x', '--help']; sys.path.insert(0, '.')\n"
    module = {"inspect_batch.py": "inspect_cli", "audit_data.py": "audit_cli"}[script]
    code = (
        f"{watched}from harness.auditing.{module} import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'numpy', 'h5py', 'wandb', 'hydra'} & set(sys.modules)"
    )
    for words in (["-c", code], [f"scripts/{script}", "--help"]):
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert "Exit code 0" in done.stdout
