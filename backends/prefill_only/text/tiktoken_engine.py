"""tiktoken as an engine: several times the library's speed, where a model's byte pairs can be expressed in it exactly.

tiktoken merges the adjacent pair whose *result* has the lowest id; the library follows a list of pairs. The two agree
when ids rise along the list and every token's own bytes merge to that token: bytes that make up a token then reach its
last pair in the same steps wherever they stand, so no other pair with that result is ever adjacent. Both conditions are
checked, and the ids of a collection of awkward texts compared, before the engine is used.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import tiktoken
from tokenizers import Tokenizer as LibraryTokenizer

from backends.prefill_only.text.added_tokens import AddedTokenFinder
from backends.prefill_only.text.awkward_texts import AWKWARD_TEXTS
from backends.prefill_only.text.boundaries import chunks
from backends.prefill_only.text.definition import AddedToken
from backends.prefill_only.text.engine import Engine, Piece
from backends.prefill_only.text.library_engine import LibraryEngine
from backends.prefill_only.text.pretokenizers import known_pattern, seen_differently
from backends.prefill_only.text.vocabulary import BYTE_OF_CHAR

__all__ = ["NotExpressible", "TiktokenEngine"]

_CHUNK_CHARS = 1 << 17  # the interpreter's lock is held while a chunk's ids become a list: a few milliseconds
_LONG_SPACE_CHARS = 50_000  # tiktoken's regular expressions run out of stack at about a million
_NEVER_IN_UTF8 = frozenset([0xC0, 0xC1, *range(0xF5, 0x100)])


class NotExpressible(Exception):
    """This tokenizer's ids cannot be had from tiktoken; the message says why."""


class TiktokenEngine(Engine):
    """``fallback`` encodes what tiktoken cannot: text with bytes that are not in the vocabulary, endless blank space.

    Raises :class:`NotExpressible`.
    """

    def __init__(
        self,
        spec: dict[str, Any],
        library: LibraryTokenizer,
        added: Sequence[AddedToken],
        control: Sequence[AddedToken],
        fallback: LibraryEngine,
    ) -> None:
        pattern = _pattern(spec, added)
        ranks = _ranks(spec, added)
        _check_reachable(spec, library, ranks)
        missing = [byte for byte in range(256) if bytes([byte]) not in ranks and byte not in _NEVER_IN_UTF8]
        beyond = max([*ranks.values(), 0]) + 1
        every_byte = {bytes([byte]): beyond + byte for byte in range(256)}
        self._core = tiktoken.Encoding(
            "model", pat_str=pattern, mergeable_ranks={**every_byte, **ranks}, special_tokens={}
        )._core_bpe
        self._nfc = spec.get("normalizer") is not None
        foreign = [*_chars_with_bytes(missing), *seen_differently(pattern)]
        if self._nfc:
            foreign += _reordered_differently(library)
        self._foreign = _any_in(foreign)
        controls = {token.id for token in control}
        self._added = AddedTokenFinder(added)
        self._uncontrolled = AddedTokenFinder([token for token in added if token.id not in controls])
        self._fallback = fallback
        self._check_texts(library)

    def encode(self, text: str) -> list[int]:
        return self._encode_pieces(self._added.pieces(text))

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._encode_pieces(self._uncontrolled.pieces(piece))
        return ids

    def _encode_pieces(self, pieces: Iterable[Piece]) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += self._encode_text(piece)
        return ids

    def _encode_text(self, text: str) -> list[int]:
        """Text without added tokens."""
        if len(text) <= _CHUNK_CHARS:
            return self._encode_chunk(text)
        ids: list[int] = []
        for chunk in chunks(text, _CHUNK_CHARS):
            ids += self._encode_chunk(chunk)
        return ids

    def _encode_chunk(self, text: str) -> list[int]:
        if (self._foreign is not None and self._foreign.search(text)) or _has_long_space(text):
            return self._fallback.encode_pieces([text])
        if self._nfc and not unicodedata.is_normalized("NFC", text):
            text = unicodedata.normalize("NFC", text)
        try:
            ids: list[int] = self._core.encode_ordinary(text)
        except BaseException as error:
            # A Rust panic is no Exception; the known one is a pattern that ran out of stack on one enormous piece.
            if type(error).__name__ != "PanicException":
                raise
            return self._fallback.encode_pieces([text])
        return ids

    def _check_texts(self, library: LibraryTokenizer) -> None:
        wanted = library.encode_batch_fast(list(AWKWARD_TEXTS), add_special_tokens=False)
        for text, encoding in zip(AWKWARD_TEXTS, wanted, strict=True):
            if self.encode(text) != encoding.ids:
                raise NotExpressible(f"tiktoken cuts {text[:40]!r} differently")


def _pattern(spec: dict[str, Any], added: Sequence[AddedToken]) -> str:
    model = spec["model"]
    if model.get("type") != "BPE":
        raise NotExpressible(f"the model is {model.get('type')}, not byte pairs")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(option):
            raise NotExpressible(f"the model uses {option}")
    if spec.get("normalizer") not in (None, {"type": "NFC"}):
        raise NotExpressible("the text is normalised")
    if not all(token.plain for token in added):
        raise NotExpressible("an added token strips the space around it or matches normalised text")
    pattern = known_pattern(spec.get("pre_tokenizer"))
    if pattern is None:
        raise NotExpressible("the pre-tokenizer is not one whose pattern is known")
    return pattern


def _ranks(spec: dict[str, Any], added: Sequence[AddedToken]) -> dict[bytes, int]:
    """Bytes to id of every byte and merged token. Raises if merging by id is not merging by list."""
    vocab: dict[str, int] = spec["model"]["vocab"]
    merged, last = set(), -1
    for merge in spec["model"]["merges"]:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        token_id = vocab[left + right]
        if token_id < last:
            raise NotExpressible("the merges are not in the order of their tokens' ids")
        merged.add(token_id)
        last = token_id
    spelled_whole = {token.text for token in added}
    ranks = {}
    for text, token_id in vocab.items():
        if text in spelled_whole and token_id not in merged:
            continue
        if token_id not in merged and len(text) > 1:
            raise NotExpressible(f"token {token_id} is no byte and no merge makes it")
        try:
            ranks[bytes([BYTE_OF_CHAR[char] for char in text])] = token_id
        except KeyError as error:
            raise NotExpressible(f"token {token_id} is not spelled in the byte alphabet") from error
    return ranks


def _check_reachable(spec: dict[str, Any], library: LibraryTokenizer, ranks: dict[bytes, int]) -> None:
    """Every token's own bytes must merge to it, or else every pair that makes it up must be in the list."""
    bare = LibraryTokenizer(library.model)  # shares the vocabulary; no added tokens, the text as one piece
    char_of = {byte: char for char, byte in BYTE_OF_CHAR.items()}
    spellings = {raw: "".join(char_of[byte] for byte in raw) for raw in ranks}
    model, whole_first = library.model, library.model.ignore_merges
    model.ignore_merges = False
    try:
        encoded = bare.encode_batch_fast(list(spellings.values()), add_special_tokens=False)
    finally:
        model.ignore_merges = whole_first
    apart = [raw for raw, encoding in zip(spellings, encoded, strict=True) if encoding.ids != [ranks[raw]]]
    if not apart:
        return
    pairs = {tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in spec["model"]["merges"]}
    for raw in apart:
        for cut in range(1, len(raw)):
            left, right = raw[:cut], raw[cut:]
            if left in ranks and right in ranks and (spellings[left], spellings[right]) not in pairs:
                raise NotExpressible(f"token {ranks[raw]} is not what its own bytes merge to")


def _chars_with_bytes(missing: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of characters whose UTF-8 has a byte that the vocabulary lacks."""
    ranges = []
    for byte in missing:
        if byte < 0x80:
            ranges.append((byte, byte))
        elif byte < 0xC0:
            raise NotExpressible(f"the vocabulary lacks the byte {byte:#04x}")
        elif byte < 0xE0:
            ranges.append(((byte & 0x1F) << 6, (byte & 0x1F) << 6 | 0x3F))
        elif byte < 0xF0:
            ranges.append(((byte & 0x0F) << 12, (byte & 0x0F) << 12 | 0xFFF))
        else:
            ranges.append(((byte & 0x07) << 18, min((byte & 0x07) << 18 | 0x3FFFF, 0x10FFFF)))
    return ranges


def _reordered_differently(library: LibraryTokenizer) -> list[tuple[int, int]]:
    """Marks that this Python and the library, which knows another version of Unicode, put in different order."""
    normalize = library.normalizer.normalize_str
    others = "\u0f35\u0301\u3099\u05b0\u0327"  # of five combining classes

    def differs(char: str) -> bool:
        probes = (text for other in others for text in (char + other, other + char))
        return any(normalize(text) != unicodedata.normalize("NFC", text) for text in probes)

    marks = (chr(code) for code in range(0x300, 0x20000) if unicodedata.combining(chr(code)))
    return [(ord(char), ord(char)) for char in marks if differs(char)]


def _any_in(ranges: Sequence[tuple[int, int]]) -> re.Pattern[str] | None:
    if not ranges:
        return None
    return re.compile("[" + "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges) + "]")


def _has_long_space(text: str) -> bool:
    """Certain for a run of ``_LONG_SPACE_CHARS`` blanks, which covers an aligned window of half that length."""
    window = _LONG_SPACE_CHARS // 2
    return any(text[at : at + window].isspace() for at in range(0, len(text) - window + 1, window))
