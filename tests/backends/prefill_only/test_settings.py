"""The engine's variables."""

from __future__ import annotations

import pytest

from backends.prefill_only.settings import EngineSettings, SettingsError


def test_defaults_and_empty_values() -> None:
    assert EngineSettings.from_env({}) == EngineSettings.from_env({"ONEPASS_MODEL": " ", "ONEPASS_KV_CACHE_BYTES": ""})
    assert EngineSettings.from_env({}).model == "builtin"


def test_sizes_names_and_weights() -> None:
    settings = EngineSettings.from_env(
        {
            "ONEPASS_KV_CACHE_BYTES": "1.5GiB",
            "ONEPASS_SERVED_MODEL_NAME": "a, b,,",
            "ONEPASS_TENANT_WEIGHTS": "3,0.5",
            "ONEPASS_DEADLINE_MS": "250",
            "ONEPASS_DEVICE": "CUDA:1",
        }
    )
    assert settings.kv_cache_bytes == 3 << 29 and settings.served_model_names == ("a", "b")
    assert settings.tenant_weights == {"key-1": 3.0, "key-2": 0.5}
    assert settings.default_deadline_s == 0.25 and settings.device == "cuda:1"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ONEPASS_DTYPE", "int3"),
        ("ONEPASS_DEVICE", "tpu"),
        ("ONEPASS_LOAD_FORMAT", "pickle"),
        ("ONEPASS_SCHEDULER", "random"),
        ("ONEPASS_FAIRNESS", "-1"),
        ("ONEPASS_FAIRNESS", "nan"),
        ("ONEPASS_MAX_QUEUE", "0"),
        ("ONEPASS_MAX_QUEUE_SECONDS", "inf"),
        ("ONEPASS_TENANT_WEIGHTS", "1,0"),
        ("ONEPASS_MAX_MODEL_LEN", "8k"),
        ("ONEPASS_KV_CACHE_BYTES", "lots"),
        ("ONEPASS_DEADLINE_MS", "soon"),
    ],
)
def test_a_bad_value_is_one_line_that_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(SettingsError) as caught:
        EngineSettings.from_env({name: value})
    assert name in str(caught.value) and value in str(caught.value) and "\n" not in str(caught.value)
