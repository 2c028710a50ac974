"""Where a request goes: the client's raw path and query laid onto the configured base URL. Nothing is decoded."""

from __future__ import annotations

import re

from yarl import URL

__all__ = ["Target"]

_VERSION = re.compile(r"v\d+[a-z0-9]*")


class Target:
    """Maps request paths.

    A base path with a version segment (``/v1``, ``/openai/v1``, ``/api/v3``, ``/v1beta/openai``) stands for the
    client's ``/v1``, as it does in the OpenAI SDK's ``base_url``; other paths (``/tokenize``, ``/health``) go beside
    it, to where the base path was before that segment. A base path without one is a plain prefix.
    """

    def __init__(self, base_url: URL) -> None:
        self._scheme = base_url.scheme
        self._authority = base_url.raw_authority
        path = base_url.raw_path.rstrip("/")
        segments = path.split("/")
        version = next((i for i, segment in enumerate(segments) if _VERSION.fullmatch(segment)), None)
        self._versioned = path if version is not None else f"{path}/v1"
        self._root = path if version is None else "/".join(segments[:version])

    def url(self, raw_path: bytes, raw_query: bytes) -> URL:
        """Raises ValueError for a path that does not start with a slash."""
        path = _text(raw_path)
        if not path.startswith("/"):
            raise ValueError("the request's path does not start with a slash")
        versioned = path == "/v1" or path.startswith("/v1/")
        path = self._versioned + path[len("/v1") :] if versioned else self._root + path
        return URL.build(
            scheme=self._scheme, authority=self._authority, path=path, query_string=_text(raw_query), encoded=True
        )


def _text(raw: bytes) -> str:
    """aiohttp writes the request line as UTF-8, so bytes that are UTF-8 stay what they are."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")
