"""A run that has come to an end, and what became of its data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.config_loaders import ContrastiveRowsConfig
from harness.errors import UserError
from harness.run_files.finished import Finished
from tests.helpers_runs import tiny_config


def test_a_set_that_is_gone_is_named_with_the_words_that_bring_it_back(tmp_path: Path) -> None:
    nothing: Any = None
    config = tiny_config(tmp_path / "gone", loader=ContrastiveRowsConfig(seq_len=16, batch_size=4))
    with pytest.raises(UserError, match=r"gone.* does not exist.* set=FOLDER.* loader=contrastive_rows"):
        _ = Finished(nothing, config, nothing).set_directory
