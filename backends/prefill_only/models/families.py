"""From a checkpoint's ``config.json`` to a :class:`ModelSpec`."""

from __future__ import annotations

__all__ = ["UnsupportedModel"]


class UnsupportedModel(Exception):
    """The message says what was asked for and lists what is supported."""
