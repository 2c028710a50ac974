"""The command line: its parts, its exit statuses, its one-line complaints."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
from typing import Any

import pytest

import gateway.app
from backends.base import UpstreamUnreachable
from gateway.cli import main
from gateway.commands import doctor
from tests.gateway.double import DoublePrefill, logprobs_after, trained_tokenizer
from tests.gateway.stub_proxy import StubProxy

TOKENS = trained_tokenizer()


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> DoublePrefill:
    backend = DoublePrefill()
    monkeypatch.setattr(gateway.app, "load_backends", lambda settings, env: [backend])
    monkeypatch.delenv("ONEPASS_BASE_URL", raising=False)
    return backend


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("onepass ")


def test_no_command_shows_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert all(name in capsys.readouterr().out for name in ("serve",))


def test_unknown_command() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["fly"])
    assert caught.value.code == 2


def test_bench_without_its_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "loadtest.bench", None)
    assert main(["bench"]) == 1
    assert "onepass[loadtest]" in capsys.readouterr().err


def test_score_of_a_text(double: DoublePrefill, capsys: pytest.CaptureFixture[str]) -> None:
    text = "The capital of France"
    assert main(["score", text]) == 0
    *lines, total = capsys.readouterr().out.splitlines()
    ids = TOKENS.encode(text)
    assert len(lines) == len(ids) and "null" not in lines[0]
    expected = sum(logprobs_after(ids[:i], TOKENS.vocab_size)[ids[i]] for i in range(1, len(ids)))
    assert float(total.split()[0]) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("more", [[], ["--chat"]])
def test_score_of_choices(double: DoublePrefill, capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    assert main(["score", "Is it blue?", "--choices", "Yes,No,Maybe", *more]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {name for _, name in rows} == {"'Yes'", "'No'", "'Maybe'"}
    values = [float(value) for value, _ in rows]
    assert values == sorted(values, reverse=True)
    assert math.fsum(map(math.exp, values)) == pytest.approx(1.0, abs=1e-3)


def test_score_tells_what_the_server_says(double: DoublePrefill, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", "x", "--model", "nobody"]) == 1
    assert "404" in capsys.readouterr().err


def test_score_of_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        assert main(["score", "x", "--url", f"http://127.0.0.1:{s.getsockname()[1]}/v1"]) == 1
    assert "does not answer" in capsys.readouterr().err


def checked(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> dict[str, doctor.Check]:
    monkeypatch.setattr(doctor, "load_backends", lambda settings, env: [DoublePrefill()])
    return {check.name: check for check in doctor.checks(env)}


def test_doctor_is_content(monkeypatch: pytest.MonkeyPatch) -> None:
    found = checked(monkeypatch, {"ONEPASS_PORT": "0"})
    assert all(check.ok for check in found.values()), found
    assert {"python", "torch", "device", "kernels", "model", "settings", "port", "backends"} <= set(found)


@pytest.mark.parametrize(
    ("env", "name", "words"),
    [
        ({"ONEPASS_MODEL": "/nowhere/x.gguf"}, "model", "ONEPASS_MODEL"),
        ({"ONEPASS_PORT": "x"}, "settings", "ONEPASS_PORT"),
        ({"ONEPASS_HOST": "0.0.0.0"}, "settings", "ONEPASS_API_KEYS"),
    ],
)
def test_doctor_finds(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], name: str, words: str) -> None:
    check = checked(monkeypatch, env)[name]
    assert not check.ok and words in check.says


def test_doctor_finds_a_taken_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        check = checked(monkeypatch, {"ONEPASS_PORT": str(s.getsockname()[1])})["port"]
    assert not check.ok and "in use" in check.says


def test_doctor_asks_the_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy = StubProxy(["m"])
    monkeypatch.setattr(doctor, "load_backends", lambda settings, env: [DoublePrefill(), proxy])
    env = {"ONEPASS_PORT": "0", "ONEPASS_UPSTREAM_BASE_URL": "http://somewhere"}
    found = {check.name: check for check in doctor.checks(env)}
    assert found["upstream"].ok and "200" in found["upstream"].says and proxy.listed == 1
    proxy.fault = UpstreamUnreachable("connection refused")
    found = {check.name: check for check in doctor.checks(env)}
    assert not found["upstream"].ok and "refused" in found["upstream"].says


def test_doctor_prints_a_line_a_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found: list[Any] = [doctor.Check("a", True, "fine"), doctor.Check("b", False, "broken")]
    monkeypatch.setattr(doctor, "checks", lambda env: iter(found))
    assert main(["doctor"]) == 1
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["ok", "a"], ["FAIL", "b"]]


def test_the_light_commands_do_not_load_torch() -> None:
    code = "import sys; from gateway.cli import main; main(['--version']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
