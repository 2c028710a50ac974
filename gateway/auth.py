"""Who is asking: API keys to a tenant id. It holds hashes, never logs or forwards a key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence

from gateway.errors import Unauthorized

__all__ = ["Authenticator"]


class Authenticator:
    """With no keys the server is open and everybody is the same tenant, ``""``."""

    def __init__(self, keys: Sequence[str]) -> None:
        # Named by place: an id derived from the key would carry something of it into logs.
        self._digests = [(_digest(key.encode()), f"key-{i}") for i, key in enumerate(keys, 1)]

    @property
    def open(self) -> bool:
        return not self._digests

    def tenant(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """The tenant id of the presented key. Raises Unauthorized. Every key is compared, in constant time."""
        if not self._digests:
            return ""
        presented = _presented_key(headers)
        if not presented:
            raise Unauthorized("No API key was provided; send it as 'Authorization: Bearer <key>'.")
        digest = _digest(presented)
        found = ""
        for known, tenant in self._digests:
            if hmac.compare_digest(known, digest):
                found = tenant
        if not found:
            raise Unauthorized("The API key provided is not valid here.", code="invalid_api_key")
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _presented_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    other = b""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, credentials = value.strip().partition(b" ")
            if scheme.lower() == b"bearer" and credentials.strip():
                return credentials.strip()
        elif name in (b"api-key", b"x-api-key") and not other:
            other = value.strip()
    return other
