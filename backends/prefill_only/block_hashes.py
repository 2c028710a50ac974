"""Names for prefixes: a hash chain over token blocks.

Block i's hash covers the salt and every token up to its end, so equal hashes mean equal prefixes of equal owners, and a
prefix cached for one tenant cannot even be named by another.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

__all__ = ["block_hashes", "salt_of"]


def salt_of(model: str, tenant: str, cache_salt: str) -> bytes:
    """The owner part of the chain. A client's salt narrows its tenant's cache; it cannot widen or leave it."""
    h = blake2b(digest_size=16)
    for part in (model, tenant, cache_salt):
        data = part.encode("utf-8", "surrogatepass")
        h.update(len(data).to_bytes(8, "little"))
        h.update(data)
    return h.digest()


def block_hashes(token_ids: Sequence[int], block_tokens: int, salt: bytes) -> list[bytes]:
    """One 16-byte hash for each whole block of ``token_ids``."""
    data = array("i", token_ids).tobytes()
    width = block_tokens * array("i").itemsize
    chain, hashes = salt, []
    for start in range(0, len(token_ids) // block_tokens * width, width):
        chain = blake2b(data[start : start + width], digest_size=16, key=chain).digest()
        hashes.append(chain)
    return hashes
