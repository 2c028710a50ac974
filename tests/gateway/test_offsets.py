"""Where tokens begin in a text, whatever the text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.wire.offsets import text_offsets
from tests.gateway.double import END, START, trained_tokenizer

TOKENS = trained_tokenizer()
TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)


@given(TEXT)
def test_offsets_cover_the_text_in_order(text: str) -> None:
    ids = TOKENS.encode(text)
    offsets = text_offsets(ids, text, TOKENS)
    assert offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] < len(text)
    before = b""
    for token_id, offset in zip(ids, offsets, strict=True):
        # A token points at the character that its first byte is part of.
        assert text[:offset].encode() == before[: len(text[:offset].encode())]
        assert len(before) - len(text[:offset].encode()) < 4
        before += TOKENS.token_bytes(token_id) or b""
    assert before == text.encode()


@given(TEXT)
def test_tokens_that_are_not_in_the_text_have_no_width(text: str) -> None:
    [start], [end] = TOKENS.encode(START), TOKENS.encode(END)
    ids = TOKENS.encode(text, parse_special=False)
    plain = text_offsets(ids, text, TOKENS)
    assert text_offsets([start, *ids, end], text, TOKENS) == [0, *plain, len(text)]


def test_no_tokens() -> None:
    assert text_offsets([], "", TOKENS) == []
