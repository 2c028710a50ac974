"""The environment: defaults, values, and one-line complaints that name the variable."""

from __future__ import annotations

import pytest

from gateway.server import check_exposure
from gateway.settings import Settings, SettingsError


def test_defaults_need_no_environment() -> None:
    assert Settings.from_env({}) == Settings()
    assert Settings.from_env({"ONEPASS_PORT": "", "ONEPASS_API_KEYS": " , "}) == Settings()


def test_values() -> None:
    found = Settings.from_env(
        {
            "ONEPASS_HOST": "::1", "ONEPASS_PORT": "0", "ONEPASS_API_KEYS": "a, b,", "ONEPASS_SPILL_AFTER_MS": "0",
            "ONEPASS_GRACE_S": "0.5", "ONEPASS_BACKENDS": "x", "ONEPASS_UPSTREAM_BASE_URL": "http://u",
            "ONEPASS_REQUEST_LOG": "-", "ONEPASS_MAX_BODY_BYTES": "2048", "ONEPASS_LOG_LEVEL": "DEBUG",
            "ONEPASS_ALLOW_OPEN": "yes",
        }
    )  # fmt: skip
    assert found == Settings(
        host="::1", port=0, api_keys=("a", "b"), spill_after_ms=0.0, grace_s=0.5, backends=("x",),
        upstream_configured=True, request_log="-", max_body_bytes=2048, log_level="debug", allow_open=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ONEPASS_PORT", "eighty"),
        ("ONEPASS_PORT", "70000"),
        ("ONEPASS_PORT", "80.5"),
        ("ONEPASS_SPILL_AFTER_MS", "-1"),
        ("ONEPASS_SPILL_AFTER_MS", "nan"),
        ("ONEPASS_GRACE_S", "long"),
        ("ONEPASS_MAX_BODY_BYTES", "1"),
        ("ONEPASS_LOG_LEVEL", "loud"),
        ("ONEPASS_ACCESS_LOG", "perhaps"),
        ("ONEPASS_BACKENDS", "a,a"),
        ("ONEPASS_API_KEYS", "schlüssel"),
    ],
)
def test_complaints_name_the_variable(name: str, value: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_env({name: value})
    assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_an_open_server_stays_on_loopback(host: str) -> None:
    with pytest.raises(SettingsError, match="ONEPASS_API_KEYS"):
        check_exposure(Settings(host=host))
    check_exposure(Settings(host=host, api_keys=("k",)))
    check_exposure(Settings(host=host, allow_open=True))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_key(host: str) -> None:
    check_exposure(Settings(host=host))
