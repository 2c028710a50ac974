"""Fixes how this session runs Triton kernels, before anything imports triton: compiled on a GPU, else interpreted.

Triton decides at its first import whether its own library functions are interpreted, so the variable must be set before
any test module is collected: loading a transformers model imports triton.
"""

import os
import sys

os.environ.setdefault("GOMP_SPINCOUNT", "4000")  # as the command line does, and for the same reason

import torch

assert "triton" not in sys.modules, "triton was imported before tests/conftest.py could choose its mode"

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
