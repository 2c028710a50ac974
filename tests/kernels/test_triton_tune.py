"""Tuning, as far as it goes without a GPU: what it would write, and which candidates it would not time."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels import config_table, tune


def test_the_table_is_what_tuning_would_write() -> None:
    text = tune.render(
        config_table.ORIGIN, config_table.ATTENTION, config_table.MATMUL, config_table.QUANTISED_MATMUL
    )  # fmt: skip
    assert text == Path(config_table.__file__).read_text()


def test_without_a_gpu_tuning_refuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tune.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_:
        tune.main([])
    assert exit_.value.code != 0
    assert "there is none" in capsys.readouterr().err


def test_the_fastest_candidate_that_may_ship_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    table: dict = {(90, "16"): (1, 1)}
    seconds = {(2, 1): 5.0, (3, 1): 1.0, (4, 1): 2.0}
    monkeypatch.setattr(tune, "_may_ship", lambda *_: table[90, "16"] != (3, 1))
    monkeypatch.setattr(tune, "median_seconds", lambda *_: seconds[table[90, "16"]])
    tune.fastest("op", table, (90, "16"), seconds, lambda: None, tune.torch.bfloat16, tune.torch.device("cpu"))
    assert table == {(90, "16"): (4, 1)}
    monkeypatch.setattr(tune, "_may_ship", lambda *_: False)
    tune.fastest("op", table, (90, "16"), seconds, lambda: None, tune.torch.bfloat16, tune.torch.device("cpu"))
    assert table == {(90, "16"): (4, 1)}, "the row that was there stays"
