"""Backends by entry point, and models by name."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import pytest

from backends.base import InvalidInput
from gateway.catalog import Catalog, load_backends
from gateway.settings import Settings, SettingsError
from tests.gateway.double import MODEL, DoublePrefill
from tests.gateway.stub_proxy import StubProxy


class Point:
    def __init__(self, name: str, factory: Callable[[Any], Any]) -> None:
        self.name = name
        self._factory = factory

    def load(self) -> Callable[[Any], Any]:
        return self._factory


def broken(error: Exception) -> Callable[[Any], Any]:
    def factory(env: Any) -> Any:
        raise error

    return factory


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> list[Point]:
    found = [
        Point("prefill_only", lambda env: DoublePrefill(len(env))),
        Point("upstream", lambda env: StubProxy()),
        Point("picky", broken(InvalidInput("ONEPASS_PICKY=x:\n expected y"))),
        Point("unbuilt", broken(ImportError("No module named 'left_out'"))),
        Point("stranger", lambda env: object()),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found if group == "onepass.backends" else [])
    return found


def test_named_backends_in_order(points: list[Point]) -> None:
    env = {"A": "1", "B": "2"}
    both = load_backends(Settings(upstream_configured=True), env)
    assert [type(b) for b in both] == [DoublePrefill, StubProxy]
    assert both[0].models()[0].max_model_len == len(env)  # type: ignore[union-attr]
    assert [b.name for b in load_backends(Settings(), env)] == ["double"]
    assert [b.name for b in load_backends(Settings(backends=("upstream",), upstream_configured=True), env)] == [
        "upstream"
    ]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("absent",), "'absent'"),
        (("picky",), "ONEPASS_PICKY=x: expected y"),
        (("unbuilt",), "left_out"),
        (("stranger",), "neither"),
        (("upstream",), "no backend"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(points: list[Point], names: tuple[str, ...], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_backends(Settings(backends=names), {})
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_models_by_name_and_alias() -> None:
    first, second = DoublePrefill(1), DoublePrefill(2)
    catalog = Catalog([first, second])
    assert catalog.names == {MODEL, "org/double"}
    for name in (None, MODEL, "org/double"):
        served = catalog.find(name)
        assert served is not None and served.backend is first and served.names == (MODEL, "org/double")
    assert catalog.find("other") is None and Catalog([]).find(None) is None


async def test_the_upstreams_list_ages() -> None:
    now = 0.0
    proxy = StubProxy(["a"])
    catalog = Catalog([proxy], clock=lambda: now)
    assert await catalog.upstream_serves("a") and not await catalog.upstream_serves("b")
    assert proxy.listed == 1
    proxy.model_names = ["b"]
    now = 29.0
    assert not await catalog.upstream_serves("b")
    now = 31.0
    assert await catalog.upstream_serves("b") and proxy.listed == 2
    proxy.fault = InvalidInput("gone")
    now = 70.0
    assert await catalog.upstream_models() == []
    proxy.fault = None
    now = 74.0
    assert await catalog.upstream_models() == []
    now = 76.0
    assert await catalog.upstream_serves("b")


@pytest.mark.parametrize("payload", [b"not json", b"[]", b'{"data":5}', b'{"data":[{"id":5},"x",{}]}', b"\xff"])
async def test_a_list_that_makes_no_sense_is_empty(payload: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.gateway import stub_proxy

    proxy = StubProxy(["a"])
    original = stub_proxy.StubResponse
    monkeypatch.setattr(stub_proxy, "StubResponse", lambda status, _: original(status, payload))
    assert await Catalog([proxy]).upstream_models() == []
