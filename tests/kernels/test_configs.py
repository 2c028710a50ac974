"""The table of tile sizes: every GPU finds a row."""

from __future__ import annotations

import pytest
import torch

from kernels import config_table, configs
from kernels.attention import HEAD_DIMS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("capability", [0, 75, 80, 86, 89, 90, 100, 103, 120, 200])
def test_every_gpu_finds_a_row(capability: int) -> None:
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            row = configs.attention_config(capability, dtype, head_dim)
            assert all(value > 0 for value in row)
        for product in (configs.matmul_config, configs.quantised_matmul_config):
            assert all(value > 0 for value in product(capability, dtype))


def test_an_unknown_gpu_gets_the_rows_that_fit_the_smallest_shared_memory() -> None:
    for dtype in DTYPES:
        assert configs.attention_config(120, dtype, 128) == configs.attention_config(80, dtype, 128)
        assert configs.matmul_config(120, dtype) == configs.matmul_config(80, dtype)


def test_a_readout_tile_holds_a_diagonal() -> None:
    """The LM head reads a target's logit off the diagonal of a tile."""
    for block_m, block_n, *_ in config_table.MATMUL.values():
        assert block_n >= block_m


def test_architectures_have_all_rows_or_none() -> None:
    known = {capability for capability, _ in config_table.MATMUL}
    assert {capability for capability, _ in config_table.QUANTISED_MATMUL} == known
    for capability in known:
        rows = {key[1:] for key in config_table.ATTENTION if key[0] == capability}
        assert rows == {(width, size) for width in ("16", "32") for size in (64, 128, 256)}
