from __future__ import annotations

import pytest

from backends.upstream import UpstreamBackend, factory
from backends.upstream.settings import SettingsError, UpstreamSettings

BASE = {"ONEPASS_UPSTREAM_BASE_URL": "http://127.0.0.1:9000/v1"}


def test_defaults() -> None:
    settings = UpstreamSettings.from_env(BASE)
    assert str(settings.base_url) == "http://127.0.0.1:9000/v1"
    assert settings.api_key is None and not settings.forward_auth and not settings.trust_env
    assert settings.connect_timeout_s == 5.0 and settings.head_timeout_s == 600.0


def test_everything_set() -> None:
    settings = UpstreamSettings.from_env(
        {
            "ONEPASS_UPSTREAM_BASE_URL": " https://h.example ",
            "ONEPASS_UPSTREAM_API_KEY": "sk-1",
            "ONEPASS_UPSTREAM_TRUST_ENV": "yes",
            "ONEPASS_UPSTREAM_CONNECT_TIMEOUT_S": "0.5",
            "ONEPASS_UPSTREAM_TIMEOUT_S": "30",
        }
    )
    assert settings.api_key == "sk-1" and settings.trust_env
    assert (settings.connect_timeout_s, settings.head_timeout_s) == (0.5, 30.0)


def test_empty_counts_as_unset() -> None:
    env = {**BASE, "ONEPASS_UPSTREAM_API_KEY": " ", "ONEPASS_UPSTREAM_TIMEOUT_S": "", "ONEPASS_API_KEYS": ""}
    assert UpstreamSettings.from_env({**env, "ONEPASS_UPSTREAM_FORWARD_AUTH": "1"}).forward_auth


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"ONEPASS_UPSTREAM_BASE_URL": ""}, "ONEPASS_UPSTREAM_BASE_URL"),
        ({"ONEPASS_UPSTREAM_BASE_URL": "127.0.0.1:9000"}, "ONEPASS_UPSTREAM_BASE_URL"),
        ({"ONEPASS_UPSTREAM_BASE_URL": "ftp://h/v1"}, "ONEPASS_UPSTREAM_BASE_URL"),
        ({"ONEPASS_UPSTREAM_BASE_URL": "http:///v1"}, "ONEPASS_UPSTREAM_BASE_URL"),
        ({"ONEPASS_UPSTREAM_BASE_URL": "http://h:99999/v1"}, "ONEPASS_UPSTREAM_BASE_URL"),
        ({"ONEPASS_UPSTREAM_BASE_URL": "http://h:x/v1"}, "ONEPASS_UPSTREAM_BASE_URL"),
        ({"ONEPASS_UPSTREAM_BASE_URL": "http://h/v1?key=1"}, "ONEPASS_UPSTREAM_BASE_URL"),
        ({"ONEPASS_UPSTREAM_BASE_URL": "http://h/v1#part"}, "ONEPASS_UPSTREAM_BASE_URL"),
        ({"ONEPASS_UPSTREAM_BASE_URL": "http://h/v 1"}, "ONEPASS_UPSTREAM_BASE_URL"),
        ({"ONEPASS_UPSTREAM_BASE_URL": "http://me:secret@h/v1"}, "ONEPASS_UPSTREAM_API_KEY"),
        ({"ONEPASS_UPSTREAM_API_KEY": "ключ"}, "ONEPASS_UPSTREAM_API_KEY"),
        ({"ONEPASS_UPSTREAM_API_KEY": "a\nb"}, "ONEPASS_UPSTREAM_API_KEY"),
        ({"ONEPASS_UPSTREAM_FORWARD_AUTH": "maybe"}, "ONEPASS_UPSTREAM_FORWARD_AUTH"),
        ({"ONEPASS_UPSTREAM_FORWARD_AUTH": "1", "ONEPASS_UPSTREAM_API_KEY": "k"}, "ONEPASS_UPSTREAM_FORWARD_AUTH"),
        ({"ONEPASS_UPSTREAM_FORWARD_AUTH": "1", "ONEPASS_API_KEYS": "k"}, "ONEPASS_API_KEYS"),
        ({"ONEPASS_UPSTREAM_CONNECT_TIMEOUT_S": "0"}, "ONEPASS_UPSTREAM_CONNECT_TIMEOUT_S"),
        ({"ONEPASS_UPSTREAM_CONNECT_TIMEOUT_S": "soon"}, "ONEPASS_UPSTREAM_CONNECT_TIMEOUT_S"),
        ({"ONEPASS_UPSTREAM_TIMEOUT_S": "-1"}, "ONEPASS_UPSTREAM_TIMEOUT_S"),
        ({"ONEPASS_UPSTREAM_TIMEOUT_S": "nan"}, "ONEPASS_UPSTREAM_TIMEOUT_S"),
        ({"ONEPASS_UPSTREAM_TIMEOUT_S": "inf"}, "ONEPASS_UPSTREAM_TIMEOUT_S"),
    ],
)
def test_bad_values_are_one_line_that_names_the_variable(env: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError) as caught:
        UpstreamSettings.from_env({**BASE, **env})
    message = str(caught.value)
    assert named in message and "\n" not in message
    assert "secret" not in message


def test_the_factory_checks_and_builds() -> None:
    backend = factory(BASE)
    assert isinstance(backend, UpstreamBackend) and backend.name == "upstream"
    assert not backend.status().ready and backend.status().alive
    with pytest.raises(ValueError, match="ONEPASS_UPSTREAM_BASE_URL"):
        factory({})
