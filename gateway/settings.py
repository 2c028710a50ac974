"""The gateway's own settings, read once from the environment.

Backends read their variables themselves from the same mapping; nothing here knows theirs, save whether an upstream is
named at all. A bad value is a :class:`SettingsError` whose one-line message names the variable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Settings", "SettingsError"]

_LOG_LEVELS = ("debug", "info", "warning", "error")


class SettingsError(Exception):
    """A configuration that cannot be used; the message is one line and names the variable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    host: str = "127.0.0.1"
    port: int = 8000
    backends: tuple[str, ...] = ("prefill_only", "upstream")
    upstream_configured: bool = False
    api_keys: tuple[str, ...] = ()
    allow_open: bool = False  # without keys beyond loopback
    max_body_bytes: int = 64 * 1024 * 1024
    spill_after_ms: float | None = None
    grace_s: float = 8.0
    log_level: str = "info"
    access_log: bool = False
    request_log: str | None = None

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Settings:
        """Raises SettingsError. Empty values count as unset."""
        default = cls()
        backends = _names(env, "ONEPASS_BACKENDS") or default.backends
        if len(set(backends)) != len(backends):
            raise SettingsError("ONEPASS_BACKENDS names a backend twice")
        level = (_text(env, "ONEPASS_LOG_LEVEL") or default.log_level).lower()
        if level not in _LOG_LEVELS:
            raise SettingsError(f"ONEPASS_LOG_LEVEL must be one of {', '.join(_LOG_LEVELS)}, not {level!r}")
        keys = _names(env, "ONEPASS_API_KEYS")
        if any(not key.isascii() for key in keys):
            raise SettingsError("ONEPASS_API_KEYS must be ASCII: they travel in an HTTP header")
        return cls(
            host=_text(env, "ONEPASS_HOST") or default.host,
            port=int(_number(env, "ONEPASS_PORT", default.port, low=0, high=65535, whole=True)),
            backends=backends,
            upstream_configured=_text(env, "ONEPASS_UPSTREAM_BASE_URL") is not None,
            api_keys=keys,
            allow_open=_flag(env, "ONEPASS_ALLOW_OPEN"),
            max_body_bytes=int(_number(env, "ONEPASS_MAX_BODY_BYTES", default.max_body_bytes, low=1024, whole=True)),
            spill_after_ms=_number(env, "ONEPASS_SPILL_AFTER_MS", -1.0, low=0.0)
            if _text(env, "ONEPASS_SPILL_AFTER_MS") is not None
            else None,
            grace_s=_number(env, "ONEPASS_GRACE_S", default.grace_s, low=0.0, high=3600.0),
            log_level=level,
            access_log=_flag(env, "ONEPASS_ACCESS_LOG"),
            request_log=_text(env, "ONEPASS_REQUEST_LOG"),
        )


def _text(env: Mapping[str, str], name: str) -> str | None:
    value = env.get(name, "").strip()
    return value or None


def _names(env: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in env.get(name, "").split(",") if part.strip())


def _flag(env: Mapping[str, str], name: str) -> bool:
    value = (_text(env, name) or "0").lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("0", "false", "no", "off"):
        return False
    raise SettingsError(f"{name} must be 0 or 1, not {value!r}")


def _number(
    env: Mapping[str, str], name: str, default: float, *, low: float, high: float = float("inf"), whole: bool = False
) -> float:
    text = _text(env, name)
    if text is None:
        return default
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        raise SettingsError(f"{name} must be {'a whole number' if whole else 'a number'}, not {text!r}") from None
    if not low <= value <= high:
        bound = f"at least {low:g}" if high == float("inf") else f"between {low:g} and {high:g}"
        raise SettingsError(f"{name} must be {bound}, not {text}")
    return value
