"""Puts the engine together: model, memory, decoder, job times, scheduler, thread. Blocks while the model loads."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from backends.base import Tokenizer
from backends.prefill_only.company_check import check_company
from backends.prefill_only.decoder import Decoder
from backends.prefill_only.engine import Engine
from backends.prefill_only.kv_pages import KvPages
from backends.prefill_only.memory import (
    CHUNK_ROWS_CPU,
    CHUNK_ROWS_GPU,
    PAGE_TOKENS,
    MemoryPlan,
    free_bytes,
    plan_memory,
    workspace_bytes,
)
from backends.prefill_only.metrics import EngineMetrics
from backends.prefill_only.models.loader import LoadedModel, load
from backends.prefill_only.models.packed_linear import pack_linears
from backends.prefill_only.models.spec import ModelSpec
from backends.prefill_only.models.weights import ModelWeights
from backends.prefill_only.profile_run import choose_chunk_rows, profile_run
from backends.prefill_only.readout import LmHead
from backends.prefill_only.settings import EngineSettings
from backends.prefill_only.text import load_tokenizer
from backends.prefill_only.warm_up import warm_up
from kernels.dispatch import count_compilations, describe_kernels
from scheduler.job_time import JobTimeModel
from scheduler.prefix_index import PrefixIndex
from scheduler.scheduler import Scheduler, SchedulerConfig

__all__ = ["Started", "start_engine"]

log = logging.getLogger("onepass.engine")

_PROFILE_BUDGET_S = 5.0
_QUEUED_PROMPTS = 256  # longest prompts' worth of tokens that may wait, unless ONEPASS_MAX_QUEUE_TOKENS says
_SATURATED = 0.95  # of the device's token rate

Report = Callable[[float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    engine: Engine
    tokenizer: Tokenizer
    spec: ModelSpec
    memory: MemoryPlan
    fingerprint: str


@torch.inference_mode()
def start_engine(settings: EngineSettings, metrics: EngineMetrics, report: Report) -> Started:
    """Raises what loading raises: ModelNotFound, UnsupportedModel, CheckpointError, MemoryError, ValueError."""
    begun = time.monotonic()
    model = load(
        settings.model,
        load_format=settings.load_format,
        dtype=settings.dtype,
        device=settings.device,
        progress=report,
    )
    spec, weights = model.spec, model.weights
    device, dtype = weights.embed.device, weights.embed.dtype
    packed = pack_linears(weights)
    tokenizer = load_tokenizer(
        model.path,
        vocab_rows=spec.vocab_size,
        eos_token_ids=model.eos_token_ids,
        control_tokens_in_content=settings.control_tokens_in_content,
    )
    chunk_rows = CHUNK_ROWS_CPU if device.type == "cpu" else CHUNK_ROWS_GPU
    memory = plan_memory(
        spec,
        element_bytes=dtype.itemsize,
        free=free_bytes(device),
        workspace_bytes=workspace_bytes(spec, chunk_rows, dtype.itemsize),
        kv_cache_bytes=settings.kv_cache_bytes,
        max_model_len=settings.max_model_len,
        on_cpu=device.type == "cpu",
    )
    log.info(
        "memory: weights %s, prefix cache %d pages of %d tokens, longest prompt %d tokens (limited by the %s)",
        _megabytes(weights.nbytes), memory.pool_pages, PAGE_TOKENS, memory.max_model_len, memory.limited_by,
    )  # fmt: skip
    kv = KvPages(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_tokens=PAGE_TOKENS,
        pool_pages=memory.pool_pages,
        scratch_pages=memory.scratch_pages,
        dtype=dtype,
        device=device,
    )
    decoder = Decoder(spec, weights, kv, max_positions=memory.max_model_len, chunk_rows=chunk_rows)
    head = _lm_head(spec, weights)
    report(0.0, "warming up")
    choose_chunk_rows(decoder, head)
    warm_up(decoder, head)
    times = _job_times(settings, model, decoder, head, report)
    _check_company(decoder, head, metrics)
    scheduler = Scheduler(
        SchedulerConfig(
            policy=settings.scheduler,
            fairness=settings.fairness,
            block_tokens=PAGE_TOKENS,
            saturation_tokens=_saturation_tokens(times),
            max_queue=settings.max_queue,
            max_queue_tokens=settings.max_queue_tokens or _QUEUED_PROMPTS * memory.max_model_len,
            max_queue_s=settings.max_queue_s,
            tenant_max_queue=settings.tenant_max_queue,
            tenant_weights=settings.tenant_weights,
            default_deadline_s=settings.default_deadline_s,
        ),
        times,
        PrefixIndex(memory.pool_pages),
    )
    engine = Engine(decoder, head, scheduler, metrics)
    count_compilations(device)
    engine.start()
    kernels = describe_kernels(device) + (", packed weights" if packed else "")
    metrics.build.info(
        {"device": str(device), "dtype": str(dtype).removeprefix("torch."), "kernels": kernels, "model": settings.model}
    )
    log.info(
        "ready in %.1f s: %s, %s on %s, kernels %s, %d threads, chunks of %d rows",
        time.monotonic() - begun, settings.model, dtype, device, kernels, torch.get_num_threads(), decoder.chunk_rows,
    )  # fmt: skip
    return Started(engine=engine, tokenizer=tokenizer, spec=spec, memory=memory, fingerprint=model.fingerprint)


def _lm_head(spec: ModelSpec, weights: ModelWeights) -> LmHead | None:
    if weights.lm_head is None:  # a classifier, or an embedding model
        return None
    return LmHead(weights.lm_head, soft_cap=spec.final_soft_cap, scale=spec.logit_scale)


def _job_times(
    settings: EngineSettings, model: LoadedModel, decoder: Decoder, head: LmHead | None, report: Report
) -> JobTimeModel:
    """From the profile cache if this model was profiled on this device with this build, else measured."""
    key = _profile_key(model.fingerprint, decoder)
    cache = settings.profile_cache and settings.profile_cache / f"job-times-{key[:16]}.json"
    if cache is not None and cache.is_file():
        try:
            kept = json.loads(cache.read_text())
            if kept["key"] == key:
                log.info("job times as measured before, kept in %s", cache)
                return JobTimeModel.from_dict(kept["times"])
        except (OSError, ValueError, KeyError, TypeError):
            log.warning("%s is not a profile; measuring anew", cache)
    times = JobTimeModel()
    profile = profile_run(decoder, head, longest=decoder.max_positions, budget_s=_PROFILE_BUDGET_S, report=report)
    times.fit([*profile.samples, *profile.estimates])
    log.info("profile run: %s; longest step %.1f ms", times.describe(), profile.longest_step_s * 1e3)
    if cache is not None and profile.complete:
        try:
            cache.parent.mkdir(parents=True, exist_ok=True)
            cache.write_text(json.dumps({"key": key, "times": times.to_dict()}))
        except OSError as error:
            log.info("job times are not kept: %s", error)
    return times


def _profile_key(fingerprint: str, decoder: Decoder) -> str:
    parts = (
        fingerprint,
        str(decoder.device),
        platform.node(),
        importlib.metadata.version("onepass"),
        str(torch.get_num_threads()),
        torch.__version__,
        describe_kernels(decoder.device),
        str(decoder.chunk_rows),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _saturation_tokens(times: JobTimeModel) -> int:
    """New tokens in a pass at which its fixed cost is small beside the rest."""
    alone, double = times.predict(1024, 0), times.predict(2048, 0)
    per_token = max((double - alone) / 1024, 1e-9)
    fixed = max(0.0, times.predict(1, 0) - per_token)
    return max(256, min(8192, int(fixed / per_token * _SATURATED / (1 - _SATURATED))))


def _check_company(decoder: Decoder, head: LmHead | None, metrics: EngineMetrics) -> None:
    held = check_company(decoder, head)
    for part, holds in held.items():
        metrics.company.labels(part).set(holds)
    if all(held.values()):
        log.info("answers do not depend on what is computed beside them, bit for bit")
    else:
        log.warning("answers may differ in their last bits with what is computed beside them (%s)",
                    ", ".join(f"{part} {'same' if holds else 'differ'}" for part, holds in held.items()))  # fmt: skip


def _megabytes(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
