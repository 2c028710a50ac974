from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from backends.upstream.target import Target


@pytest.mark.parametrize(
    ("base", "path", "expected"),
    [
        ("http://h:9000/v1", b"/v1/chat/completions", "http://h:9000/v1/chat/completions"),
        ("http://h:9000/v1/", b"/v1/chat/completions", "http://h:9000/v1/chat/completions"),
        ("http://h:9000", b"/v1/chat/completions", "http://h:9000/v1/chat/completions"),
        ("http://h:9000/", b"/v1/models", "http://h:9000/v1/models"),
        ("https://h/openai/v1", b"/v1/embeddings", "https://h/openai/v1/embeddings"),
        ("https://h/openai", b"/v1/embeddings", "https://h/openai/v1/embeddings"),
        ("https://h/api/v3", b"/v1/chat/completions", "https://h/api/v3/chat/completions"),
        ("https://h/v1beta/openai", b"/v1/chat/completions", "https://h/v1beta/openai/chat/completions"),
        ("http://h/v1", b"/v1", "http://h/v1"),
        ("http://h/v1", b"/v1/", "http://h/v1/"),
        ("http://h/v1", b"/v10/x", "http://h/v10/x"),
        ("http://h:9000/v1", b"/tokenize", "http://h:9000/tokenize"),
        ("https://h/openai/v1", b"/tokenize", "https://h/openai/tokenize"),
        ("https://h/openai", b"/tokenize", "https://h/openai/tokenize"),
        ("http://[::1]:9000/v1", b"/v1/models", "http://[::1]:9000/v1/models"),
    ],
)
def test_the_base_path_stands_for_v1(base: str, path: bytes, expected: str) -> None:
    assert str(Target(URL(base, encoded=True)).url(path, b"")) == expected


@pytest.mark.parametrize("path", [b"/v1/models/a%2Fb", b"/v1/x//y", b"/v1/../z", b"/v1/%zz;p=1:@", "/v1/é".encode()])
def test_paths_are_not_touched(path: bytes) -> None:
    url = Target(URL("http://h/v1")).url(path, b"api-version=%32&a=1&a=+%20&b")
    assert url.raw_path_qs.encode() == path + b"?api-version=%32&a=1&a=+%20&b"
    assert url.raw_host == "h"


@given(st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E, exclude_characters="?#")))
def test_any_path_and_query_survive(text: str) -> None:
    url = Target(URL("http://h:1/base/v2")).url(f"/v1/{text}".encode(), f"q{text}".encode())
    assert url.raw_path_qs == f"/base/v2/{text}?q{text}"
    assert (url.raw_host, url.port) == ("h", 1)


def test_a_path_without_slash_is_refused() -> None:
    with pytest.raises(ValueError, match="slash"):
        Target(URL("http://h")).url(b"*", b"")
