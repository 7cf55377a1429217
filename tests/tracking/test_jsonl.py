"""metrics.jsonl is the truth: strict JSON, nothing twice, nothing lost but a line a crash tore."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UserError
from harness.tracking.jsonl import MetricsFile, cut_after, read_rows


def write(path: Path, steps: range) -> list[dict[str, Any]]:
    rows = [{"step": step, "loss": 1.0 / step, "position": step * 2048} for step in steps]
    metrics = MetricsFile(path)
    for row in rows:
        metrics.append(row)
    metrics.close()
    return rows


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = write(path, range(1, 4)) + write(path, range(4, 6))
    assert read_rows(path) == rows
    assert path.read_text().count("\n") == 5


def test_a_row_can_be_read_while_the_run_goes_on_and_survives_its_death(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    script = (
        "import os, sys; from pathlib import Path; from harness.tracking.jsonl import MetricsFile\n"
        "metrics = MetricsFile(Path(sys.argv[1])); metrics.append({'step': 1}); metrics.sync()\n"
        "metrics.append({'step': 2}); os.kill(os.getpid(), 9)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", script, str(path)], cwd=root, timeout=60)
    assert done.returncode == -9
    assert read_rows(path) == [{"step": 1}, {"step": 2}]


def test_numbers_that_are_not_finite_stay_strict_json_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.append({"step": 1, "loss": math.nan, "grad_norm": math.inf, "low": -math.inf, "text": "plain"})
    metrics.close()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    written = json.loads(path.read_text(), parse_constant=refuse)
    assert written == {"step": 1, "loss": "NaN", "grad_norm": "Infinity", "low": "-Infinity", "text": "plain"}
    (row,) = read_rows(path)
    assert math.isnan(row["loss"])
    assert (row["grad_norm"], row["low"], row["text"]) == (math.inf, -math.inf, "plain")


CUT = """
import os, sys
from pathlib import Path
from harness.tracking.jsonl import MetricsFile, cut_after
moments = 0
def counted(call):
    def counting(*arguments, **named):
        global moments
        moments += 1
        if moments == int(sys.argv[2]):
            os.kill(os.getpid(), 9)
        return call(*arguments, **named)
    return counting
for name in ("fsync", "replace", "write", "ftruncate"):
    setattr(os, name, counted(getattr(os, name)))
cut_after(Path(sys.argv[1]), 4)
MetricsFile(Path(sys.argv[1])).append({"step": 5})
"""


def test_a_kill_at_any_moment_of_a_cut_leaves_all_rows_or_those_that_are_kept(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    for moment in range(1, 20):
        path = tmp_path / str(moment) / "metrics.jsonl"
        path.parent.mkdir()
        rows = write(path, range(1, 8))
        with open(path, "ab") as file:
            file.write(b'{"step": 8, "lo')
        done = subprocess.run([sys.executable, "-c", CUT, str(path), str(moment)], cwd=root, timeout=60)
        kept = rows[:4]
        if done.returncode == 0:
            assert read_rows(path) == [*kept, {"step": 5}]
            break
        assert read_rows(path) in (rows, kept)
        cut_after(path, 4)
        write(path, range(5, 6))
        assert read_rows(path) == rows[:5]
    assert moment > 4


def test_a_reader_sees_whole_rows_while_they_are_cut_and_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = write(path, range(1, 400))
    done = threading.Event()

    def read() -> list[list[dict[str, Any]]]:
        seen = [read_rows(path)]
        while not done.is_set():
            seen.append(read_rows(path))
        return seen

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        for step in (300, 200, 100, 0):
            cut_after(path, step)
            write(path, range(step + 1, 400))
        done.set()
        seen = reader.result()
    assert read_rows(path) == rows
    assert all(one == rows[: len(one)] for one in seen)
    assert len(seen) > 2


TORN = [
    b'{"step": 4, "lo',
    b'{"step": 4, "loss": 0.2',
    b"\x00\x00\x00\x00",
    b"[1, 2]",
    b'{"step": 4}garbage\n',
]


@pytest.mark.parametrize("torn", TORN)
def test_a_torn_last_line_is_skipped_cut_and_never_joined_to_the_next_row(
    tmp_path: Path, torn: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = write(path, range(1, 4))
    with open(path, "ab") as file:
        file.write(torn)
    assert read_rows(path) == rows
    assert path.read_bytes().endswith(torn)  # reading changes nothing: it may still be being written

    continued = tmp_path / "continued.jsonl"
    continued.write_bytes(path.read_bytes())
    assert cut_after(path, 3) == 0
    assert path.read_text() == "".join(json.dumps(row) + "\n" for row in rows)

    assert write(continued, range(4, 5)) == [read_rows(continued)[3]]
    assert read_rows(continued)[:3] == rows


def test_a_whole_last_row_without_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    assert cut_after(path, 2) == 0
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    path.write_text('{"step": 1}\n{"step": 2}')
    write(path, range(3, 4))
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]


def test_rows_after_the_step_are_cut_and_the_others_stay_to_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    for step in range(1, 7):
        metrics.append({"step": step, "loss": math.nan})
        if step % 2 == 0:
            metrics.append({"step": step, "val_loss": 2.0})
    metrics.close()
    before = path.read_bytes().splitlines(keepends=True)
    assert cut_after(path, 4) == 3
    assert path.read_bytes() == b"".join(before[:6])
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert cut_after(path, 0) == 6
    assert path.read_bytes() == b""


def test_a_file_with_nothing_to_cut_is_not_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    inode = path.stat().st_ino
    assert cut_after(path, 3) == 0
    assert path.stat().st_ino == inode
    assert cut_after(tmp_path / "missing.jsonl", 3) == 0
    assert not (tmp_path / "missing.jsonl").exists()


@pytest.mark.parametrize("damage", [b"not json", b"[1]", b'{"step": "2"}', b"\x00\x01\xff", b""])
def test_damage_before_the_last_row_is_named_with_its_line_and_nothing_is_lost(
    tmp_path: Path, damage: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 3}\n')
    before = path.read_bytes()
    for action in (read_rows, MetricsFile, lambda path: cut_after(path, 1)):
        with pytest.raises(UserError, match=r"metrics\.jsonl: line 2 is not a row"):
            action(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "row", ['{"step": 4, "val_loss": null}', '{"step": 4, "loss": "low"}', '{"step": true}']
)
def test_a_row_whose_figures_are_none_is_refused_by_its_line(tmp_path: Path, row: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{row}\n{{"step": 5, "loss": "NaN"}}\n')
    with pytest.raises(UserError, match="line 1 is not a row"):
        read_rows(path)
