"""Server-sent events as OpenAI frames them: one ``data:`` line an event, a blank line, ``[DONE]`` at the end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

__all__ = ["CONTENT_TYPE", "DONE", "HEADERS", "event", "stream"]

CONTENT_TYPE = "text/event-stream; charset=utf-8"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def event(payload: dict[str, Any]) -> bytes:
    """JSON escapes line breaks, so a payload is always one line."""
    return b"data: " + _encoder.encode(payload) + b"\n\n"


def stream(payloads: Iterable[dict[str, Any]]) -> bytes:
    return b"".join([event(payload) for payload in payloads]) + DONE
