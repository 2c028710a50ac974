"""Starting: what is measured once is kept, for the same model on the same machine alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from backends.prefill_only import startup
from backends.prefill_only.metrics import EngineMetrics
from backends.prefill_only.profile_run import Profile
from backends.prefill_only.settings import EngineSettings

SMALL = {
    "ONEPASS_LOAD_FORMAT": "dummy",
    "ONEPASS_DTYPE": "float32",
    "ONEPASS_DEVICE": "cpu",
    "ONEPASS_MAX_MODEL_LEN": "400",
    "ONEPASS_KV_CACHE_BYTES": "8M",
}


def test_job_times_are_kept_between_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for unneeded in ("warm_up", "_check_company"):
        monkeypatch.setattr(startup, unneeded, lambda *_: None)
    monkeypatch.setattr(startup, "choose_chunk_rows", lambda *_: 512)  # a busy machine may choose another each time
    runs = []
    measured = Profile([(16, 0, 0.01), (64, 0, 0.03), (300, 0, 0.14)], [], 0.01, complete=True)
    monkeypatch.setattr(startup, "profile_run", lambda *_, **__: (runs.append(1), measured)[1])

    def start(settings: EngineSettings) -> dict[str, float]:
        started = startup.start_engine(settings, EngineMetrics(), lambda *_: None)
        stats = dict(started.engine.stats())
        started.engine.stop(10.0)
        assert started.memory.max_model_len == 400 and started.memory.limited_by == "setting"
        return stats

    settings = EngineSettings.from_env({**SMALL, "ONEPASS_PROFILE_CACHE": str(tmp_path / "cache")})
    first, again = start(settings), start(settings)
    assert len(runs) == 1 and first["job_time_seconds_per_token"] == again["job_time_seconds_per_token"]
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_text("{}")
    start(settings)
    assert len(runs) == 2
    start(replace(settings, profile_cache=None))
    assert len(runs) == 3


def test_a_cache_that_leaves_no_room_is_refused() -> None:
    settings = EngineSettings.from_env({**SMALL, "ONEPASS_KV_CACHE_BYTES": "900T", "ONEPASS_PROFILE_CACHE": "off"})
    with pytest.raises(MemoryError, match="ONEPASS_KV_CACHE_BYTES"):
        startup.start_engine(settings, EngineMetrics(), lambda *_: None)


def test_where_job_times_are_kept() -> None:
    def where(**env: str) -> Path | None:
        return EngineSettings.from_env(env).profile_cache

    assert where(HOME="/home/me") == Path("/home/me/.cache/onepass")
    assert where(HOME="/home/me", XDG_CACHE_HOME="/c") == Path("/c/onepass")
    assert where(HOME="/home/me", ONEPASS_PROFILE_CACHE="off") is None
    assert where() is None
