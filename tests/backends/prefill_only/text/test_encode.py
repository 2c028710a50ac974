"""Token ids and texts are those of transformers, whichever engine computes them."""

from __future__ import annotations

import random
import re
import unicodedata
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from backends.base import InvalidInput
from backends.prefill_only.text.awkward_texts import AWKWARD_TEXTS
from backends.prefill_only.text.boundaries import chunks
from backends.prefill_only.text.library_engine import LibraryEngine
from backends.prefill_only.text.model_tokenizer import ModelTokenizer
from backends.prefill_only.text.tiktoken_engine import TiktokenEngine
from tests.backends.prefill_only.text.texts import random_texts

CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<reponame>"]
TRAINED_CONTROL = ["<s>", "</s>", "<|start|>", "<|end|>", "<think>", "</think>", "<fim>"]


def same_ids(mine: ModelTokenizer, reference: PreTrainedTokenizerFast, texts: list[str], **options: bool) -> None:
    for text in texts:
        wanted = reference.encode(text, **options)
        got = mine.encode(text, add_special_tokens=options.get("add_special_tokens", True))
        assert got == wanted, f"{text!r}: {got} instead of {wanted}"


def test_builtin_uses_tiktoken(builtin: ModelTokenizer) -> None:
    assert isinstance(builtin._engine, TiktokenEngine)


def test_engines_of_trained_families(trained: ModelTokenizer, family: str) -> None:
    assert isinstance(trained._engine, LibraryEngine if family == "metaspace" else TiktokenEngine)


def test_builtin_ids_are_those_of_the_published_tokenizer(
    builtin: ModelTokenizer, builtin_reference: PreTrainedTokenizerFast
) -> None:
    same_ids(builtin, builtin_reference, random_texts(3000, seed=1, control=CONTROL))


@pytest.mark.slow
def test_builtin_ids_differ_from_transformers_reading_of_gguf_only_at_digits(
    builtin: ModelTokenizer, builtin_path: Path
) -> None:
    """The file says ``smollm``: each digit is a text of its own. transformers takes the GPT-2 pattern for all files."""
    unread = AutoTokenizer.from_pretrained(str(builtin_path.parent), gguf_file=builtin_path.name)
    texts = [t for t in random_texts(3000, seed=2, control=CONTROL, max_pieces=12) if not _cuts_at_digits_show(t)]
    assert len(texts) > 500
    same_ids(builtin, unread, texts)
    assert builtin.encode("a\n\n1") != unread.encode("a\n\n1")
    assert builtin.render_chat([{"role": "user", "content": "Hi"}]).token_ids == unread.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )


def _cuts_at_digits_show(text: str) -> bool:
    """Two blanks before a digit, or a numeral beyond ASCII, which may be part of a longer token."""
    triples = zip(text, text[1:], text[2:], strict=False)
    numerals = any(not char.isascii() and unicodedata.category(char)[0] == "N" for char in text)
    return numerals or any(a.isspace() and b.isspace() and c.isdecimal() for a, b, c in triples)


@pytest.mark.parametrize("bos", [True, False])
def test_trained_ids_are_those_of_transformers(
    trained: ModelTokenizer, trained_reference: PreTrainedTokenizerFast, bos: bool
) -> None:
    texts = [t for t in random_texts(1500, seed=3, control=TRAINED_CONTROL) if not t.startswith("<s>")]
    same_ids(trained, trained_reference, texts, add_special_tokens=bos)
    same_ids(trained, trained_reference, list(AWKWARD_TEXTS[:1000]), add_special_tokens=bos)


def test_a_start_token_in_the_text_is_not_doubled(trained: ModelTokenizer, family: str) -> None:
    bos = trained.encode("<s>", add_special_tokens=False)
    assert len(bos) == 1
    adds = family in ("llama3", "metaspace")
    assert trained.encode("hello")[:1] == bos if adds else trained.encode("hello")[:1] != bos
    assert trained.encode("<s>hello").count(bos[0]) == 1


def test_control_tokens_stay_text_when_asked(
    builtin: ModelTokenizer, builtin_reference: PreTrainedTokenizerFast
) -> None:
    for text in random_texts(1000, seed=4, control=CONTROL):
        got = builtin.encode(text, parse_special=False)
        assert got == builtin_reference.encode(text, split_special_tokens=True), repr(text)
        assert not any(builtin.is_special(i) for i in got)


def test_trained_control_tokens_stay_text_when_asked(trained: ModelTokenizer) -> None:
    """Those that only look like tokens of the language, <fim>, are still tokens: no template writes them."""
    control = {token.id for token in trained._control}
    fim = trained.encode("<fim>", add_special_tokens=False)
    assert len(fim) == 1 and fim[0] not in control
    for text in random_texts(400, seed=5, control=TRAINED_CONTROL):
        got = trained.encode(text, parse_special=False, add_special_tokens=False)
        assert not control & set(got), repr(text)
        assert got.count(fim[0]) == text.count("<fim>"), repr(text)


def test_decoding_is_transformers(builtin: ModelTokenizer, builtin_reference: PreTrainedTokenizerFast) -> None:
    rng = random.Random(6)
    for _ in range(1000):
        ids = [rng.randrange(49152) if rng.random() < 0.9 else rng.randrange(17) for _ in range(rng.randint(0, 12))]
        for skip in (False, True):
            wanted = builtin_reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert builtin.decode(ids, skip_special_tokens=skip) == wanted


def test_text_comes_back_and_bytes_are_its_utf8(builtin: ModelTokenizer) -> None:
    lacks = re.compile("[\x04\x06\x13\x14\x16\x1d\U00040000-\U000bffff]")  # the vocabulary has no such bytes
    for text in random_texts(1500, seed=8, control=CONTROL):
        text = lacks.sub("", text)
        ids = builtin.encode(text)
        assert builtin.decode(ids) == text
        assert b"".join(builtin.token_bytes(i) or b"" for i in ids) == text.encode(), repr(text)


def test_trained_bytes_are_the_texts_utf8(trained: ModelTokenizer, family: str) -> None:
    for text in random_texts(300, seed=9):
        if family == "qwen2" and not text.isascii():
            continue  # may be normalised
        raw = b"".join(trained.token_bytes(i) or b"" for i in trained.encode(text, add_special_tokens=False))
        assert raw.removeprefix(b" " if family == "metaspace" and raw[:1] == b" " and text[:1] != " " else b"") == (
            text.encode()
        ), repr(text)


def test_tokens_are_shown_as_users_expect(builtin: ModelTokenizer) -> None:
    (paris,) = builtin.encode(" Paris")
    assert builtin.token_text(paris) == " Paris" and builtin.token_bytes(paris) == b" Paris"
    assert builtin.token_text(2) == "<|im_end|>" and builtin.token_bytes(2) == b"<|im_end|>"
    assert builtin.is_special(2) and not builtin.is_special(paris)
    parts = builtin.encode("😀")
    assert len(parts) > 1 and "\ufffd" in builtin.token_text(parts[0])
    assert b"".join(builtin.token_bytes(i) or b"" for i in parts) == "😀".encode()


def test_ids_beyond_the_vocabulary(trained: ModelTokenizer) -> None:
    assert trained.vocab_size == 4096
    assert trained.token_bytes(4095) is None and trained.token_text(4095) == "" and not trained.is_special(4095)
    assert trained.token_bytes(5000) is None and trained.token_bytes(-1) is None
    assert trained.decode([4095]) == ""
    for bad in (4096, -1):
        with pytest.raises(InvalidInput, match="below 4096"):
            trained.decode([bad])


def test_half_a_surrogate_pair_is_refused(builtin: ModelTokenizer) -> None:
    with pytest.raises(InvalidInput, match=r"\\ud83d\) at character 3"):
        builtin.encode("abc\ud83d")


@pytest.mark.parametrize("chars", [1, 7, 40])
def test_cutting_text_changes_no_token(
    trained: ModelTokenizer, builtin: ModelTokenizer, family: str, chars: int
) -> None:
    if family == "metaspace":
        return  # is never cut
    for tokenizer in (trained, builtin):
        for text in random_texts(200, seed=10, max_pieces=60):
            pieces = list(chunks(text, chars))
            assert "".join(pieces) == text
            joined = [i for piece in pieces for i in tokenizer.encode(piece, add_special_tokens=False)]
            assert joined == tokenizer.encode(text, add_special_tokens=False), f"{text!r} cut as {pieces}"


@pytest.mark.parametrize("unit", ["a", "ab", "7", "!", "\n", "😀", "中文", "word ", "x\n\n", "é", "A"])
def test_long_repetitions(trained: ModelTokenizer, trained_reference: PreTrainedTokenizerFast, unit: str) -> None:
    text = unit * (40_000 // len(unit))
    (wanted,) = trained_reference.backend_tokenizer.encode_batch_fast([text], add_special_tokens=False)
    assert trained.encode(text, add_special_tokens=False) == wanted.ids


@pytest.mark.parametrize("after", ["", "x", "7"])
def test_more_blanks_than_tiktokens_patterns_can_take(
    builtin: ModelTokenizer, builtin_reference: PreTrainedTokenizerFast, after: str
) -> None:
    text = "a" + " " * 120_000 + after
    backend: Tokenizer = builtin_reference.backend_tokenizer
    assert builtin.encode(text) == backend.encode(text, add_special_tokens=False).ids


def test_a_panic_of_tiktoken_is_survived(builtin: ModelTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = builtin._engine
    wanted = builtin.encode("some text")

    class PanicException(BaseException):
        pass

    class Panicking:
        def encode_ordinary(self, text: str) -> list[int]:
            raise PanicException("StackOverflow")

    monkeypatch.setattr(engine, "_core", Panicking())
    assert builtin.encode("some text") == wanted
