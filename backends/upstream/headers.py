"""Which headers cross the gateway, in both directions. Pure functions over raw header lists.

Hop-by-hop headers never do (RFC 9110, 7.6.1). Towards the upstream, credentials are the gateway's business: what a
client presents here is not meant for there unless the configuration says so. All else passes, unknown names and
duplicates too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache

__all__ = ["Headers", "is_credential", "to_client", "to_upstream"]

Headers = Sequence[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# ``host`` names another server; ``expect`` was answered by this one.
_NOT_FORWARDED = _HOP_BY_HOP | {b"host", b"expect"}
_NEVER_FORWARDED = frozenset((b"cookie", b"cookie2"))
# Names by which servers take secrets: authorization, x-forwarded-authorization, api-key, x-goog-api-key, x-auth-token,
# x-amz-security-token, ocp-apim-subscription-key, x-client-secret.
_CREDENTIAL = re.compile(
    rb"(?:^|[-_])(?:authorization|auth|secrets?|passw(?:or)?d|credentials?|cookie2?)(?:$|[-_])"
    rb"|(?:api|access|subscription|auth|secret|private)[-_]?keys?(?:$|[-_])"
    rb"|(?:^|[-_])(?:token|jwt|session)$"
)


@lru_cache(maxsize=1024)
def is_credential(name: bytes) -> bool:
    """``name`` in lower case."""
    return _CREDENTIAL.search(name) is not None


def to_upstream(headers: Headers, *, api_key: str | None, forward_auth: bool) -> list[tuple[bytes, bytes]]:
    """What the upstream gets: order, case and duplicates as received. ``host`` is left to the HTTP client.

    ``forward_auth`` lets credentials through, except cookies; ``api_key`` becomes a bearer token.
    """
    dropped = _NOT_FORWARDED | _named_by_connection(headers)
    out: list[tuple[bytes, bytes]] = []
    accepts_encoding = False
    for name, value in headers:
        key = name.lower()
        if key in dropped or key in _NEVER_FORWARDED or (not forward_auth and is_credential(key)):
            continue
        accepts_encoding = accepts_encoding or key == b"accept-encoding"
        out.append((name, value))
    if not accepts_encoding:
        # No header means that any coding is welcome; whoever sends none seldom means that.
        out.append((b"accept-encoding", b"identity"))
    if api_key is not None:
        out.append((b"authorization", b"Bearer " + api_key.encode("ascii")))
    return out


def to_client(headers: Headers) -> list[tuple[bytes, bytes]]:
    """What the client gets of the upstream's headers."""
    dropped = _HOP_BY_HOP | _named_by_connection(headers)
    return [(name, value) for name, value in headers if name.lower() not in dropped]


def _named_by_connection(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    named = [value for name, value in headers if name.lower() == b"connection"]
    if not named:
        return frozenset()
    return frozenset(part.strip().lower() for value in named for part in value.split(b",")) - {b"content-length"}
