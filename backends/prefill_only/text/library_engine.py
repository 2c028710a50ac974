"""The ``tokenizers`` library as an engine: exact for every model, and the reference of the faster one.

Control tokens that must stay text are kept out by a second tokenizer with the same ids, in which every control token
has a spelling that nobody can guess. So stripping, prefix spaces and normalisation around tokens stay the library's.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Collection, Sequence
from typing import Any

from tokenizers import Tokenizer as LibraryTokenizer

from backends.prefill_only.text.definition import AddedToken
from backends.prefill_only.text.engine import Engine, Piece

__all__ = ["LibraryEngine"]


class LibraryEngine(Engine):
    """``control``: the added tokens that ``encode_pieces`` finds in no text."""

    def __init__(self, spec: dict[str, Any], library: LibraryTokenizer, control: Collection[AddedToken]) -> None:
        self._spec = spec
        self._library = library
        nonce = secrets.token_hex(8)
        self._spelling = {token.id: f"\U0010fffd{nonce}:{token.id}\U0010fffd" for token in control}
        self._lock = threading.Lock()
        self._private: LibraryTokenizer | None = None

    def encode(self, text: str) -> list[int]:
        return _encode(self._library, text)

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        text = "".join(self._spelling[piece] if isinstance(piece, int) else piece for piece in pieces)
        return _encode(self._renamed(), text)

    def _renamed(self) -> LibraryTokenizer:
        """Built when first needed: it costs a second vocabulary's memory."""
        with self._lock:
            if self._private is None:
                self._private = LibraryTokenizer.from_str(json.dumps(self._renamed_spec()))
            return self._private

    def _renamed_spec(self) -> dict[str, Any]:
        added = [
            {**token, "content": self._spelling.get(token["id"], token["content"])}
            for token in self._spec["added_tokens"]
        ]
        model = self._spec["model"]
        vocab = model["vocab"]
        names = {t["content"]: self._spelling[t["id"]] for t in self._spec["added_tokens"] if t["id"] in self._spelling}
        if isinstance(vocab, dict):
            renamed: Any = {names.get(text, text): token_id for text, token_id in vocab.items()}
        else:  # Unigram: pairs of text and score
            renamed = [[names.get(text, text), score] for text, score in vocab]
        unknown = model.get("unk_token")
        model = {**model, "vocab": renamed}
        if "merges" in model:
            # A control token may also be the outcome of merges, in vocabularies that were not trained with it.
            pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
            model["merges"] = [[a, b] for a, b in pairs if not names.keys() & {a, b, a + b}]
        if unknown in names:
            model["unk_token"] = names[unknown]
        return {**self._spec, "added_tokens": added, "model": model, "post_processor": None}


def _encode(library: LibraryTokenizer, text: str) -> list[int]:
    """The library's ``encode`` keeps the interpreter's lock and tracks offsets; its batch call does neither."""
    ids: list[int] = library.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids
