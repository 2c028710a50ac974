"""One pass: a packed batch of jobs, computed in small steps.

``steps()`` is a generator: between two steps the pass *is* its hidden rows and its KV pages, so whoever drives it can
leave it lying (park it), run another pass, and come back. Steps are one chunk of rows in one layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from backends.base import BackendError, BadLogits, PromptLogprobs, Readout
from backends.prefill_only.decoder import Decoder
from backends.prefill_only.forest import Forest, JobRows
from backends.prefill_only.pace import Pace
from backends.prefill_only.readout import ROWS_AT_ONCE, LmHead, NextToken, NextTokenAsk, ScoredRow, collect_prompt
from backends.prefill_only.rows import ROW_ALIGN, attention_rows, kv_rows, padded

__all__ = ["PassAnswer", "PassJob", "PrefillPass"]

PROMPT_ROWS_AT_ONCE = 128  # rows of prompt log-probabilities a step


@dataclass(slots=True, eq=False)
class PassJob:
    token_ids: Sequence[int]
    readout: Readout
    cancelled: bool = False

    @property
    def wants_next(self) -> bool:
        r = self.readout
        return r.sampling is not None or r.top_logprobs > 0 or bool(r.token_ids)

    @property
    def reads_last(self) -> bool:
        return self.wants_next or self.readout.pooled == "last" or self.readout.labels

    def scored_positions(self) -> range:
        """Prompt positions whose row scores the token after it."""
        if self.readout.prompt_logprobs is None:
            return range(0)
        return range(max(self.readout.prompt_logprobs_start, 1) - 1, len(self.token_ids) - 1)

    @property
    def first_position_read(self) -> int:
        """Rows before it may come from a cache."""
        if self.readout.pooled == "mean":
            return 0
        scored = self.scored_positions()
        return scored.start if scored else len(self.token_ids) - 1


@dataclass(slots=True)
class PassAnswer:
    next_token: NextToken | None = None
    prompt: PromptLogprobs | None = None
    pooled: tuple[float, ...] = ()
    label_logits: tuple[float, ...] = ()
    error: BackendError | None = None


@dataclass(slots=True)
class _Scoring:
    """Prompt rows that one job wants scored, filled chunk by chunk."""

    rows: list[int]
    targets: list[int]
    scored: list[ScoredRow] = field(default_factory=list)


class PrefillPass:
    """``jobs[i]`` lies at ``forest.jobs[i]``. Pages are the caller's to give and to take back."""

    def __init__(self, decoder: Decoder, head: LmHead | None, forest: Forest, jobs: Sequence[PassJob]) -> None:
        self._decoder, self._head = decoder, head
        self._forest, self.jobs = forest, list(jobs)
        self.answers: list[PassAnswer | None] = [None] * len(jobs)
        self.new_tokens = forest.num_rows
        self._chunk_rows = decoder.chunk_rows
        self._page_tokens = decoder.kv.page_tokens
        self._hidden: torch.Tensor | None = None
        self._done = 0
        self._total = 1

    @property
    def done_fraction(self) -> float:
        """Of the rows times layers. A step late in a long prompt takes longer than an early one."""
        return self._done / self._total

    @property
    def hidden_bytes(self) -> int:
        spec = self._decoder.spec
        return padded(self._forest.num_rows) * spec.hidden_size * self._decoder.weights.embed.element_size()

    @property
    def all_cancelled(self) -> bool:
        return all(job.cancelled for job in self.jobs)

    def steps(self) -> Iterator[None]:
        """Each ``next`` does one step; exhausted when ``answers`` is complete. Stops early when all are cancelled."""
        decoder = self._decoder
        layers = decoder.spec.num_layers
        self._total = max(1, self._forest.num_rows * layers)
        live, pace = self._live_jobs(), Pace(decoder.device)
        hidden = torch.empty(
            padded(self._forest.num_rows), decoder.spec.hidden_size, dtype=decoder.dtype, device=decoder.device
        )
        decoder.embed(torch.tensor(self._forest.token_ids, dtype=torch.int64).to(decoder.device), hidden)
        plan = self._plan()
        for index in range(layers - 1):
            if len(still := self._live_jobs()) < len(live):
                live = still
                if not live:
                    return
                if (kept := self._drop_dead_segments()) is not None:
                    hidden = hidden[kept]
                    plan = self._plan()
            for kv, queries in plan:
                decoder.layer(index, hidden[kv.start : kv.start + kv.count], kv, queries)
                self._done += min(kv.count, self._forest.num_rows - kv.start)
                pace.step_queued()
                yield
                if self.all_cancelled:
                    return
        for kv, _ in plan:
            decoder.layer_kv(layers - 1, hidden[kv.start : kv.start + kv.count], kv)
            pace.step_queued()
            yield
            if self.all_cancelled:
                return
        yield from self._read(hidden)
        self._done = self._total

    # --- layout ------------------------------------------------------------------------------------------------------

    def _live_jobs(self) -> list[int]:
        return [i for i, job in enumerate(self.jobs) if not job.cancelled]

    def _plan(self) -> list:
        forest, device = self._forest, self._decoder.device
        plan = []
        for kv in kv_rows(forest, self._page_tokens, self._chunk_rows, device):
            rows = [(kv.start, min(kv.start + kv.count, forest.num_rows))]
            plan.append((kv, attention_rows(forest.segments, rows, kv.count, self._page_tokens, device)))
        return plan

    def _drop_dead_segments(self) -> torch.Tensor | None:
        """Forgets rows that only cancelled jobs wanted; the indices of the rows that stay, or None for all.

        Possible between two layers: the next one writes its K and V anew, for the rows that are left."""
        alive = [False] * self._forest.num_rows
        for job, rows in zip(self.jobs, self._forest.jobs, strict=True):
            if not job.cancelled:
                for _, row, length in rows.runs:
                    alive[row : row + length] = [True] * length
        if all(alive):
            return None
        old = self._forest
        new_row: dict[int, int] = {}
        kept: list[int] = []
        for row, stays in enumerate(alive):
            if stays:
                new_row[row] = len(kept)
                kept.append(row)
        segments = [s for s in old.segments if alive[s.row_start]]
        for segment in segments:
            segment.row_start = new_row[segment.row_start]
        jobs = [
            rows
            if job.cancelled
            else JobRows([(p, new_row[r], n) for p, r, n in rows.runs], rows.cached_tokens, rows.shared_tokens)
            for job, rows in zip(self.jobs, old.jobs, strict=True)
        ]
        self._forest = Forest(
            [old.token_ids[r] for r in kept],
            [old.positions[r] for r in kept],
            [old.pages[r] for r in kept],
            [old.pooled[r] for r in kept],
            segments,
            jobs,
        )
        padding = [kept[-1]] * (padded(len(kept)) - len(kept))
        return torch.tensor(kept + padding, device=self._decoder.device)

    # --- the rows that are read --------------------------------------------------------------------------------------

    def _read(self, hidden: torch.Tensor) -> Iterator[None]:
        """The last layer's queries and the LM head, for asked rows alone."""
        decoder, forest = self._decoder, self._forest
        scorings: dict[int, _Scoring] = {}
        asked: set[int] = set()
        for i in self._live_jobs():
            job, rows = self.jobs[i], forest.jobs[i]
            if job.reads_last:
                asked.add(rows.last_row)
            if job.readout.pooled == "mean":
                asked.update(_rows_of(rows, range(len(job.token_ids))))
            positions = job.scored_positions()
            if positions:
                scoring = _Scoring(_rows_of(rows, positions), [job.token_ids[p + 1] for p in positions])
                scorings[i] = scoring
                asked.update(scoring.rows)
        ordered = sorted(asked)
        at = {row: i for i, row in enumerate(ordered)}
        normed = torch.empty(len(ordered), decoder.spec.hidden_size, dtype=decoder.dtype, device=decoder.device)
        for start in range(0, len(ordered), self._chunk_rows):
            part = ordered[start : start + self._chunk_rows]
            count = padded(len(part))
            gathered = hidden[torch.tensor(part + [part[-1]] * (count - len(part)), device=decoder.device)]
            queries = attention_rows(forest.segments, _ranges(part), count, self._page_tokens, decoder.device)
            decoder.layer_queries(decoder.spec.num_layers - 1, gathered, queries)
            normed[start : start + len(part)] = decoder.final_norm(gathered)[: len(part)]
            yield
        if self._head is not None:
            yield from self._read_next(self._head, normed, at)
            yield from self._read_prompts(self._head, normed, at, scorings)
        self._read_states(normed, at)
        for i in self._live_jobs():
            answer = self.answers[i] = self.answers[i] or PassAnswer()
            r = self.jobs[i].readout
            if r.prompt_logprobs is not None and i not in scorings:
                answer.prompt = PromptLogprobs(max(r.prompt_logprobs_start, 1), [], [])

    def _read_states(self, normed: torch.Tensor, at: dict[int, int]) -> None:
        """Pooled hidden states and label logits."""
        score = self._decoder.weights.score
        for i in self._live_jobs():
            job, rows = self.jobs[i], self._forest.jobs[i]
            answer = self.answers[i] = self.answers[i] or PassAnswer()
            state = None
            if job.readout.pooled == "last":
                state = normed[at[rows.last_row]].float()
            elif job.readout.pooled == "mean":
                places = [at[row] for row in _rows_of(rows, range(len(job.token_ids)))]
                state = normed[torch.tensor(places, device=normed.device)].float().mean(0)
            if state is not None:
                answer.pooled = tuple(state.tolist())
            if job.readout.labels and score is not None:
                last = normed[at[rows.last_row]].expand(ROW_ALIGN, -1).contiguous()
                answer.label_logits = tuple(score(last)[0].float().tolist())
            if not all(map(math.isfinite, (*answer.pooled, *answer.label_logits))):
                answer.error = BadLogits("the model's output for this prompt is not a number")

    def _read_next(self, head: LmHead, normed: torch.Tensor, at: dict[int, int]) -> Iterator[None]:
        wanting = [i for i in self._live_jobs() if self.jobs[i].wants_next]
        for start in range(0, len(wanting), ROWS_AT_ONCE):
            part = wanting[start : start + ROWS_AT_ONCE]
            rows = torch.tensor([at[self._forest.jobs[i].last_row] for i in part], device=normed.device)
            asks = [
                NextTokenAsk(r.sampling, r.top_logprobs, r.token_ids, self.jobs[i].token_ids)
                for i in part
                for r in (self.jobs[i].readout,)
            ]
            for i, answer in zip(part, head.next_tokens(normed[rows], asks), strict=True):
                if isinstance(answer, BadLogits):
                    self.answers[i] = PassAnswer(error=answer)
                else:
                    self.answers[i] = PassAnswer(next_token=answer)
            yield

    def _read_prompts(
        self, head: LmHead, normed: torch.Tensor, at: dict[int, int], scorings: dict[int, _Scoring]
    ) -> Iterator[None]:
        for i, scoring in scorings.items():
            job = self.jobs[i]
            k = job.readout.prompt_logprobs or 0
            for start in range(0, len(scoring.rows), PROMPT_ROWS_AT_ONCE):
                if job.cancelled:
                    break
                part = scoring.rows[start : start + PROMPT_ROWS_AT_ONCE]
                targets = torch.tensor(scoring.targets[start : start + PROMPT_ROWS_AT_ONCE], device=normed.device)
                rows = torch.tensor([at[row] for row in part], device=normed.device)
                scoring.scored.extend(head.prompt_chunk(normed[rows], targets, k)[: len(part)])
                yield
            answer = self.answers[i] = self.answers[i] or PassAnswer()
            if job.cancelled or answer.error is not None:
                continue
            try:
                start_position = job.scored_positions().start + 1
                answer.prompt = collect_prompt(scoring.scored, job.token_ids, start_position, k)
            except BadLogits as error:
                answer.error = error


def _rows_of(rows: JobRows, positions: range) -> list[int]:
    """Rows of consecutive prompt positions, all of which the pass computes."""
    found: list[int] = []
    for pos, row, length in rows.runs:
        first, last = max(pos, positions.start), min(pos + length, positions.stop)
        found.extend(range(row + first - pos, row + last - pos))
    return found


def _ranges(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending rows as maximal (start, stop) ranges."""
    ranges: list[tuple[int, int]] = []
    for row in rows:
        if ranges and ranges[-1][1] == row:
            ranges[-1] = (ranges[-1][0], row + 1)
        else:
            ranges.append((row, row + 1))
    return ranges
