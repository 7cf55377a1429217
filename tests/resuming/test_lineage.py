"""A run says which data and which order each of its steps came from."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from harness.errors import UserError
from harness.resuming import lineage
from harness.resuming.lineage import Segment
from tests.helpers_runs import run, tiny_config, write_text_set


def _segment(step: int, **changes: Any) -> Segment:
    values = {
        "step": step, "run_id": "a", "path": "/runs/a", "data_path": "/data", "metadata_sha256": "0" * 64,
        "loader": {"name": "sequential"}, "cursor": {"position": 0},
        "epoch": 0, "data_chain": None,
    }  # fmt: skip
    return Segment(**{**values, **changes})


def test_a_new_segment_takes_the_place_of_those_whose_steps_are_not_gone_on_from() -> None:
    segments = lineage.extended([_segment(0), _segment(4), _segment(8)], _segment(6))
    assert [segment.step for segment in segments] == [0, 4, 6]
    assert [segment.step for segment in lineage.extended(segments, _segment(0))] == [0]


def test_each_step_belongs_to_the_segment_before_it() -> None:
    segments = [_segment(0), _segment(4)]
    assert [lineage.segment_of(segments, step).step for step in (1, 4, 5, 1000)] == [0, 0, 4, 4]
    with pytest.raises(UserError, match="nothing is recorded of step 4: the first step that is known is 5"):
        lineage.segment_of(segments[1:], 4)


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    segments = [_segment(0), _segment(4, cursor={"position": 12})]
    lineage.write(tmp_path, segments)
    assert lineage.read(tmp_path) == segments


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            [dataclasses.asdict(_segment(0)) | {"data_chain": 1}],
            "data_chain=1 of a segment must be str or null",
        ),
        ([], "must be a list of segments"),
        ({}, "must be a list of segments"),
        ([{"step": 0}], "must hold step, run_id"),
        ([dataclasses.asdict(_segment(0)) | {"step": True}], "step=True of a segment must be int"),
        ([dataclasses.asdict(_segment(0)) | {"cursor": None}], "cursor=None of a segment must be dict"),
        (
            [dataclasses.asdict(_segment(step)) for step in (4, 4)],
            r"the steps of lineage must rise: \[4, 4\]",
        ),
    ],
)
def test_a_damaged_record_is_refused(tmp_path: Path, record: Any, message: str) -> None:
    (tmp_path / lineage.FILE).write_text(json.dumps({"segments": record}))
    with pytest.raises(UserError, match=message):
        lineage.read(tmp_path)


def test_a_run_and_its_branch_keep_their_lineage(tmp_path: Path) -> None:
    data = write_text_set(tmp_path / "set")
    first, branch = tmp_path / "first", tmp_path / "branch"
    run(tiny_config(data, checkpoint__keep_last=None), first)
    (begun,) = lineage.read(first)
    assert (begun.step, begun.path, begun.data_path) == (0, str(first), str(data))
    assert (begun.cursor["position"], begun.loader["seq_len"]) == (0, 16)

    run(tiny_config(data, resume=str(first / "checkpoints/step-00000008")), branch)
    inherited, own = lineage.read(branch)
    assert inherited == begun
    assert (own.step, own.path, own.cursor["position"]) == (8, str(branch), 8 * 4 * 16)
    trainer = json.loads((branch / "checkpoints/step-00000012/trainer.json").read_text())
    assert lineage.from_record(trainer["lineage"], "trainer.json") == [inherited, own]
    assert own.run_id == trainer["run_id"] != inherited.run_id

    run(tiny_config(data, resume=str(branch), trainer__max_steps=14), branch)
    assert lineage.read(branch) == [inherited, own]
