"""Tile sizes by architecture, dtype and head size: data, written by `python -m kernels.tune --write`.

A row is (block_m, block_n, num_warps, num_stages) for attention and (block_m, block_n, block_k, num_warps, num_stages)
for the matrix products.
"""

#: Where the rows come from.
ORIGIN = "chosen by the compile report (no spills, tensor cores in use); not yet timed on a device"

# (capability, dtype, head_dim rounded up to a power of two)
ATTENTION: dict[tuple[int, str, int], tuple[int, int, int, int]] = {
    (80, "16", 64): (128, 64, 8, 2),
    (80, "16", 128): (64, 32, 4, 3),
    (80, "16", 256): (64, 32, 8, 2),
    (80, "32", 64): (32, 32, 4, 1),
    (80, "32", 128): (16, 16, 4, 1),
    (80, "32", 256): (16, 16, 8, 1),
    (90, "16", 64): (128, 64, 8, 2),
    (90, "16", 128): (128, 64, 8, 2),
    (90, "16", 256): (64, 32, 8, 2),
    (90, "32", 64): (64, 32, 4, 1),
    (90, "32", 128): (16, 16, 4, 1),
    (90, "32", 256): (16, 16, 8, 1),
    (100, "16", 64): (128, 64, 8, 2),
    (100, "16", 128): (128, 64, 8, 2),
    (100, "16", 256): (64, 32, 8, 2),
    (100, "32", 64): (32, 32, 4, 1),
    (100, "32", 128): (16, 16, 4, 1),
    (100, "32", 256): (16, 16, 8, 1),
}

# (capability, dtype); block_n is no smaller than block_m
MATMUL: dict[tuple[int, str], tuple[int, int, int, int, int]] = {
    (80, "16"): (128, 128, 32, 8, 3),
    (80, "32"): (64, 64, 32, 4, 2),
    (90, "16"): (128, 256, 64, 8, 3),
    (90, "32"): (64, 64, 32, 4, 2),
    (100, "16"): (128, 256, 64, 8, 3),
    (100, "32"): (64, 64, 32, 4, 2),
}

# (capability, dtype of the activations)
QUANTISED_MATMUL: dict[tuple[int, str], tuple[int, int, int, int, int]] = {
    (80, "16"): (128, 128, 32, 8, 3),
    (80, "32"): (64, 64, 32, 8, 2),
    (90, "16"): (128, 128, 64, 8, 3),
    (90, "32"): (64, 64, 32, 8, 2),
    (100, "16"): (128, 128, 64, 8, 3),
    (100, "32"): (64, 64, 32, 8, 2),
}
