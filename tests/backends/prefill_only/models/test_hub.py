"""Hugging Face ids: from the cache when offline, and messages that say what to do. Nothing here goes to a network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

from backends.prefill_only.models import hub
from backends.prefill_only.models.hub import ModelNotFound, snapshot
from tests.backends.prefill_only.models.transformers_models import save_model

_LOAD = """
import sys
from backends.prefill_only.models.loader import ModelNotFound, load
try:
    model = load(sys.argv[1], dtype="float32", device="cpu", load_format=sys.argv[2])
except ModelNotFound as error:
    print(error)
else:
    print(model.spec.architecture, model.path)
"""


def load_offline(cache: Path, model_id: str, load_format: str = "auto") -> str:
    """What a process prints whose hub cache is ``cache``; the hub's library reads its environment when imported."""
    environment = {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "PATH": ""}
    run = subprocess.run(
        [sys.executable, "-c", _LOAD, model_id, load_format],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return run.stdout.strip()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache as the hub's library lays it out, with one model."""
    root = tmp_path_factory.mktemp("hub")
    model = root / "models--some--llama"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("0123abc")
    save_model(model / "snapshots" / "0123abc", "llama")
    return root


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_cached_model_is_found_offline(cache: Path, load_format: str) -> None:
    printed = load_offline(cache, "some/llama", load_format)
    assert printed == f"LlamaForCausalLM {cache / 'models--some--llama' / 'snapshots' / '0123abc'}"


def test_offline_and_not_cached(cache: Path) -> None:
    printed = load_offline(cache, "other/model")
    assert "'other/model'" in printed and "HF_HUB_OFFLINE" in printed and "hf download other/model" in printed
    assert str(cache) in printed and "\n" not in printed


def _answer(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co/some/llama"))


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (GatedRepoError("gated", response=_answer(403)), "accept its terms.*HF_TOKEN"),
        (RepositoryNotFoundError("absent", response=_answer(404)), "no such model on Hugging Face.*HF_TOKEN"),
        (HFValidationError("bad id"), "neither a file or directory here nor a Hugging Face id"),
        (LocalEntryNotFoundError("no connection"), "not in the Hugging Face cache.*run: hf download some/llama"),
        (OSError("disk full\nsecond line"), "could not be downloaded: disk full$"),
    ],
)
def test_what_went_wrong_is_one_line(monkeypatch: pytest.MonkeyPatch, raised: Exception, words: str) -> None:
    def refuse(*arguments: object, **settings: object) -> str:
        raise raised

    monkeypatch.setattr(hub, "snapshot_download", refuse)
    with pytest.raises(ModelNotFound, match=words):
        snapshot("some/llama", weights=True)


def test_weights_are_fetched_only_if_they_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patterns: list[list[str]] = []

    def record(model_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        patterns.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", record)
    assert snapshot("some/llama", weights=True) == snapshot("some/llama", weights=False) == tmp_path
    assert "*.safetensors" in patterns[0] and "*.safetensors" not in patterns[1] and "*.json" in patterns[1]
