"""report.html: one file that needs nothing beside it and holds the comparison; a user's words stay words."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from harness.sweep.comparison import Comparison, Entry, Group, Point
from harness.sweep.report_html import html

COLUMNS = ["val_loss", "tokens", "peak_memory_mb"]
BREAKOUT = "</script><b>&amp;<!--\u2028\u2029$title"


class Page(HTMLParser):
    """The page as a browser's parser sees it: elements, and the text of its title and scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._inside: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside.append(str(dict(attrs).get("id") or tag))

    def handle_endtag(self, tag: str) -> None:
        self._inside.pop()

    def handle_data(self, text: str) -> None:
        if self._inside:
            self.texts[self._inside[-1]] = self.texts.get(self._inside[-1], "") + text

    @property
    def data(self) -> dict[str, Any]:
        return dict(json.loads(self.texts["data"], parse_constant=pytest.fail))


def job(name: str, keys: dict[str, Any], loss: float | None = 2.5, state: str = "done") -> Entry:
    curve = [Point(100 * number, 0.5 * number, 5 - number / 4) for number in (1, 2, 3)]
    values = {"val_loss": loss, "tokens": 300.0, "peak_memory_mb": None}
    return Entry(Path("multirun/s", name), state, "", keys, values, curve, curve[:2], f"train.py name={name}")


def group(entries: list[Entry], keys: dict[str, Any], half_width: float | None = None) -> Group:
    losses = [entry.values["val_loss"] or math.nan for entry in entries]
    mean = sum(losses) / len(losses)
    return Group(keys, entries, mean, half_width, {"val_loss": mean, "tokens": 300.0, "peak_memory_mb": None})


def comparison(entries: list[Entry], groups: list[Group], swept: list[str], **more: Any) -> Comparison:
    best = groups[0].entries[0] if groups else None
    tokens = 300 if groups else None
    fields: dict[str, Any] = {"name": "s", "metric": "val_loss", "equal_tokens": tokens, "best": best, **more}
    return Comparison(swept=swept, columns=COLUMNS, entries=entries, groups=groups, **fields)


def two_seeds(strides: list[Any]) -> Comparison:
    groups = []
    for place, stride in enumerate(strides):
        jobs = [job(f"{place}-{s}", {"stride": stride, "seed": s}, 2.5 + place + s / 10) for s in (0, 1)]
        groups.append(group(jobs, {"stride": stride}, 0.05))
    return comparison([entry for each in groups for entry in each.entries], groups, ["stride", "seed"])


def plain(entry: Entry) -> dict[str, Any]:
    """A job as the page holds it."""
    curves = {
        name: dict(zip(("tokens", "seconds", "loss"), map(list, zip(*points, strict=True)), strict=True))
        for name, points in (("train", entry.train), ("validation", entry.validation))
    }
    return {**asdict(entry), "path": str(entry.path), **curves}


def test_the_page_holds_the_comparison() -> None:
    made = two_seeds([64, 128])
    data = Page(html(made)).data

    assert data["entries"] == [plain(entry) for entry in made.entries]
    assert [
        data[name] for name in ("name", "swept", "columns", "metric", "equal_tokens", "notes", "best")
    ] == [*("s", ["stride", "seed"], COLUMNS, "val_loss", 300, [], 0)]
    for each, read in zip(made.groups, data["groups"], strict=True):
        assert [made.entries[place] for place in read.pop("entries")] == each.entries
        assert read == {name: value for name, value in asdict(each).items() if name != "entries"}


def test_nothing_is_loaded_from_elsewhere() -> None:
    page = Page(html(two_seeds([64, 128])))

    addresses = [
        value for _, attrs in page.elements for name, value in attrs.items() if name in ("src", "href")
    ]
    assert addresses == ["data:,"]  # no icon, so that none is asked for
    assert {tag for tag, _ in page.elements} >= {"main", "style", "script", "noscript"}
    policy = next(attrs for _, attrs in page.elements if attrs.get("http-equiv") == "Content-Security-Policy")
    assert str(policy["content"]).startswith("default-src 'none';")
    style, script = page.texts["style"], page.texts["script"]
    assert "@import" not in style
    assert "url(" not in style
    assert set(re.findall(r"https?://[^\s']+", style + script)) == {"http://www.w3.org/2000/svg"}


def test_the_page_has_all_its_parts() -> None:
    page = Page(html(two_seeds([64, 128])))

    for part in Path(__file__).parents[2].joinpath("harness/sweep/page").iterdir():
        if part.suffix != ".html":
            assert part.read_text() in page.texts["style" if part.suffix == ".css" else "script"]


def test_a_users_words_stay_words() -> None:
    """Names, keys, values, paths, reasons, notes and commands that would end a script or open an element."""
    keys: dict[str, Any] = {BREAKOUT: BREAKOUT, "list": [BREAKOUT]}
    entry = Entry(Path(BREAKOUT), "failed", BREAKOUT, keys, {"val_loss": None}, command=BREAKOUT)
    done = job("0", {BREAKOUT: BREAKOUT})
    groups = [group([done], {BREAKOUT: {BREAKOUT: None}})]
    text = html(comparison([done, entry], groups, [BREAKOUT, "list"], name=BREAKOUT, notes=[BREAKOUT]))
    page, plain_page = Page(text), Page(html(two_seeds([1])))

    assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain_page.elements]
    assert page.texts["title"] == f"{BREAKOUT}: comparison of runs"
    assert page.texts["script"] == plain_page.texts["script"]
    assert not set("<>&\u2028\u2029") & set(page.texts["data"])
    data = page.data
    assert data["name"] == data["notes"][0] == data["entries"][1]["reason"] == data["swept"][0] == BREAKOUT
    assert data["entries"][1]["path"] == str(Path(BREAKOUT))
    assert data["entries"][1]["command"] == BREAKOUT
    assert data["entries"][1]["keys"] == keys
    assert data["groups"][0]["keys"] == {BREAKOUT: {BREAKOUT: None}}


def test_a_name_that_is_no_text_can_be_written() -> None:
    entry = job("\udcff", {})

    assert b"multirun/s/?" in html(comparison([entry], [group([entry], {})], [], name="\udcff")).encode()


def test_figures_that_are_not_finite_are_null() -> None:
    entry = job("0", {}, math.nan)
    entry.train.append(Point(400, math.inf, math.nan))
    data = Page(html(comparison([entry], [group([entry], {}, math.inf)], []))).data

    assert data["entries"][0]["values"]["val_loss"] is None
    last = {name: column[-1] for name, column in data["entries"][0]["train"].items()}
    assert last == {"tokens": 400, "seconds": None, "loss": None}
    assert data["groups"][0]["mean"] is data["groups"][0]["half_width"] is None


def test_swept_values_of_every_kind() -> None:
    values = [None, True, 3, 0.5, 1e-5, "128", "", [0.9, 0.95], {"a": 1}, math.inf, 2**63 - 1, Path("data/x")]
    data = Page(html(two_seeds(values))).data

    read = [each["keys"]["stride"] for each in data["groups"]]
    assert read == [*values[:9], "inf", str(2**63 - 1), "data/x"]  # larger integers lose digits in a browser


@pytest.mark.parametrize(
    "made",
    [
        comparison([], [], []),
        comparison([job("0", {"lr": 0.1}, None, "waiting")], [], ["lr"]),
        comparison([job("0", {})], [group([job("0", {})], {})], []),
        comparison([job("0", {"lr": 0.1})], [group([job("0", {"lr": 0.1})], {"lr": 0.1})], ["lr"]),
        two_seeds([64]),
    ],
    ids=["no job", "no done job", "one job", "one key", "one setting"],
)
def test_small_comparisons_have_a_page(made: Comparison) -> None:
    data = Page(html(made)).data

    assert len(data["entries"]) == len(made.entries)
    assert len(data["groups"]) == len(made.groups)


def test_a_thousand_jobs_are_few_megabytes() -> None:
    jobs = [
        Entry(
            *(Path(f"multirun/s/lr{place}-stride64-0a1b2c3d"), "done", "", {"lr": place / 7, "stride": 64}),
            {f"column_{number}": place / 3 for number in range(15)},
            [Point(40960 * number, number / 7 + place, 3 + place / number) for number in range(1, 201)],
            [Point(40960 * number, number / 7 + place, 3 + place / number) for number in range(1, 201)],
            f"python train.py experiment=sweep_stride_seq_len optimizer.lr={place / 7} loader.stride=64",
        )
        for place in range(1000)
    ]

    text = html(comparison(jobs, [], ["lr", "stride"]))
    curve = Page(text).data["entries"][7]["train"]

    assert len(text.encode()) < 5_000_000
    assert len(curve["tokens"]) == 67
    assert curve["tokens"][-1] == 200 * 40960
