"""The engine's part of the environment. A bad value is a one-line error that names its variable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

__all__ = ["EngineSettings", "SettingsError"]

T = TypeVar("T")

_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class SettingsError(ValueError):
    """A variable of the environment cannot be used as it stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    model: str
    load_format: str  # auto | dummy
    served_model_names: tuple[str, ...]  # empty: derived from the model
    device: str  # auto | cpu | cuda | cuda:N
    dtype: str  # auto | bfloat16 | float32
    max_model_len: int | None  # None: what the model and the memory allow
    kv_cache_bytes: int | None  # prefix pool; None: from the memory that is free
    max_queue: int  # waiting jobs
    max_queue_tokens: int | None  # waiting tokens; None: so many longest prompts as startup says
    max_queue_s: float  # predicted seconds of waiting work
    tenant_max_queue: int | None  # waiting jobs of one tenant; None: no bound of its own
    tenant_weights: Mapping[str, float]  # shares of the engine under contention; 1 where absent
    scheduler: str  # srjf | sjf | fcfs
    fairness: float  # λ: seconds of remaining time that a second of waiting outweighs
    default_deadline_s: float | None
    control_tokens_in_content: bool
    profile_cache: Path | None  # directory that keeps fitted job times

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> EngineSettings:
        def read(name: str, default: T, parse: Callable[[str], T], what: str) -> T:
            text = env.get(name, "").strip()
            if not text:
                return default
            try:
                return parse(text)
            except ValueError:
                raise SettingsError(f"{name}={text!r}: expected {what}") from None

        def one_of(*names: str) -> Callable[[str], str]:
            def parse(text: str) -> str:
                if text.lower() not in names:
                    raise ValueError
                return text.lower()

            return parse

        return cls(
            model=env.get("ONEPASS_MODEL", "").strip() or "builtin",
            load_format=read("ONEPASS_LOAD_FORMAT", "auto", one_of("auto", "dummy"), "auto or dummy"),
            served_model_names=tuple(
                n.strip() for n in env.get("ONEPASS_SERVED_MODEL_NAME", "").split(",") if n.strip()
            ),
            device=read("ONEPASS_DEVICE", "auto", _device, "auto, cpu, cuda or cuda:N"),
            dtype=read("ONEPASS_DTYPE", "auto", one_of("auto", "bfloat16", "float32"), "auto, bfloat16 or float32"),
            max_model_len=read("ONEPASS_MAX_MODEL_LEN", None, _positive_int, "a positive number of tokens"),
            kv_cache_bytes=read("ONEPASS_KV_CACHE_BYTES", None, _size, "a size such as 2G or 500M"),
            max_queue=read("ONEPASS_MAX_QUEUE", 4096, _positive_int, "a positive number of jobs"),
            max_queue_tokens=read("ONEPASS_MAX_QUEUE_TOKENS", None, _positive_int, "a positive number of tokens"),
            max_queue_s=read("ONEPASS_MAX_QUEUE_SECONDS", 600.0, _positive, "a positive number of seconds"),
            tenant_max_queue=read("ONEPASS_TENANT_MAX_QUEUE", None, _positive_int, "a positive number of jobs"),
            tenant_weights=read(
                "ONEPASS_TENANT_WEIGHTS",
                {},
                _weights,
                "positive numbers, one for each of ONEPASS_API_KEYS, such as 3,1",
            ),
            scheduler=read("ONEPASS_SCHEDULER", "srjf", one_of("srjf", "sjf", "fcfs"), "srjf, sjf or fcfs"),
            fairness=read("ONEPASS_FAIRNESS", 0.1, _non_negative, "a number of at least 0"),
            default_deadline_s=read(
                "ONEPASS_DEADLINE_MS", None, lambda t: _positive_int(t) / 1000.0, "a positive number of milliseconds"
            ),
            control_tokens_in_content=read(
                "ONEPASS_CONTROL_TOKENS_IN_CONTENT", "text", one_of("text", "parse"), "text or parse"
            )
            == "parse",
            profile_cache=_profile_cache(env),
        )


def _profile_cache(env: Mapping[str, str]) -> Path | None:
    named = env.get("ONEPASS_PROFILE_CACHE", "").strip()
    if named == "off":
        return None
    if named:
        return Path(named).expanduser()
    if base := env.get("XDG_CACHE_HOME", "").strip():
        return Path(base) / "onepass"
    home = env.get("HOME", "").strip()
    return Path(home) / ".cache" / "onepass" if home else None


def _device(text: str) -> str:
    text = text.lower()
    if text in ("auto", "cpu", "cuda") or (text.startswith("cuda:") and text[5:].isdigit()):
        return text
    raise ValueError


def _positive_int(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise ValueError
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def _weights(text: str) -> dict[str, float]:
    """Tenants are named by the place of their key: key-1, key-2, ..."""
    return {f"key-{i}": _positive(part) for i, part in enumerate(text.split(","), 1)}


def _non_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError
    return value


def _size(text: str) -> int:
    upper = text.upper().removesuffix("IB").removesuffix("B")
    unit = upper[-1:] if upper[-1:] in ("K", "M", "G", "T") else ""
    value = float(upper.removesuffix(unit)) * _SIZES[unit]
    if not 0 <= value < float("inf"):
        raise ValueError
    return int(value)
