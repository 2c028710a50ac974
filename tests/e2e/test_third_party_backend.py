"""A package that knows nothing of ours but the contract adds a backend through an entry point."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from openai import OpenAI

from tests.e2e.server import start_server

PYPROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "onepass-parrot"
version = "1.0"
[tool.setuptools]
py-modules = ["parrot"]
[project.entry-points."onepass.backends"]
parrot = "parrot:factory"
"""

MODULE = '''\
"""Always predicts the prompt's last token."""

from backends.base import (
    BackendStatus, ModelInfo, PrefillBackend, PrefillResult, RenderedPrompt, Timing, Tokenizer, TokenLogprob,
)


class Bytes(Tokenizer):
    vocab_size = 256
    bos_token = eos_token = pad_token = chat_template = None
    eos_token_ids = frozenset()

    def encode(self, text, *, add_special_tokens=True, parse_special=True):
        return list(text.encode())

    def decode(self, token_ids, *, skip_special_tokens=False):
        return bytes(token_ids).decode(errors="replace")

    def token_text(self, token_id):
        return self.decode([token_id])

    def token_bytes(self, token_id):
        return bytes([token_id])

    def is_special(self, token_id):
        return False

    def render_chat(self, messages, **options):
        text = "".join(m["content"] for m in messages)
        return RenderedPrompt(text=text, token_ids=self.encode(text))


class Parrot(PrefillBackend):
    name = "parrot"

    async def start(self):
        pass

    async def stop(self, grace_s):
        pass

    def status(self):
        return BackendStatus(ready=True, message="ready")

    def models(self):
        return [ModelInfo(id="parrot-1", max_model_len=1000, fingerprint="fp")]

    def tokenizer(self, model):
        return Bytes()

    async def prefill(self, requests):
        results = []
        for request in requests:
            last = TokenLogprob(request.token_ids[-1], 0.0, 1)
            readout = request.readout
            drawn = (last,) * readout.sampling.n if readout.sampling else ()
            top = tuple(TokenLogprob((last.token_id + i) % 256, -float(i), i + 1) for i in range(readout.top_logprobs))
            results.append(PrefillResult(drawn=drawn, top=top, timing=Timing(0.0, 0.0, 0.0)))
        return results

    def predicted_wait_s(self, requests):
        return 0.0


def factory(env):
    assert env["ONEPASS_BACKENDS"] == "parrot"
    return Parrot()
'''


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, target = tmp_path_factory.mktemp("parrot"), tmp_path_factory.mktemp("site")
    (source / "pyproject.toml").write_text(PYPROJECT)
    (source / "parrot.py").write_text(MODULE)
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", target, source],
        check=True,
        capture_output=True,
    )
    return target


def test_a_third_party_backend_serves_its_model(installed: Path) -> None:
    server = start_server({"ONEPASS_BACKENDS": "parrot", "PYTHONPATH": str(installed)})
    try:
        with OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            assert [m.id for m in client.models.list()] == ["parrot-1"]
            raw = client.chat.completions.with_raw_response.create(
                model="parrot-1",
                messages=[{"role": "user", "content": "echo"}],
                max_tokens=1,
                logprobs=True,
                top_logprobs=2,
            )
            assert raw.headers["x-onepass-backend"] == "parrot"
            answer = raw.parse()
            assert answer.choices[0].message.content == "o"
            assert answer.usage is not None and answer.usage.prompt_tokens == 4
            assert client.completions.create(model="parrot-1", prompt=[65, 66], max_tokens=1).choices[0].text == "B"
    finally:
        assert server.stop() == 0
