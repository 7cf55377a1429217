"""The Markdown of scripts/bench_peers.py."""

from __future__ import annotations

from peers.report import COLUMNS, Row, short
from peers.table import IN_ORDER, SHUFFLED

_COUNTED = """\
* **Mtok/s, of the floor**: {windows} windows of {window_seconds:g} s, each behind one of the floor in the
  same process: the same tokens in RAM, copied in order, or gathered at random places, into one int64
  array. The medians of the speeds and of the ratios.
* **first batch**: from nothing open to a batch, imports apart; the median of {starts} processes. Each is a
  fork that has its memory to itself before it begins, as a new process has: else every Python object that
  is touched would copy a page, which takes more than half of the time of a bare np.memmap.
* **resume, new process**: from nothing open and a saved state to the batch at 90 % of an epoch, imports
  apart; the median of {resumes} processes, or of as many as 5 s allow. **resume, open**: the same where the
  library's objects are there already; a dash where that comes to another batch. What has no state of its own
  goes on from a number that one's own code would keep (*), if need be by reading the epoch again.
* **memory**: anonymous memory of the process over that of one which has imported torch, at most; in
  brackets what of it the library's imports take. **children**: memory of its worker processes that goes
  when they end, shared pages apart.
* **exact**: the three batches behind a resume in a new process, and the one at 90 % where the library had to
  read its way there, are bit for bit those that come without it. A dash: there is no way to resume."""


def page(result: Row) -> str:
    """The whole of loader.md."""
    machine = result["machine"]
    where = (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, {machine['file_system']}"
    )
    libraries = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    parts = [
        "# Loaders, side by side",
        "Made by `python scripts/bench_peers.py --write docs/benchmarks` on "
        f"{result['date']}; every sample is in [loader.json](loader.json).",
        f"{where}, Linux {machine['kernel']}; {libraries}.",
        f"{result['tokens']:,} tokens of a vocabulary of GPT-2's size, as frequent as in text, in the page "
        f"cache. Each way of reading delivers int64 inputs and targets of {result['batch_size']} x "
        f"{result['seq_len']} in a process of its own, with one torch thread. Ratios below 1.5 between two "
        "processes may be chance.",
        _COUNTED.format(**result),
    ]
    for order in (IN_ORDER, SHUFFLED):
        parts += [f"## {order.capitalize()}", _table(result["rows"], order)]
    drift = "; ".join(f"{name}, {ratio:.2f}" for name, ratio in result["drift"].items() if ratio)
    parts += [
        "## How this project compares",
        "Its npy loader, by default and with prefetch=0, against all others, by the figures above:",
        "\n".join(f"* {line}" for line in result["comparison"]),
        f"Speed at the end of the run over that at its beginning: {drift}." if drift else "",
        "## How each is driven",
        "\n".join(f"* **{name}**: {how}" for name, how in _driven(result["rows"]).items()),
    ]
    if result["not_installed"]:
        names = " ".join(result["not_installed"])
        parts += ["## Not installed", f"`pip install {names}` (all of them: `pip install -e '.[bench]'`)"]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(rows: list[Row], order: str) -> str:
    """Fastest first; what failed comes last, with its error."""
    there = [row for row in rows if row["order"] == order and not row["again"]]
    there.sort(key=lambda row: -row.get("share", 0))
    heads = ["", *(column.head for column in COLUMNS), "exact"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in there:
        failed = f"failed: {row['error'].splitlines()[0]}" if "error" in row else ""
        cells = [failed] + [""] * (len(heads) - 2) if failed else _cells(row)
        lines.append("| " + " | ".join([row["name"], *cells]) + " |")
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    own = "" if row["own_state"] else " (*)"
    behind = dict.fromkeys(("resume", "seek", "state_bytes"), own)
    behind["anonymous_mb"] = f" ({short(round(max(row['imported_mb'], 0), 1))})"
    if row["children"]:
        behind["children_mb"] = f" in {row['children']}"
    cells = [
        column.written(row[column.key]) + behind.get(column.key, "") if column.key in row else "-"
        for column in COLUMNS
    ]
    return [*cells, {True: "yes", False: "NO", None: "-"}[row.get("exact")]]


def _driven(rows: list[Row]) -> dict[str, str]:
    """The reader's own description, once for those that share it."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if "how" in row and row["name"] not in names.setdefault(row["how"], []):
            names[row["how"]].append(row["name"])
    return {"; ".join(those): how for how, those in names.items()}
