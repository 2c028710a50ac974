"""The built-in model against transformers, which reads the same GGUF file."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from backends.base import Readout
from backends.prefill_only.models.loader import LoadedModel, load
from tests.backends.prefill_only.models.engine import answer

TOP = 20
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def ours() -> LoadedModel:
    return load("builtin", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def theirs(ours: LoadedModel) -> PreTrainedModel:
    gguf = ours.path
    model = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
    return model.eval()


def prompt(tokens: int) -> list[int]:
    """Runs of one sequence of tokens at changing offsets: what was seen before is predictable, the rest is not."""
    rng = random.Random(tokens)
    story = [rng.randrange(100, 40_000) for _ in range(300)]
    ids: list[int] = []
    while len(ids) < tokens:
        start = rng.randrange(len(story) - 1)
        ids += story[start : start + rng.randrange(5, 60)]
    return ids[:tokens]


@torch.inference_mode()
def expected(model: PreTrainedModel, token_ids: Sequence[int], keep: int = 1) -> torch.Tensor:
    """Log-probabilities after the last ``keep`` positions, fp32 ``[keep, vocab]``."""
    logits = model(torch.tensor([list(token_ids)]), logits_to_keep=keep).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def check_top(ours: LoadedModel, theirs: PreTrainedModel, token_ids: Sequence[int]) -> None:
    truth = expected(theirs, token_ids)[0]
    values, ids = truth.topk(TOP)
    found = answer(ours, token_ids, Readout(top_logprobs=TOP, token_ids=tuple(ids.tolist())), chunk_rows=512)
    assert found.next_token is not None
    named = torch.tensor([entry.logprob for entry in found.next_token.named])
    torch.testing.assert_close(named, values, atol=TOLERANCE, rtol=0)
    # Their order too, except among those that lie within the tolerance of each other.
    for entry, value in zip(found.next_token.top, values.tolist(), strict=True):
        assert abs(truth[entry.token_id].item() - value) <= TOLERANCE


@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 500, 2000])
def test_top_log_probabilities_are_those_of_transformers(
    ours: LoadedModel, theirs: PreTrainedModel, tokens: int
) -> None:
    check_top(ours, theirs, prompt(tokens))


def test_bfloat16_is_as_exact_as_that_of_transformers(ours: LoadedModel, theirs: PreTrainedModel) -> None:
    """Mean error of the log-probabilities of a prompt's own tokens, against float32."""
    token_ids = prompt(300)
    targets = torch.tensor(token_ids[1:])

    def of_targets(logprobs: torch.Tensor) -> torch.Tensor:
        return logprobs[:-1].gather(1, targets[:, None])[:, 0]

    truth = of_targets(expected(theirs, token_ids, keep=0))
    rounded = copy.deepcopy(theirs).to(torch.bfloat16)
    their_error = (of_targets(expected(rounded, token_ids, keep=0)) - truth).abs().mean()

    model = load("builtin", dtype="bfloat16", device="cpu")
    found = answer(model, token_ids, Readout(prompt_logprobs=0), chunk_rows=512)
    assert found.prompt is not None
    our_error = (torch.tensor([entry.logprob for entry in found.prompt.actual]) - truth).abs().mean()

    assert our_error <= their_error, f"mean error {our_error:.5f}, transformers' {their_error:.5f}"
