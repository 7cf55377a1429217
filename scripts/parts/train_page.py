"""What `bench_train.py` measured, as figures and as Markdown."""

from __future__ import annotations

import statistics
from typing import Any

from parts.bench_parts import median_interval

_WHAT = {"bare": "the bare loop", "nanogpt": "nanoGPT"}


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """A model's blocks, with what they come to: `tokens_per_s` and `mfu` of each side, and `shares`.

    A share is the median, over pairs of blocks, of what the harness takes longer than that side, with an
    interval.
    """
    pairs = {name: sides for name, sides in found.get("pairs", {}).items() if sides[name]}
    blocks, shares = dict[str, list[float]](), dict[str, Any]()
    for name, sides in pairs.items():
        for side, seconds in sides.items():
            blocks[side] = blocks.get(side, []) + seconds
        longer = [ours / theirs - 1 for ours, theirs in zip(sides["harness"], sides[name], strict=False)]
        low, high, coverage = median_interval(longer)
        shares[name] = {"median": statistics.median(longer), "interval": [low, high], "coverage": coverage}
    rates = {side: found["tokens"] / statistics.median(seconds) for side, seconds in blocks.items()}
    peak = found.get("peak")
    mfu = None if peak is None else {side: rate * found["flops"] / peak for side, rate in rates.items()}
    return found | {"tokens_per_s": rates, "mfu": mfu, "shares": shares}


def tables(result: dict[str, Any]) -> str:
    """The figures as Markdown."""
    lines = []
    for one in result["comparisons"]:
        lines += _comparison(one)
    lines += [f"Ladder, {result['ladder_model']} at T={result['seq_len']}:", ""]
    lines += ["| measure | ms a step | tokens/s | MFU | peak memory | ready after |"]
    lines += ["|---|---|---|---|---|---|"]
    lines += [_rung(row) for row in result["ladder"]]
    if result["attention_ms"]:
        times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in result["attention_ms"].items())
        lines += ["", f"One layer's attention forward and backward in bf16: {times}."]
    if result["failed"]:
        lines += ["", *(f"Failed: {what}: {why}" for what, why in result["failed"].items())]
    return "\n".join(lines)


def _comparison(one: dict[str, Any]) -> list[str]:
    if not one["tokens_per_s"]:
        return [f"{one['model']}: nothing was measured.", ""]
    lines = [f"{one['model']}, {one['batch_size']} x {one['seq_len']} tokens a step, in turns:", ""]
    lines += ["| loop | tokens/s | MFU |", "|---|---|---|"]
    for name, rate in one["tokens_per_s"].items():
        lines.append(f"| {name} | {rate:,.0f} | {_percent(one['mfu'] and one['mfu'][name])} |")
    lines.append("")
    for name, share in one["shares"].items():
        low, high = share["interval"]
        times = f"{share['median']:+.2%} ({low:+.2%} .. {high:+.2%})"
        lines += [f"A step of the harness beside one of {_WHAT[name]}: {times}.", ""]
    return lines


def _rung(row: dict[str, Any]) -> str:
    memory = "-" if row["peak_mb"] is None else f"{row['peak_mb'] / 1e3:.1f} GB"
    return (
        f"| {row['rung']} | {row['ms']:.1f} | {row['tokens_per_s']:,.0f} | {_percent(row['mfu'])} "
        f"| {memory} | {row['ready_s']:.1f} s |"
    )


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
