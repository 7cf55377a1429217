"""Lines that a disk refuses wait, in order; in the file every line is whole, and none is there twice."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path

import pytest

from harness.append_file import AppendFile
from harness.run_files import incidents
from harness.run_files.run_dir import Status, log_file, read_status
from harness.tracking.jsonl import MetricsFile, read_rows
from tests.helpers_disks import files_up_to, unwritable


def line(number: int) -> bytes:
    return f"line {number:04d}\n".encode()  # 10 bytes


def test_lines_that_do_not_fit_wait_and_are_written_in_order(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = AppendFile(path)
    assert file.append(line(0)) is None
    with files_up_to(35):  # the fourth line in part
        errors = [file.append(line(number)) for number in range(1, 6)]
        assert path.read_bytes() == b"".join(map(line, range(3)))
        assert file.waiting == [line(3), line(4), line(5)]
        with pytest.raises(OSError, match="File too large"):
            file.sync()
    assert [error and error.errno for error in errors] == [None, None, *[errno.EFBIG] * 3]
    assert file.append(line(6)) is None
    file.sync()
    file.close()
    assert path.read_bytes() == b"".join(map(line, range(7)))
    assert file.waiting == []


def test_a_part_that_could_not_be_cut_off_at_once_is_cut_off_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines"
    file = AppendFile(path)

    def refuse(descriptor: int, length: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with files_up_to(15), monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", refuse)
        file.append(line(0))
        file.append(line(1))
        assert path.read_bytes() == line(0) + line(1)[:5]
        file.append(line(2))
    file.append(line(3))
    file.close()
    assert path.read_bytes() == b"".join(map(line, range(4)))


def test_what_is_waiting_is_tried_again_when_the_file_is_closed(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "lines")
    with files_up_to(5):
        file.append(line(0))
    file.close()
    assert (tmp_path / "lines").read_bytes() == line(0)


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "lines")
    threads = [threading.Thread(target=lambda: [file.append(line(n)) for n in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close()
    lines = (tmp_path / "lines").read_bytes().splitlines(keepends=True)
    assert sorted(lines) == sorted([line(n) for n in range(200)] * 4)


def test_rows_that_wait_are_said_once_and_a_checkpoint_does_not_count_on_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    with caplog.at_level(logging.INFO, "harness"), files_up_to(40):
        for step in range(1, 9):
            metrics.append({"step": step})
        assert [row["step"] for row in read_rows(path)] == [1, 2, 3]
        with pytest.raises(OSError, match=r"File too large.*metrics\.jsonl"):
            metrics.sync()
    assert caplog.text.count("metrics.jsonl cannot be written (File too large)") == 1
    with caplog.at_level(logging.INFO, "harness"):
        metrics.append({"step": 9})
    assert caplog.text.count("no row is missing") == 1
    metrics.close()
    assert read_rows(path) == [{"step": step} for step in range(1, 10)]


def test_rows_that_are_lost_for_good_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    with files_up_to(5):
        metrics.append({"step": 1})
        metrics.append({"step": 2})
        metrics.close()
    assert "metrics.jsonl lacks its last 2 rows" in caplog.text


def test_a_status_that_cannot_be_written_ends_nothing_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    status = Status(tmp_path / "status.json", step=1)
    with unwritable(tmp_path):
        status.update(step=2)
        status.update(step=3)
    assert caplog.text.count("status.json cannot be written (Permission denied)") == 1
    assert read_status(tmp_path)["step"] == 1
    status.update(step=4)
    assert read_status(tmp_path)["step"] == 4


def test_lines_of_the_log_that_a_full_disk_refuses_come_later(tmp_path: Path) -> None:
    logger = logging.getLogger("harness")
    with log_file(tmp_path):
        logger.info("before")
        with files_up_to(10):
            logger.info("while")
        # To the file's handler alone: pytest keeps what is logged, and could not send this to its parent.
        record = logger.makeRecord("harness", logging.INFO, __file__, 1, "after %s", ("ü\udcff",), None)
        (handler,) = [h for h in logger.handlers if h.formatter and "asctime" in str(h.formatter._fmt)]
        handler.handle(record)
    words = [text.split(" ", 2)[2] for text in (tmp_path / "train.log").read_text().splitlines()]
    assert words == ["before", "while", "after ü\\udcff"]


def test_an_incident_that_cannot_be_written_is_in_the_log_and_tears_no_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"kind": "spike", "step": step, "action": "none"} for step in (1, 2, 3)]
    incidents.append(tmp_path, rows[0])
    with files_up_to(60):
        incidents.append(tmp_path, rows[1])
        with pytest.raises(OSError, match="File too large"):
            incidents.append(tmp_path, rows[1] | {"action": "stop"})
    assert f"it lacks {rows[1]}" in caplog.text
    incidents.append(tmp_path, rows[2])
    assert incidents.read(tmp_path) == [rows[0], rows[2]]
