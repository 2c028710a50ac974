"""The upstream's part of the environment. A bad value is a one-line error that names its variable."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from yarl import URL

__all__ = ["SettingsError", "UpstreamSettings"]

BASE_URL = "ONEPASS_UPSTREAM_BASE_URL"
API_KEY = "ONEPASS_UPSTREAM_API_KEY"
FORWARD_AUTH = "ONEPASS_UPSTREAM_FORWARD_AUTH"
TRUST_ENV = "ONEPASS_UPSTREAM_TRUST_ENV"
CONNECT_TIMEOUT = "ONEPASS_UPSTREAM_CONNECT_TIMEOUT_S"
HEAD_TIMEOUT = "ONEPASS_UPSTREAM_TIMEOUT_S"

CONNECT_TIMEOUT_S = 5.0
HEAD_TIMEOUT_S = 600.0


class SettingsError(ValueError):
    """A variable of the environment cannot be used as it stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamSettings:
    base_url: URL
    api_key: str | None = None
    forward_auth: bool = False  # the client's credentials go on to the upstream
    trust_env: bool = False  # HTTP_PROXY and its kin are obeyed
    connect_timeout_s: float = CONNECT_TIMEOUT_S  # name lookup, TCP and TLS together
    head_timeout_s: float = HEAD_TIMEOUT_S  # from the request's start to the answer's head; bodies have no limit

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> UpstreamSettings:
        """Raises SettingsError. Empty values count as unset."""
        api_key = _text(env, API_KEY)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise SettingsError(f"{API_KEY} must be printable ASCII: it travels in an HTTP header")
        forward_auth = _flag(env, FORWARD_AUTH)
        if forward_auth and api_key is not None:
            raise SettingsError(f"{FORWARD_AUTH} and {API_KEY} exclude each other: whose key should the upstream see?")
        if forward_auth and _text(env, "ONEPASS_API_KEYS") is not None:
            raise SettingsError(f"{FORWARD_AUTH} and ONEPASS_API_KEYS exclude each other: the gateway's keys stay here")
        return cls(
            base_url=_base_url(env),
            api_key=api_key,
            forward_auth=forward_auth,
            trust_env=_flag(env, TRUST_ENV),
            connect_timeout_s=_seconds(env, CONNECT_TIMEOUT, CONNECT_TIMEOUT_S),
            head_timeout_s=_seconds(env, HEAD_TIMEOUT, HEAD_TIMEOUT_S),
        )


def _text(env: Mapping[str, str], name: str) -> str | None:
    return env.get(name, "").strip() or None


def _base_url(env: Mapping[str, str]) -> URL:
    text = _text(env, BASE_URL)
    if text is None:
        raise SettingsError(f"{BASE_URL} is not set: it names the server to pass requests on to")
    example = "such as http://127.0.0.1:9000/v1"
    try:
        url = URL(text, encoded=True)
        port = url.port
    except ValueError:
        raise SettingsError(f"{BASE_URL} must be a URL {example}") from None
    if url.scheme not in ("http", "https") or not url.raw_host or port == 0:
        raise SettingsError(f"{BASE_URL} must be an http or https URL {example}")
    if url.raw_user is not None or url.raw_password is not None:
        raise SettingsError(f"{BASE_URL} must not contain credentials; use {API_KEY}")
    if "?" in text or "#" in text:
        raise SettingsError(f"{BASE_URL} must not contain a query or a fragment")
    if any(c <= " " or c == "\x7f" for c in text):
        raise SettingsError(f"{BASE_URL} must not contain white space")
    return url


def _flag(env: Mapping[str, str], name: str) -> bool:
    value = (_text(env, name) or "0").lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("0", "false", "no", "off"):
        return False
    raise SettingsError(f"{name} must be 0 or 1, not {value!r}")


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = _text(env, name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise SettingsError(f"{name} must be a number of seconds above 0, not {text!r}")
    return value
