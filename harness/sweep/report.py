"""report.csv and report.html, written beside the runs that they compare."""

from __future__ import annotations

from pathlib import Path

from harness.files import write_atomic
from harness.sweep.compare import compare
from harness.sweep.comparison import Comparison
from harness.sweep.report_csv import csv_text
from harness.sweep.report_html import html

CSV, HTML = "report.csv", "report.html"


def write_report(folder: Path) -> Comparison:
    """Compare the runs in `folder` and write both files into it; `UserError` where it holds no run."""
    comparison = compare(folder)
    write_files(comparison, folder)
    return comparison


def write_files(comparison: Comparison, folder: Path) -> None:
    """Write both files into `folder`, each whole or not at all. Raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in ((CSV, csv_text(comparison)), (HTML, html(comparison))):
        write_atomic(folder / name, content.encode("utf-8", "replace"))
