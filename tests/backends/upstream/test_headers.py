from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.upstream.headers import is_credential, to_client, to_upstream

CREDENTIALS = [
    b"authorization",
    b"x-forwarded-authorization",
    b"api-key",
    b"x-api-key",
    b"x-goog-api-key",
    b"apikey",
    b"x-apikey",
    b"ocp-apim-subscription-key",
    b"x-auth-token",
    b"x-access-token",
    b"x-amz-security-token",
    b"x-csrf-token",
    b"x-client-secret",
    b"x-secret",
    b"x-my-password",
    b"x-session",
    b"cookie",
]
ORDINARY = [
    b"content-type",
    b"user-agent",
    b"openai-organization",
    b"openai-project",
    b"openai-beta",
    b"anthropic-version",
    b"x-stainless-retry-count",
    b"x-request-id",
    b"x-client-request-id",
    b"idempotency-key",
    b"traceparent",
    b"x-author",
    b"x-token-count",
    b"x-session-affinity",
    b"x-keyboard",
    b"accept",
]


@pytest.mark.parametrize("name", CREDENTIALS)
def test_credentials_stay_here(name: bytes) -> None:
    assert is_credential(name)
    assert b"s3cret" not in b"".join(v for _, v in to_upstream([(name, b"s3cret")], api_key=None, forward_auth=False))


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_headers_pass(name: bytes) -> None:
    assert not is_credential(name)
    assert (name, b"v") in to_upstream([(name, b"v")], api_key=None, forward_auth=False)


def test_order_case_and_duplicates_are_kept() -> None:
    headers = [
        (b"X-B", b"2"),
        (b"Host", b"gateway:8000"),
        (b"accept-encoding", b"br;q=1.0, gzip"),
        (b"x-a", b"1"),
        (b"X-B", b""),
        (b"x-b", b"2"),
    ]
    assert to_upstream(headers, api_key=None, forward_auth=False) == [h for h in headers if h[0] != b"Host"]


def test_hop_by_hop_headers_stop_here() -> None:
    headers = [
        (b"connection", b"keep-alive, X-Private , close"),
        (b"Connection", b"x-other"),
        (b"keep-alive", b"timeout=5"),
        (b"x-private", b"1"),
        (b"X-Other", b"1"),
        (b"proxy-connection", b"keep-alive"),
        (b"proxy-authorization", b"Basic x"),
        (b"te", b"trailers"),
        (b"trailer", b"x-sum"),
        (b"transfer-encoding", b"chunked"),
        (b"upgrade", b"h2c"),
        (b"expect", b"100-continue"),
        (b"accept-encoding", b"identity"),
        (b"x-public", b"1"),
    ]
    expected = [(b"accept-encoding", b"identity"), (b"x-public", b"1")]
    assert to_upstream(headers, api_key=None, forward_auth=True) == expected


def test_connection_cannot_name_the_length_away() -> None:
    headers = [(b"connection", b"content-length"), (b"content-length", b"2"), (b"accept-encoding", b"gzip")]
    assert (b"content-length", b"2") in to_upstream(headers, api_key=None, forward_auth=False)


def test_without_accept_encoding_nothing_is_to_be_encoded() -> None:
    assert to_upstream([], api_key=None, forward_auth=False) == [(b"accept-encoding", b"identity")]


def test_the_configured_key_replaces_the_clients() -> None:
    headers = [(b"authorization", b"Bearer mine"), (b"x-api-key", b"mine"), (b"accept-encoding", b"gzip")]
    sent = to_upstream(headers, api_key="sk-upstream", forward_auth=False)
    assert sent == [(b"accept-encoding", b"gzip"), (b"authorization", b"Bearer sk-upstream")]


def test_forwarded_credentials_do_not_include_cookies() -> None:
    headers = [(b"authorization", b"Bearer mine"), (b"api-key", b"k"), (b"cookie", b"c"), (b"accept-encoding", b"br")]
    sent = to_upstream(headers, api_key=None, forward_auth=True)
    assert sent == [(b"authorization", b"Bearer mine"), (b"api-key", b"k"), (b"accept-encoding", b"br")]


def test_answers_lose_hop_by_hop_headers_only() -> None:
    headers = [
        (b"Content-Type", b"text/event-stream"),
        (b"Connection", b"keep-alive, x-hop"),
        (b"X-Hop", b"1"),
        (b"Transfer-Encoding", b"chunked"),
        (b"Keep-Alive", b"timeout=5"),
        (b"Set-Cookie", b"a=1"),
        (b"set-cookie", b"b=2"),
        (b"Content-Encoding", b"gzip"),
        (b"x-ratelimit-remaining-requests", b"9"),
        (b"x-should-retry", b"false"),
    ]
    kept = [headers[i] for i in (0, 5, 6, 7, 8, 9)]
    assert to_client(headers) == kept


tokens = st.from_regex(rb"[A-Za-z][A-Za-z0-9-]{0,12}", fullmatch=True)


@given(st.lists(st.tuples(tokens, st.binary(max_size=8))))
def test_what_passes_keeps_its_order(headers: list[tuple[bytes, bytes]]) -> None:
    sent = to_upstream(headers, api_key=None, forward_auth=False)
    rest = iter([*headers, (b"accept-encoding", b"identity")])
    assert all(header in rest for header in sent), "neither reordered nor changed"
