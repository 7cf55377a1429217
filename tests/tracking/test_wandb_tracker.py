"""W&B mirrors metrics.jsonl to the last row, and whatever becomes of it, the run goes on."""

from __future__ import annotations

import json
import logging
import math
import os
import pty
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.config import TrainConfig
from harness.config_groups import TrackerConfig, WandbTrackerConfig
from harness.config_record import to_dict
from harness.errors import EXIT_FAILED, EXIT_STOPPED, UserError
from harness.tracking import NoTracker, TrackedRun, Tracker, open_tracker
from harness.tracking.jsonl import MetricsFile, read_rows
from harness.tracking.wandb_service import helpers
from harness.tracking.wandb_tracker import WandbTracker
from tests.tracking.wandb_reader import read_run
from tests.tracking.wandb_server import Server, serve

KEY = "0123456789" * 4
DIGESTS = {"metadata_sha256": "a" * 64, "content_sha256": "b" * 64}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No key, no settings and no home but the test's own; wandb reads them afresh each time."""
    home = tmp_path / "home"
    home.mkdir()
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    yield home
    import wandb

    wandb.teardown()


@pytest.fixture
def server() -> Iterator[Server]:
    with serve() as server:
        yield server


def start(
    run_dir: Path,
    *,
    run_id: str | None = None,
    last_step: int | None = None,
    parent: dict[str, Any] | None = None,
    lr: float = 1e-3,
    **config: Any,
) -> tuple[Tracker, list[str]]:
    """A tracker in `run_dir`, and the lines it reports."""
    manifest = run_dir.parent / "data" / "stdlib-byte" / "npy-stream" / "metadata.json"
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text('{"format_version": 2}')
    run_dir.mkdir(exist_ok=True)
    run_config = TrainConfig(tracker=WandbTrackerConfig(**config))
    run_config.optimizer.lr = lr
    reports: list[str] = []
    tracked = TrackedRun(
        id=run_id or secrets.token_hex(4),
        directory=run_dir,
        config=to_dict(run_config),
        digests=DIGESTS,
        manifest_path=manifest,
        resumes=run_id is not None,
        last_step=last_step,
        parent=parent,
    )
    return open_tracker(run_config.tracker, tracked, reports.append), reports


def row(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "epoch": step // 3,
        "tokens": step * 2048,
        "loss": 7.123456789012345 / step,
        "lr": 1e-300 * step,
        "position": (1 << 53) - 1 - step,
        "batch_sha256": f"{step:064x}",
    }


def merged(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The rows of metrics.jsonl by step: W&B keeps one row a step."""
    by_step: dict[int, dict[str, Any]] = {}
    for one in rows:
        by_step.setdefault(one["step"], {}).update(one)
    return by_step


@pytest.fixture
def root_records() -> Iterator[list[logging.LogRecord]]:
    """What reaches the root logger, as a run's own handlers would see it."""
    records: list[logging.LogRecord] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Handler()
    logging.getLogger().addHandler(handler)
    yield records
    logging.getLogger().removeHandler(handler)


def test_an_offline_run_read_back_equals_the_run(
    tmp_path: Path,
    own_home: Path,
    capfd: pytest.CaptureFixture[str],
    root_records: list[logging.LogRecord],
) -> None:
    run_dir = tmp_path / "my-run"
    tracker, reports = start(run_dir, mode="offline", tags=["a", "b"], project="p", lr=0.25)
    metrics = MetricsFile(run_dir / "metrics.jsonl")
    for step in range(1, 8):
        rows = [row(step)]
        if step % 3 == 0:
            rows.append({"step": step, "val_loss": 1.5 / step, "val_bits_per_byte": 2.5 / step})
        for one in rows:
            metrics.append(one)
        tracker.log(merged(rows)[step])
    metrics.close()
    tracker.finish(0)

    run = read_run(run_dir / "wandb")
    expected = to_dict(TrainConfig(tracker=WandbTrackerConfig(mode="offline", tags=["a", "b"], project="p")))
    expected["optimizer"]["lr"] = 0.25
    del run.config["_wandb"]
    assert run.config == {
        **expected,
        "data/metadata_sha256": "a" * 64,
        "data/content_sha256": "b" * 64,
    }
    assert run.rows == merged(read_rows(run_dir / "metrics.jsonl"))
    assert all("position" in one and "epoch" in one for one in run.rows.values())
    assert run.summary["data/metadata_sha256"] == "a" * 64
    assert run.summary["data/content_sha256"] == "b" * 64
    assert run.summary["position"] == row(7)["position"]
    assert run.step_metrics == {"tokens": "", "*": "tokens"}
    assert (run.id, run.name, run.project, run.tags) == (tracker.id, "my-run", "p", ["a", "b"])
    assert run.exit_code == 0
    (artifact,) = run.artifacts
    assert (artifact.type, artifact.name) == ("dataset", "stdlib-byte-npy-stream")
    assert json.loads(artifact.metadata) == DIGESTS
    assert [entry.path for entry in artifact.manifest.contents] == ["metadata.json"]

    assert reports == []
    assert capfd.readouterr() == ("", "")
    assert root_records == []  # or train.log would be full of wandb's own lines
    assert list(own_home.iterdir()) == []


def test_numbers_that_are_not_finite_arrive_as_in_metrics_jsonl(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    tracker, _ = start(run_dir, mode="offline")
    metrics = MetricsFile(run_dir / "metrics.jsonl")
    one = {"step": 1, "tokens": 8, "loss": math.nan, "grad_norm": math.inf, "low": -math.inf}
    metrics.append(one)
    metrics.close()
    tracker.log(one)
    tracker.finish(1)
    run = read_run(run_dir / "wandb")
    (written,) = read_rows(run_dir / "metrics.jsonl")
    assert str(sorted(run.rows[1].items())) == str(sorted(written.items())) == str(sorted(one.items()))
    assert run.exit_code == 1


def test_a_resumed_offline_run_keeps_its_id(tmp_path: Path) -> None:
    first, _ = start(tmp_path / "run")
    first.log(row(1))
    first.finish(1)
    again, (line,) = start(tmp_path / "run", run_id=first.id)
    assert again.last_step == 1
    for step in (1, 2):
        again.log(row(step))
    again.finish(0)
    assert line.endswith(f"wandb sync {tmp_path}/run/wandb/offline-run-*-{first.id}*")  # both, in one command
    runs = [read_run(tmp_path / "run" / "wandb", index) for index in (0, 1)]
    assert [run.id for run in runs] == [first.id, first.id] == [again.id, again.id]
    assert [run.rows for run in runs] == [{1: row(1)}, {2: row(2)}]


def test_a_run_left_open_does_not_swallow_the_next_one(tmp_path: Path) -> None:
    crashed, _ = start(tmp_path / "one", mode="offline", lr=0.1)
    crashed.log(row(5))
    following, _ = start(tmp_path / "two", mode="offline", lr=0.2)
    for step in (1, 2):
        following.log(row(step))
    following.finish(0)
    crashed.finish(1)
    assert crashed.id != following.id
    one, two = (read_run(tmp_path / name / "wandb") for name in ("one", "two"))
    assert (one.config["optimizer"]["lr"], list(one.rows), one.exit_code) == (0.1, [5], 1)
    assert (two.config["optimizer"]["lr"], list(two.rows), two.exit_code) == (0.2, [1, 2], 0)


def test_without_a_key_auto_is_offline_and_says_so_in_one_line(tmp_path: Path) -> None:
    tracker, reports = start(tmp_path / "run")
    tracker.log(row(1))
    tracker.finish(0)
    (line,) = reports
    assert "no key for" in line
    folder = Path(line.split("wandb sync ")[1])
    assert folder.parent == tmp_path / "run" / "wandb"
    assert len(list(folder.glob("*.wandb"))) == 1
    assert read_run(tmp_path / "run" / "wandb").rows == {1: row(1)}


def test_the_environments_mode_decides_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker, reports = start(tmp_path / "offline")
    tracker.finish(0)
    assert reports == []
    assert read_run(tmp_path / "offline" / "wandb").exit_code == 0

    monkeypatch.setenv("WANDB_MODE", "disabled")
    tracker, reports = start(tmp_path / "disabled")
    assert isinstance(tracker, NoTracker)
    assert reports == ["W&B: WANDB_MODE=disabled; metrics.jsonl has every row"]
    assert not (tmp_path / "disabled" / "wandb").exists()


def test_a_key_that_wandb_refuses_falls_back_to_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "too-short")
    tracker, reports = start(tmp_path / "run")
    tracker.log(row(1))
    tracker.finish(0)
    (line,) = reports
    assert "online failed" in line
    assert "wandb sync" in line
    assert read_run(tmp_path / "run" / "wandb").rows == {1: row(1)}


def test_a_key_in_netrc_goes_online(
    tmp_path: Path, own_home: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    host = server.url.removeprefix("http://")
    (own_home / "netrc").write_text(f"machine {host}\n  login user\n  password {KEY}\n")
    (own_home / "netrc").chmod(0o600)
    tracker, reports = start(tmp_path / "run")
    assert isinstance(tracker, WandbTracker)
    for step in (1, 2):
        tracker.log(row(step))
    tracker.finish(0)
    (line,) = reports
    assert line == f"W&B: {server.url}/me/p/runs/{tracker.id}"
    assert arrived(server) == {1: row(1), 2: row(2)}


def test_a_resumed_run_keeps_the_tags_that_a_person_gave_it(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    server.known["abcd1234"], server.tags = 7, ["by hand"]
    tracker, _ = start(tmp_path / "run", run_id="abcd1234", tags=["mine"])
    tracker.finish(0)
    assert server.tags == ["by hand", "mine"]


def test_a_run_that_is_to_go_on_is_preempted_and_one_that_failed_is_not(tmp_path: Path) -> None:
    for code, is_preempted in ((EXIT_STOPPED, True), (EXIT_FAILED, False)):
        tracker, _ = start(tmp_path / str(code), mode="offline")
        tracker.log(row(1))
        tracker.finish(code)
        run = read_run(tmp_path / str(code) / "wandb")
        assert (run.exit_code, run.preempted) == (code, is_preempted)


def arrived(server: Server) -> dict[int, dict[str, Any]]:
    rows = {
        line["_step"]: {key: value for key, value in line.items() if not key.startswith("_")}
        for line in server.rows
    }
    assert len(rows) == len(server.rows)
    return rows


def test_a_resumed_online_run_sends_no_step_twice(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    server.known["abcd1234"] = 7  # it was killed at step 7, and goes on from a checkpoint at step 4
    tracker, reports = start(tmp_path / "run", run_id="abcd1234")
    assert tracker.id == "abcd1234"
    tracker.log({"step": 4, "val_loss": 1.0}, late=True)  # which the server would not take any more
    for step in range(5, 11):
        tracker.log(row(step))
    tracker.finish(0)
    assert arrived(server) == {step: row(step) for step in (8, 9, 10)}
    assert reports[1:] == ["W&B: step 4 was sent without its evaluation, which is in metrics.jsonl"]
    assert capfd.readouterr() == ("", "")


SCRIPT = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from harness.config_groups import WandbTrackerConfig
from harness.tracking import TrackedRun, open_tracker
run_dir, reports = Path(sys.argv[2]), []
manifest = run_dir / "metadata.json"
manifest.write_text("{}")
tracked = TrackedRun(id="abcd1234", directory=run_dir, config={}, digests={}, manifest_path=manifest)
tracker = open_tracker(WandbTrackerConfig(**json.loads(sys.argv[3])), tracked, reports.append)
for step in (1, 2, 3):
    tracker.log({"step": step, "tokens": step})
tracker.finish(0)
(run_dir / "reports.json").write_text(json.dumps([type(tracker).__name__, reports]))
"""


def command(run_dir: Path, **config: Any) -> list[str]:
    run_dir.mkdir()
    return [sys.executable, "-c", SCRIPT, str(ROOT), str(run_dir), json.dumps(config)]


def outcome(run_dir: Path) -> tuple[str, list[str]]:
    kind, reports = json.loads((run_dir / "reports.json").read_text())
    return kind, reports


@pytest.mark.parametrize(
    "source",
    ["raise ImportError('no wandb here')", "raise RuntimeError('half installed')", "def broken(:", None],
    ids=["missing", "raises", "syntax error", "an empty package"],
)
def test_a_wandb_that_cannot_be_imported_costs_one_line(tmp_path: Path, source: str | None) -> None:
    package = tmp_path / "broken" / "wandb"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(source if source is not None else "")
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    run_dir = tmp_path / "run"
    done = subprocess.run(
        command(run_dir),
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    kind, (line,) = outcome(run_dir)
    assert kind == "NoTracker"
    assert "wandb cannot be used" in line
    assert "tracker=none" in line


@pytest.mark.parametrize("kind", ["refuses", "is silent"])
def test_a_server_that_cannot_be_reached_falls_back_to_offline(
    tmp_path: Path, server: Server, kind: str
) -> None:
    server.silent = True
    url = "http://127.0.0.1:9" if kind == "refuses" else server.url
    environment = {**os.environ, "WANDB_BASE_URL": url, "WANDB_API_KEY": KEY}
    run_dir = tmp_path / "run"
    # The limit is the promise: wandb alone would hold a silent server for minutes, also at its exit.
    done = subprocess.run(
        command(run_dir, init_timeout=1), env=environment, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    _, (line,) = outcome(run_dir)
    assert "online failed" in line
    run = read_run(run_dir / "wandb")
    assert list(run.rows) == [1, 2, 3]
    assert f"wandb sync {run_dir / 'wandb'}/offline-run" in line
    assert line.endswith(run.id)


@pytest.mark.parametrize(
    ("finish_timeout", "call", "said"),
    [(1, "tracker.finish(0)", "finish_timeout=1 s;"), (60, "tracker.finish(75, at_most=1)", "within 1 s;")],
)
def test_a_server_that_falls_silent_holds_up_neither_finish_nor_the_exit(
    tmp_path: Path, server: Server, finish_timeout: int, call: str, said: str
) -> None:
    script = SCRIPT.replace("tracker.finish(0)", f"print('ready', flush=True); input(); {call}")
    run_dir = tmp_path / "run"
    arguments = command(run_dir, finish_timeout=finish_timeout)
    arguments[2] = script
    process = subprocess.Popen(
        arguments,
        env={**os.environ, "WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    server.silent = True
    # The end of its output, too, waits for no helper that was left behind.
    out, err = process.communicate("\n", timeout=30)
    assert (process.returncode, out, err) == (0, "", "")
    _, (online, late) = outcome(run_dir)
    assert server.url in online
    assert said in late
    assert "wandb sync" in late


def test_there_is_never_a_prompt_on_a_terminal(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            command(run_dir, mode="online"), stdin=theirs, stdout=theirs, stderr=theirs, timeout=60
        )
    finally:
        os.close(theirs)
        os.close(ours)
    assert done.returncode == 0
    kind, (line,) = outcome(run_dir)
    assert kind == "WandbTracker"
    assert "no key for" in line


def test_a_closed_standard_input_is_no_obstacle(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = subprocess.run(
        ["bash", "-c", 'exec "$@" <&-', "bash", *command(run_dir)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(read_run(run_dir / "wandb").rows) == [1, 2, 3]


def wandb_service() -> int:
    """The process id of this process's own wandb helper."""
    (pid,) = helpers()
    return pid


def test_a_log_that_fails_ends_the_mirror_with_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tracker, reports = start(tmp_path / "run", mode="offline")
    tracker.log(row(1))
    os.kill(wandb_service(), signal.SIGKILL)
    step = 2
    while not reports and step < 10_000:  # what is written into a closing socket may still pass
        tracker.log(row(step))
        step += 1
    for later in range(step, step + 3):
        tracker.log(row(later))
    tracker.finish(1)
    (line,) = reports
    assert "logging step" in line
    assert "metrics.jsonl has every row" in line

    following, reports = start(tmp_path / "next", mode="offline")
    following.log(row(1))
    following.finish(0)
    assert reports == []
    assert read_run(tmp_path / "next" / "wandb").rows == {1: row(1)}
    assert capfd.readouterr() == ("", "")


def test_a_row_that_wandb_cannot_take_ends_the_mirror_with_one_line(tmp_path: Path) -> None:
    tracker, reports = start(tmp_path / "run", mode="offline")
    tracker.log(row(1))
    tracker.log({"step": 2, 3: "a key that is no string"})  # type: ignore[dict-item]
    tracker.log(row(3))
    tracker.finish(0)
    (line,) = reports
    assert "logging step 2 failed" in line
    assert list(read_run(tmp_path / "run" / "wandb").rows) == [1]


def test_a_manifest_that_cannot_be_recorded_costs_one_line_and_no_row(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    reports: list[str] = []
    missing = tmp_path / "missing" / "metadata.json"
    tracked = TrackedRun("abcd1234", run_dir, config={}, digests=DIGESTS, manifest_path=missing)
    tracker = open_tracker(WandbTrackerConfig(mode="offline"), tracked, reports.append)
    tracker.log(row(1))
    tracker.finish(0)
    (line,) = reports
    assert "the data set was not recorded" in line
    run = read_run(run_dir / "wandb")
    assert run.rows == {1: row(1)}
    assert run.summary["data/metadata_sha256"] == "a" * 64


def test_a_server_that_stalls_over_the_manifest_does_not_hold_up_the_start(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    server.unanswered = {"Viewer"}  # asked on the way to recording an artifact
    tracker, reports = start(tmp_path / "run", init_timeout=1, finish_timeout=1)
    assert len(reports) == 2
    assert "the data set was not recorded (no answer in 1 s)" in reports[1]
    tracker.log(row(1))
    tracker.finish(0)
    assert read_run(tmp_path / "run" / "wandb").rows == {1: row(1)}


def test_a_finished_tracker_takes_nothing_more(tmp_path: Path) -> None:
    tracker, reports = start(tmp_path / "run", mode="offline")
    tracker.log(row(1))
    tracker.finish(0)
    tracker.log(row(2))
    tracker.finish(1)
    run = read_run(tmp_path / "run" / "wandb")
    assert (list(run.rows), run.exit_code, reports) == ([1], 0, [])


def test_tracker_none_does_nothing_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    tracked = TrackedRun("abcd1234", tmp_path, config={}, digests=DIGESTS, manifest_path=tmp_path / "m.json")
    before = list(tmp_path.iterdir())
    tracker = open_tracker(TrackerConfig(), tracked, pytest.fail)
    tracker.log(row(1))
    tracker.finish(0)
    assert tracker.id is None
    assert list(tmp_path.iterdir()) == before
    with pytest.raises(UserError, match=r"tracker\.name=mlflow.*none, wandb"):
        open_tracker(TrackerConfig(name="mlflow"), tracked, pytest.fail)
