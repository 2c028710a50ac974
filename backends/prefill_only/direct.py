"""Runs one pass at once, without a scheduler or a prefix cache: for the profile run, checks and benchmarks."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import islice

import torch

from backends.base import Readout
from backends.prefill_only.block_hashes import block_hashes
from backends.prefill_only.decoder import Decoder
from backends.prefill_only.forest import ForestJob, build_forest
from backends.prefill_only.prefill_pass import PassAnswer, PassJob, PrefillPass
from backends.prefill_only.readout import LmHead

__all__ = ["DirectPass", "probe_job", "run_directly"]


class DirectPass:
    """A pass over ``jobs`` that holds scratch pages until ``run`` has ended.

    ``cached_blocks``: how many leading blocks of every job to read from pool pages 0, 1, ... as they are, uncomputed:
    right for timing, wrong for results unless the caller filled them.
    """

    def __init__(self, decoder: Decoder, head: LmHead | None, jobs: Sequence[PassJob], cached_blocks: int = 0) -> None:
        self._kv = decoder.kv
        self._scratch: list[int] = []
        page_tokens = self._kv.page_tokens
        cached = [self._kv.pool_address(page) for page in range(cached_blocks)]
        forest_jobs = [
            ForestJob(job.token_ids, block_hashes(job.token_ids, page_tokens, b"direct"), cached) for job in jobs
        ]
        forest = build_forest(forest_jobs, page_tokens, lambda _: None, self._page)
        self.work = PrefillPass(decoder, head, forest, jobs)
        self.longest_step_s = 0.0

    def _page(self) -> int:
        self._scratch.extend(self._kv.take_scratch(1))
        return self._scratch[-1]

    def run(self, most_steps: int | None = None) -> float:
        """Seconds. The answers are in ``work.answers``, unless it ended after ``most_steps``."""
        start = before = time.perf_counter()
        try:
            for _ in islice(self.work.steps(), most_steps):
                now = time.perf_counter()
                self.longest_step_s = max(self.longest_step_s, now - before)
                before = now
            if self._kv.k.is_cuda:  # cut short, it has read nothing that it would have waited for
                torch.cuda.synchronize(self._kv.k.device)
        finally:
            self._kv.give_back(self._scratch)
        return time.perf_counter() - start


def probe_job(decoder: Decoder, head: LmHead | None, tokens: int, seed: int, *, top: int = 1) -> PassJob:
    """A random prompt of ``tokens``, no longer than the model takes, and a readout that the model has."""
    rng = random.Random(seed)
    prompt = [rng.randrange(decoder.spec.vocab_size) for _ in range(min(tokens, decoder.max_positions))]
    return PassJob(prompt, Readout(pooled="last") if head is None else Readout(top_logprobs=top))


def run_directly(decoder: Decoder, head: LmHead | None, jobs: Sequence[PassJob]) -> list[PassAnswer]:
    """The answers of one pass over ``jobs``, in order."""
    direct = DirectPass(decoder, head, jobs)
    direct.run()
    return [answer or PassAnswer() for answer in direct.work.answers]
