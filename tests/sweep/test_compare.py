"""What runs say together: which keys tell them apart, where they are compared, and which are alike."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.commandline import overrides
from harness.errors import UserError
from harness.files import write_json
from harness.sweep.compare import compare, find_runs
from harness.sweep.comparison import Comparison, Entry
from harness.sweep.statistics import t_quantile
from harness.tracking.jsonl import encode_row, read_rows
from tests.helpers_reports import make_template, write_job
from tests.helpers_runs import run, tiny_config, write_text_set


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reports")
    return make_template(write_text_set(folder / "set"), folder / "template")


def entry(comparison: Comparison, name: str) -> Entry:
    return next(entry for entry in comparison.entries if entry.path.name == name)


def change(path: Path, **values: Any) -> None:
    """Change the top level of a JSON file."""
    write_json(path, json.loads(path.read_text()) | values)


# Which keys


def test_columns_are_the_swept_keys_and_no_followers_of_them(template: Path, tmp_path: Path) -> None:
    for lr in ("1e-3", "2e-3"):
        for seed in (0, 1):
            words = [
                "model.n_layer=1",
                f"seed={seed}",
                f"optimizer.lr={lr}",
                f"trainer.log_interval={seed + 1}",
            ]
            write_job(template, tmp_path / f"{lr}-{seed}", words)
    result = compare(tmp_path)
    assert result.swept == ["optimizer.lr", "seed"]
    assert [e.keys for e in result.entries] == [
        {"optimizer.lr": lr, "seed": seed} for lr in (0.001, 0.002) for seed in (0, 1)
    ]
    assert [group.keys for group in result.groups] == [{"optimizer.lr": 0.001}, {"optimizer.lr": 0.002}]
    assert [group.seeds for group in result.groups] == [2, 2]


def test_a_group_goes_by_its_word_and_explains_its_keys(template: Path, tmp_path: Path) -> None:
    for name, width in (("nano", 32), ("micro", 64)):
        job = write_job(template, tmp_path / name, [f"model={name}"])
        _edit(job / "config.yaml", "n_embd: 32", f"n_embd: {width}")
    assert compare(tmp_path).swept == ["model"]
    job = write_job(template, tmp_path / "micro-2", ["model=micro"])
    _edit(job / "config.yaml", "n_embd: 32", "n_embd: 96")
    assert compare(tmp_path).swept == ["model", "model.n_embd"]  # the word alone does not say which


def test_a_default_that_changed_between_runs_is_a_column_though_nobody_named_it(
    template: Path, tmp_path: Path
) -> None:
    write_job(template, tmp_path / "old", ["seed=0"])
    later = write_job(template, tmp_path / "new", ["seed=0"])
    _edit(later / "config.yaml", "grad_clip: 1.0", "grad_clip: 0.5")
    result = compare([tmp_path / "old", later])
    assert result.swept == ["trainer.grad_clip"]
    assert (result.name, [e.keys["trainer.grad_clip"] for e in result.entries]) == ("2 runs", [1.0, 0.5])


def test_a_key_that_an_older_version_lacked_is_at_its_default(template: Path, tmp_path: Path) -> None:
    jobs = [write_job(template, tmp_path / f"a{seed}", [f"seed={seed}"]) for seed in (0, 1)]
    _edit(jobs[0] / "config.yaml", "  mmap: true\n", "")
    assert compare(tmp_path).swept == ["seed"]


def test_an_experiment_explains_what_it_sets_and_nothing_else(template: Path, tmp_path: Path) -> None:
    for name, clip in (("a", "1.0"), ("b", "0.5")):
        for seed in (0, 1):
            job = write_job(template, tmp_path / f"{name}{seed}", [f"experiment={name}", f"seed={seed}"])
            _edit(job / "config.yaml", "grad_clip: 1.0", f"grad_clip: {clip}")
    assert compare(tmp_path).swept == ["experiment", "seed"]
    _edit(tmp_path / "a1" / "config.yaml", "weight_decay: 0.1", "weight_decay: 0.2")
    assert compare(tmp_path).swept == ["experiment", "optimizer.weight_decay", "seed"]


def test_a_job_that_failed_before_it_was_a_run_has_the_keys_of_its_words(
    template: Path, tmp_path: Path
) -> None:
    write_job(template, tmp_path / "fits", ["optimizer.lr=1e-3", "loader.seq_len=16"])
    failed = tmp_path / "fails"
    failed.mkdir()
    write_json(
        failed / "job.json", {"identity": "f" * 64, "words": ["optimizer.lr=1e-3", "loader.seq_len=64"]}
    )
    write_json(failed / "status.json", {"state": "failed", "reason": "user", "error": "UserError: too long"})
    result = compare(tmp_path)
    assert result.swept == ["loader.seq_len"]
    assert [(e.state, e.reason, e.keys) for e in result.entries] == [
        ("done", "", {"loader.seq_len": 16}),
        ("failed", "user: too long", {"loader.seq_len": 64}),
    ]


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


# At equal tokens


def test_results_are_taken_where_all_done_jobs_were_and_steps_round_up(
    template: Path, tmp_path: Path
) -> None:
    # Steps of 64 and 68 tokens: the first job ends after 640; the others have 640 and 680 <= 640 + 67 there.
    by_step = {5: 4.0, 10: 3.0, 12: 2.0}
    write_job(template, tmp_path / "short", ["seed=0"], by_step.__getitem__, steps=10)
    write_job(template, tmp_path / "long", ["seed=1"], by_step.__getitem__)
    write_job(template, tmp_path / "larger", ["seed=2", "loader.seq_len=17"], lambda step: 10 - step / 10)
    write_job(template, tmp_path / "on", ["seed=3"], 1.0, steps=5, state="stopped")
    result = compare(tmp_path)
    assert result.equal_tokens == 640
    values = {e.path.name: e.values for e in result.entries}
    assert {name: v["val_loss"] for name, v in values.items()} == {
        "short": 3,
        "long": 3,
        "larger": 9.0,
        "on": 1,
    }
    assert {name: v["tokens"] for name, v in values.items()} == {
        "short": 640,
        "long": 768,
        "larger": 816,
        "on": 320,
    }
    assert values["larger"]["best_val_loss"] == 9.0
    assert values["long"]["val_bits_per_byte"] == 4.5
    assert any("2 of 3 runs were trained beyond 640 tokens (larger to 816)" in note for note in result.notes)
    assert not any("lie apart" in note for note in result.notes)


def test_evaluations_that_lie_apart_are_said(template: Path, tmp_path: Path) -> None:
    write_job(template, tmp_path / "often", ["seed=0"], steps=10)
    rare = write_job(template, tmp_path / "rare", ["seed=1"])
    lines = (rare / "metrics.jsonl").read_text().splitlines(keepends=True)
    (rare / "metrics.jsonl").write_text("".join(x for x in lines if '"step": 10' not in x or "val_" not in x))
    notes = compare(tmp_path).notes
    assert (
        "evaluations lie apart: 1 of 2 runs have none close to 640 tokens, rare only one after 320"
        in notes[0]
    )


def test_the_best_so_far_may_be_an_earlier_one(template: Path, tmp_path: Path) -> None:
    write_job(template, tmp_path / "one", [], {5: 3.0, 10: 3.5, 12: 4.0}.__getitem__)
    values = compare(tmp_path).entries[0].values
    assert (values["val_loss"], values["best_val_loss"], values["best_val_bits_per_byte"]) == (4.0, 3.0, 4.5)


# Groups and noise


def test_groups_are_averaged_over_seeds_and_marked_by_the_pooled_noise(
    template: Path, tmp_path: Path
) -> None:
    losses = {1: (2.00, 2.02), 2: (2.08, 2.12), 3: (2.30, 2.30), 4: (2.05,)}
    for layer, values in losses.items():
        for seed, loss in enumerate(values):
            write_job(
                template, tmp_path / f"{layer}-{seed}", [f"model.n_layer={layer}", f"seed={seed}"], loss
            )
    result = compare(tmp_path)
    assert result.swept == ["model.n_layer", "seed"]
    assert [group.keys["model.n_layer"] for group in result.groups] == [1, 4, 2, 3]
    assert [group.mean for group in result.groups] == pytest.approx([2.01, 2.05, 2.10, 2.30])
    assert [group.is_best for group in result.groups] == [True, False, False, False]
    # Pooled variance (0.0002 + 0.0008 + 0) / 3; two-seed groups differ from 3.1824 sqrt(0.000333) on = 0.0581
    assert [group.is_tied for group in result.groups] == [False, True, False, False]
    assert result.groups[0].half_width == pytest.approx(t_quantile(1) * 0.01)
    assert result.groups[1].half_width is None
    assert result.groups[0].means["tokens"] == 768
    assert result.best is entry(result, "1-0")


def test_with_one_seed_each_nothing_is_marked_as_alike(template: Path, tmp_path: Path) -> None:
    for layer in (1, 2):
        write_job(template, tmp_path / f"{layer}", [f"model.n_layer={layer}"], 3.0 + layer * 1e-9)
    groups = compare(tmp_path).groups
    assert [(group.is_best, group.is_tied, group.half_width) for group in groups] == [
        (True, False, None),
        (False, False, None),
    ]


def test_two_real_runs_of_one_configuration_are_a_group(tmp_path: Path) -> None:
    data = write_text_set(tmp_path / "set")
    small = {"model__n_layer": 1, "trainer__max_steps": 4, "checkpoint__interval": 100}
    for seed in (0, 1):
        run(tiny_config(data, seed=seed, **small), tmp_path / "runs" / "day" / f"run-{seed}")
    result = compare(tmp_path / "runs")
    assert (result.swept, result.equal_tokens, [g.seeds for g in result.groups]) == (["seed"], 256, [2])
    for each in result.entries:
        summary = json.loads((each.path / "summary.json").read_text())
        assert {name: summary[name] for name in result.columns} == each.values
        rows = [row for row in read_rows(each.path / "metrics.jsonl") if "loss" in row]
        assert [(p.tokens, p.loss) for p in each.train] == [(row["tokens"], row["loss"]) for row in rows]
        assert each.train[-1].seconds == pytest.approx(sum(64 / row["tokens_per_s"] for row in rows))
        assert [p.tokens for p in each.validation] == [256]
    mean = sum(e.values["val_loss"] or math.nan for e in result.entries) / 2
    assert result.groups[0].mean == pytest.approx(mean)


def test_runs_on_other_data_than_their_settings_say_are_no_seeds_of_each_other(
    template: Path, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        write_job(template, tmp_path / name, ["seed=0"])
    _manifest(tmp_path / "b", preparation={"corpus_sha256": "b" * 64})
    result = compare(tmp_path)
    assert result.swept == ["metadata_sha256"]
    assert [group.seeds for group in result.groups] == [1, 1]


def test_the_same_run_twice_is_not_two_seeds(template: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_job(template, tmp_path / name, ["seed=0"])
    write_job(template, tmp_path / "c", ["seed=1"])
    result = compare(tmp_path)
    assert [group.seeds for group in result.groups] == [2]
    assert "a, which is counted" in entry(result, "b").reason


# Unlike runs


def _manifest(path: Path, **changes: Any) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    for key, value in changes.items():
        manifest[key] |= value
    write_json(path / "manifest.json", manifest)


def test_different_tokenizers_are_compared_in_bits_per_byte(template: Path, tmp_path: Path) -> None:
    text = {"corpus_sha256": "a" * 64, "val_fraction": 0.1}
    for name, size, loss in (("byte", 257, 4.0), ("bpe", 4096, 6.0)):
        job = write_job(template, tmp_path / name, [f"tokenizer={name}"], loss)
        _manifest(job, tokenizer={"name": name, "vocab_size": size}, preparation=text)
    result = compare(tmp_path)
    assert result.metric == "val_bits_per_byte"
    assert [group.mean for group in result.groups] == [6.0, 9.0]
    assert result.best is not None
    assert "different tokenizers" in result.notes[0]
    assert "evaluation.tokens counts each tokenizer's own tokens" in result.notes[1]


@pytest.mark.parametrize(
    ("words", "changes", "said"),
    [
        (["evaluation.tokens=100"], {}, "different validation data: 200 tokens of val as stream, tokens"),
        ([], {"preparation": {"corpus_sha256": "b" * 64}}, "different validation data"),
        (["loader=contrastive_rows"], {}, "different objectives: next-token prediction"),
    ],
)
def test_unlike_evaluations_are_said_and_nothing_is_called_best(
    template: Path, tmp_path: Path, words: list[str], changes: dict[str, Any], said: str
) -> None:
    write_job(template, tmp_path / "a", [])
    _manifest(write_job(template, tmp_path / "b", words, 1.0), **changes)
    result = compare(tmp_path)
    assert said in result.notes[0]
    assert result.notes[0].endswith("Nothing is called best")
    assert result.best is None
    assert not any(group.is_best or group.is_tied for group in result.groups)


def test_losses_of_preferences_by_another_beta_are_other_quantities(template: Path, tmp_path: Path) -> None:
    for beta in (0.1, 0.5):
        words = ["loader=contrastive_rows", f"trainer.dpo_beta={beta}"]
        write_job(template, tmp_path / f"{beta}", words, 1 - beta)
    result = compare(tmp_path)
    assert "trainer.dpo_beta=0.1" in result.notes[0]
    assert result.best is None


def test_another_storage_of_the_same_text_is_the_same_data(template: Path, tmp_path: Path) -> None:
    write_job(template, tmp_path / "a", ["data=npy"])
    other = write_job(template, tmp_path / "b", ["data=hdf5"], 4.0)
    _manifest(other, storage={"chunk_tokens": 65536, "compression": "gzip", "format": "hdf5"})
    text = (other / "manifest.json").read_text().replace(".npy", ".h5")
    (other / "manifest.json").write_text(text)
    result = compare(tmp_path)
    assert (result.swept, result.notes) == (["data"], [])
    assert result.best is entry(result, "b")


def test_other_code_and_hardware_are_said(template: Path, tmp_path: Path) -> None:
    for name, commit in (("a", "1" * 40), ("b", "2" * 40)):
        job = write_job(template, tmp_path / name, [f"seed={commit[0]}"])
        start = {
            "step": 0,
            "git": {"commit": commit, "dirty": name == "b"},
            "gpus": ["H"] * (name == "b"),
            "cpus": 2,
        }
        write_json(job / "environment.json", {"starts": [start]})
    notes = "\n".join(compare(tmp_path).notes)
    assert "different code: commit 111111111111 (a), commit 222222222222 with changes (b)" in notes
    assert "different hardware: 2 CPUs (a), H (b)" in notes


# Jobs that are not done


def test_states_and_reasons_are_told_and_only_sound_done_jobs_are_averaged(
    template: Path, tmp_path: Path
) -> None:
    nan = float("nan")
    write_job(template, tmp_path / "0", ["seed=0"], 4.0)
    write_job(
        template, tmp_path / "1", ["seed=1"], 4.0, state="failed", reason="diverged", error="RunFailed: NaN"
    )
    write_job(template, tmp_path / "2", ["seed=2"], 4.0, state="stopped")
    write_job(template, tmp_path / "3", ["seed=3"], 4.0, state="running", pid=2**22 + 1)
    write_job(template, tmp_path / "4", ["seed=4"], lambda step: nan if step == 12 else 4.0)
    (tmp_path / "5").mkdir()
    write_json(tmp_path / "5" / "job.json", {"identity": "0" * 64, "words": ["seed=5"]})
    result = compare(tmp_path)
    assert [(e.keys["seed"], e.state) for e in result.entries] == list(
        enumerate(["done", "failed", "stopped", "died", "done", "waiting"])
    )
    reasons = [e.reason for e in result.entries]
    assert [reasons[0], reasons[1], reasons[2], reasons[5]] == ["", "diverged: NaN", "", ""]
    assert reasons[4] == "diverged: val_loss is nan at step 12"
    assert [group.seeds for group in result.groups] == [1]


def test_a_summary_of_an_earlier_stop_says_nothing_of_a_run_that_went_on(
    template: Path, tmp_path: Path
) -> None:
    job = write_job(template, tmp_path / "on", [], state="running", pid=2**22 + 1)
    change(job / "summary.json", step=4, tokens=256, unique_tokens=200, peak_memory_mb=9.0)
    values = compare(tmp_path).entries[0].values
    assert (values["tokens"], values["unique_tokens"], values["peak_memory_mb"]) == (768, None, None)
    assert (values["tokens_per_s"] or 0) > 0
    assert 0 <= (values["data_wait_share"] or 0) <= 1


def test_speeds_that_are_not_measured_alike_are_said(template: Path, tmp_path: Path) -> None:
    jobs = [write_job(template, tmp_path / f"a{seed}", [f"seed={seed}"]) for seed in (0, 1)]
    assert compare(tmp_path).notes == []
    (jobs[1] / "summary.json").unlink()
    (note,) = compare(tmp_path).notes
    assert note.startswith("1 of 2 runs have no summary.json of their end (a1)")


FILES = (
    "config.yaml",
    "status.json",
    "summary.json",
    "metrics.jsonl",
    "manifest.json",
    ".hydra/overrides.yaml",
)


@pytest.fixture(scope="module")
def three(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    for seed, loss in enumerate((4.0, 4.1, 4.3)):
        write_job(template, folder / f"{seed}", [f"seed={seed}"], loss)
    return folder


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1, 2]", b"- a: [\n- b", b"{}\n{]\n{}\n"])
def test_a_damaged_file_is_named_and_its_job_is_not_averaged(
    three: Path, tmp_path: Path, name: str, content: bytes
) -> None:
    folder = Path(shutil.copytree(three, tmp_path / "sweep"))
    (folder / "1" / name).write_bytes(content)
    result = compare(folder)
    assert entry(result, "1").reason.startswith(f"{name} ")
    assert [group.mean for group in result.groups] == [pytest.approx(4.15)]
    assert result.equal_tokens == 768


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_a_missing_file_is_named(three: Path, tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(three, tmp_path / "sweep"))
    (folder / "1" / name).unlink()
    assert entry(compare(folder), "1").reason == f"{name} is missing"


def test_metrics_that_lack_the_end_do_not_pull_the_others_back(three: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(three, tmp_path / "sweep"))
    lines = (folder / "1" / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "1" / "metrics.jsonl").write_bytes(b"".join(lines[:8]) + lines[8][:20])
    result = compare(folder)
    assert result.equal_tokens == 768
    assert entry(result, "1").reason == "metrics.jsonl has no evaluation after step 5, the run is at 12"


@pytest.mark.parametrize("step", [5, 12])
@pytest.mark.parametrize("tokens", [-5, 0])
def test_rows_that_count_back_do_not_pull_the_others_back(
    three: Path, tmp_path: Path, step: int, tokens: int
) -> None:
    folder = Path(shutil.copytree(three, tmp_path / "sweep"))
    file = folder / "1" / "metrics.jsonl"
    rows = [row | ({"tokens": tokens} if row["step"] == step else {}) for row in read_rows(file)]
    file.write_bytes(b"".join(map(encode_row, rows)))
    result = compare(folder)
    assert result.equal_tokens == 768
    said = f"metrics.jsonl is damaged: step {step} is after {tokens} tokens, and a row before it after more"
    assert entry(result, "1").reason.startswith(said)


def test_a_manifest_that_is_lost_is_no_other_data(three: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(three, tmp_path / "sweep"))
    (folder / "1" / "manifest.json").unlink()
    result = compare(folder)
    assert (result.swept, [group.seeds for group in result.groups]) == (["seed"], [3])


def test_a_state_that_is_none_is_a_failure_that_nobody_gave_a_reason_for(three: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(three, tmp_path / "sweep"))
    change(folder / "1" / "status.json", state=5)
    found = entry(compare(folder), "1")
    assert (found.state, found.reason) == ("failed", "error: status.json does not say why")


def test_a_reason_that_is_a_list_is_told_whole(three: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(three, tmp_path / "sweep"))
    error = "UserError: the set is another:\n  - dtype: a, b\n  - tokens: 1, 2\nTo mend it: ..."
    change(folder / "1" / "status.json", state="failed", reason="user", error=error)
    assert entry(compare(folder), "1").reason == "user: the set is another: dtype: a, b; tokens: 1, 2"


def test_a_branch_is_named_and_where_it_began(three: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(three, tmp_path / "sweep"))
    change(folder / "1" / "status.json", parent={"path": "elsewhere", "step": 4})
    assert any("1 of 3 runs began as a branch of another (1 at step 4)" in n for n in compare(folder).notes)


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(FILES), place=st.floats(0, 1), junk=st.binary(max_size=6), cut=st.booleans())
def test_no_damage_is_an_error(three: Path, name: str, place: float, junk: bytes, cut: bool) -> None:
    file = three / "1" / name
    data = file.read_bytes()
    at = int(place * len(data))
    try:
        file.write_bytes(data[:at] + junk + (b"" if cut else data[at + len(junk) :]))
        result = compare(three)
    finally:
        file.write_bytes(data)
    assert {e.path.name for e in result.entries} == {"0", "1", "2"}
    assert {e.path.name for group in result.groups for e in group.entries} >= {"0", "2"}


# Which runs, and how to train the best again


def test_runs_are_found_below_a_folder_and_each_once(template: Path, tmp_path: Path) -> None:
    for name in ("2026-12-01/a", "2026-12-02/b", ".locks/c"):
        write_job(template, tmp_path / "runs" / name, [])
    runs = tmp_path / "runs"
    days = [runs / "2026-12-01" / "a", runs / "2026-12-02" / "b"]
    assert find_runs([runs]) == days
    assert find_runs([days[1], runs]) == [days[1], days[0]]


def test_a_link_that_leads_nowhere_hides_no_run(three: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for name, target in {"0": three / "0", "1": three / "1", "loop": Path("loop"), "gone": Path("x")}.items():
        (tmp_path / "runs" / name).symlink_to(target)
    assert {e.path.name for e in compare(tmp_path / "runs").entries} == {"0", "1"}


@pytest.mark.parametrize(
    ("name", "said"), [("none", "does not exist"), ("file", "is no folder"), ("empty", "no run")]
)
def test_where_there_is_no_run_it_is_said_how_to_name_one(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty" / "sub").mkdir(parents=True)
    with pytest.raises(UserError, match=f"{name}.* {said}.*multirun/NAME"):
        compare(tmp_path / name)


def test_the_command_has_the_run_s_own_words_and_none_of_its_sweep(template: Path, tmp_path: Path) -> None:
    words = [
        "loader=sliding_window", "trainer.max_tokens=1e5", "trainer.max_steps=null", "sweep.name=s",
        "sweep.keys=[seed]", "resume='/a b'", "run.name=x", "data.path='/it''s here'", "seed=1",
    ]  # fmt: skip
    job = write_job(template, tmp_path / "a", ["seed=1"])
    (job / ".hydra" / "overrides.yaml").write_text(json.dumps(words))
    command = compare(tmp_path).entries[0].command
    _, _, *said = shlex.split(command)
    assert said == ["loader=sliding_window", "trainer.max_tokens=1e5", "data.path='/it''s here'", "seed=1"]
    assert not overrides.split(said).multirun
    (job / ".hydra" / "hydra.yaml").write_text(
        "hydra:\n  job: {config_name: mine}\n  runtime:\n    config_sources:\n"
        "    - {path: /my/conf, provider: command-line}\n"
    )
    change(job / "status.json", parent={"path": "x", "step": 4})
    flags = shlex.split(compare(tmp_path).entries[0].command)[2:6]
    assert flags == ["--config-dir", "/my/conf", "--config-name", "mine"]
    assert "resume='/a b'" in shlex.split(compare(tmp_path).entries[0].command)
