"""Packed layers: the plain layer's bits, at every row count, and a model that answers the same."""

from __future__ import annotations

import pytest
import torch

from backends.base import Readout
from backends.prefill_only.direct import run_directly
from backends.prefill_only.models.linear import Linear, LinearBase
from backends.prefill_only.models.packed_linear import PackedLinear, pack_linears
from backends.prefill_only.prefill_pass import PassJob
from tests.backends.prefill_only.tiny import TINY, tiny_decoder, tiny_weights


def linear(rows: int, columns: int, bias: bool) -> Linear:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=generator).bfloat16()
    return Linear(weight, torch.randn(rows, generator=generator).bfloat16() if bias else None)


def forms(plain: Linear) -> list[LinearBase]:
    """The plain layer, and its packed form where this machine has one."""
    return [plain, PackedLinear(plain)] if pack_linears(tiny_weights(dtype=torch.bfloat16)) else [plain]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (192, 128)])
def test_rows_are_those_of_a_product_in_float64_whatever_the_count(shape: tuple[int, int], bias: bool) -> None:
    plain = linear(*shape, bias)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, shape[1], generator=generator).bfloat16()
    residual = torch.randn(512, shape[0], generator=generator).bfloat16()
    exact = x.double() @ plain.weight.double().T + (0 if plain.bias is None else plain.bias.double())
    for layer in forms(plain):
        whole, summed = layer(x), layer.add_(x, residual.clone())
        assert (whole.double() - exact).abs().max() < 2**-8 * exact.abs().max()
        assert (summed.double() - exact - residual.double()).abs().max() < 2**-7 * exact.abs().max()
        for rows in range(16, 513, 48):
            assert torch.equal(layer(x[:rows].contiguous()), whole[:rows])
            assert torch.equal(layer.add_(x[:rows].contiguous(), residual[:rows].clone()), summed[:rows])


def test_a_packed_model_answers_as_the_plain_one_does() -> None:
    answers = []
    for pack in (False, True):
        weights = tiny_weights(dtype=torch.bfloat16)
        if pack:
            pack_linears(weights)
        decoder, head = tiny_decoder(weights=weights)
        jobs = [
            PassJob([(i * 7 + n) % TINY.vocab_size for i in range(n)], Readout(top_logprobs=9)) for n in (3, 70, 400)
        ]
        answers.append(run_directly(decoder, head, jobs))
    assert answers[0] == answers[1]


def test_what_cannot_be_packed_stays_plain() -> None:
    weights = tiny_weights(dtype=torch.float32)
    assert not pack_linears(weights)
    assert isinstance(weights.layers[0].qkv, Linear)
