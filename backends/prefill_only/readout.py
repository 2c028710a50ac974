"""Reduces hidden rows to what was asked: drawn tokens, most likely tokens, named tokens, prompt log-probabilities.

Logits exist for ``ROWS_AT_ONCE`` rows at a time, in float32, and never for a whole prompt. Log-probabilities are those
of the raw distribution; only the draw sees temperature, bias and masks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from backends.base import BadLogits, PromptLogprobs, Sampling, TokenLogprob
from backends.prefill_only.models.linear import Linear
from backends.prefill_only.rows import ROW_ALIGN, padded
from kernels.lm_head_readout import head_logits, lm_head_readout

__all__ = ["FLOOR", "ROWS_AT_ONCE", "LmHead", "NextToken", "NextTokenAsk", "ScoredRow", "collect_prompt"]

FLOOR = -9999.0  # an impossible token's log-probability, as OpenAI documents it
ROWS_AT_ONCE = 64


@dataclass(slots=True)
class NextTokenAsk:
    """What one job wants of the distribution after its prompt."""

    sampling: Sampling | None
    top: int
    named: Sequence[int]
    prompt_ids: Sequence[int]  # for the repetition penalty


@dataclass(slots=True)
class NextToken:
    drawn: tuple[TokenLogprob, ...]
    top: tuple[TokenLogprob, ...]
    named: tuple[TokenLogprob, ...]


class LmHead:
    """The output projection of a model, ``[vocab, hidden]``."""

    def __init__(self, linear: Linear, *, soft_cap: float = 0.0, scale: float = 1.0) -> None:
        if linear.bias is not None:
            raise ValueError("a language-model head with a bias is not supported")
        self._linear, self._soft_cap, self._scale = linear, soft_cap, scale
        self.vocab = linear.out_features

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 ``[padded rows, vocab]`` for at most ``ROWS_AT_ONCE`` normed rows ``[rows, hidden]``.

        Reductions over it stay padded too: torch splits a row among threads only when there are few rows."""
        logits = head_logits(hidden, self._linear.weight).float()
        if rows := -hidden.shape[0] % ROW_ALIGN:
            logits = torch.cat([logits, logits.new_zeros(rows, self.vocab)])
        if self._scale != 1.0:
            logits *= self._scale
        if self._soft_cap:
            logits = torch.tanh_(logits / self._soft_cap).mul_(self._soft_cap)
        return logits

    def next_tokens(self, hidden: torch.Tensor, asks: Sequence[NextTokenAsk]) -> list[NextToken | BadLogits]:
        """One answer an ask, in order; row i of ``hidden`` (normed) belongs to ask i."""
        logits = self.logits(hidden)
        log_z = torch.logsumexp(logits, dim=1)
        best = logits.argmax(dim=1)
        k = max(ask.top for ask in asks)
        values, ids = (t.tolist() for t in torch.topk(logits, k, dim=1)) if k else ([], [])
        log_zs, bests = log_z.tolist(), best.tolist()
        answers: list[NextToken | BadLogits] = []
        for row, ask in enumerate(asks):
            z = log_zs[row]
            if not math.isfinite(z):
                answers.append(BadLogits("the model's output for this prompt is not a number"))
                continue
            drawn = self._draw(logits[row], ask, bests[row])
            top: list[TokenLogprob] = []
            if ask.top:
                ranked = sorted(zip(values[row], ids[row], strict=True), key=lambda e: (-e[0], e[1]))[: ask.top]
                if bests[row] not in (i for _, i in ranked):  # a tie at the top, cut off by k
                    ranked = [(ranked[0][0], bests[row]), *ranked[:-1]]
                top = [TokenLogprob(i, _log_probability(v, z), r) for r, (v, i) in enumerate(ranked, 1)]
            answers.append(
                NextToken(
                    tuple(_look_up(logits[row], z, drawn, top)),
                    tuple(top),
                    tuple(_look_up(logits[row], z, list(ask.named), [])),
                )
            )
        return answers

    def prompt_chunk(self, hidden: torch.Tensor, targets: torch.Tensor, top: int) -> list[ScoredRow]:
        """For normed rows ``[rows, hidden]`` and the tokens ``targets`` (int64 ``[rows]``) that came next."""
        rows = hidden.shape[0]
        if rows % ROW_ALIGN:
            extra = padded(rows) - rows
            hidden = torch.cat([hidden, hidden.new_zeros(extra, hidden.shape[1])])
            targets = torch.cat([targets, targets.new_zeros(extra)])
        read = lm_head_readout(
            hidden, self._linear.weight, targets=targets, top_k=top, soft_cap=self._soft_cap, scale=self._scale
        )
        assert read.target_logit is not None and read.target_rank is not None  # targets were given
        log_z, target, rank = read.lse.tolist(), read.target_logit.tolist(), read.target_rank.tolist()
        ids = [[]] * rows if read.top_ids is None else read.top_ids.tolist()
        values = [[]] * rows if read.top_values is None else read.top_values.tolist()
        return [ScoredRow(log_z[i], target[i], rank[i], list(zip(values[i], ids[i], strict=True))) for i in range(rows)]

    def _draw(self, logits: torch.Tensor, ask: NextTokenAsk, best: int) -> list[int]:
        s = ask.sampling
        if s is None:
            return []
        shaped = s.logit_bias or s.allowed_token_ids is not None or s.banned_token_ids or s.repetition_penalty != 1.0
        if s.temperature < 1e-5 and not shaped:
            return [best] * s.n
        if shaped:
            logits = _shape(logits.clone(), s, ask.prompt_ids)
        if s.temperature < 1e-5:
            return [int(logits.argmax())] * s.n
        return _sample(logits, s)


@dataclass(slots=True)
class ScoredRow:
    log_z: float
    target_logit: float
    target_rank: int
    top: list[tuple[float, int]]

    def entry(self, token_id: int, k: int) -> tuple[TokenLogprob, list[TokenLogprob]]:
        if not math.isfinite(self.log_z):
            raise BadLogits("the model's output for this prompt is not a number")
        ranked = sorted(self.top, key=lambda e: (-e[0], e[1]))[:k]
        actual = TokenLogprob(token_id, _log_probability(self.target_logit, self.log_z), self.target_rank)
        return actual, [TokenLogprob(i, _log_probability(v, self.log_z), r) for r, (v, i) in enumerate(ranked, 1)]


def collect_prompt(scored: Sequence[ScoredRow], token_ids: Sequence[int], start: int, k: int) -> PromptLogprobs:
    """``scored[i]`` is about prompt position ``start + i``."""
    entries = [row.entry(token_ids[start + i], k) for i, row in enumerate(scored)]
    return PromptLogprobs(start, [actual for actual, _ in entries], [top for _, top in entries])


def _log_probability(logit: float, log_z: float) -> float:
    value = logit - log_z
    return value if value > FLOOR else FLOOR


def _look_up(logits: torch.Tensor, log_z: float, ids: list[int], known: Sequence[TokenLogprob]) -> list[TokenLogprob]:
    ranked = {entry.token_id: entry for entry in known}
    missing = [i for i in dict.fromkeys(ids) if i not in ranked]
    if missing:
        values = logits[torch.tensor(missing, device=logits.device)]
        ranks = (logits.unsqueeze(0) > values.unsqueeze(1)).sum(dim=1).tolist()
        for token_id, value, above in zip(missing, values.tolist(), ranks, strict=True):
            ranked[token_id] = TokenLogprob(token_id, _log_probability(value, log_z), above + 1)
    return [ranked[i] for i in ids]


def _shape(logits: torch.Tensor, s: Sampling, prompt_ids: Sequence[int]) -> torch.Tensor:
    """Applies everything but temperature and truncation, in the order in which vLLM does."""
    device = logits.device
    if s.allowed_token_ids is not None:
        keep = torch.tensor(s.allowed_token_ids, device=device)
        masked = torch.full_like(logits, -math.inf)
        masked[keep] = logits[keep]
        logits = masked
    if s.banned_token_ids:
        logits[torch.tensor(s.banned_token_ids, device=device)] = -math.inf
    if s.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(prompt_ids)), device=device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
    if s.logit_bias:
        logits[torch.tensor(list(s.logit_bias), device=device)] += torch.tensor(
            list(s.logit_bias.values()), dtype=logits.dtype, device=device
        )
    return logits


def _sample(logits: torch.Tensor, s: Sampling) -> list[int]:
    """``s.n`` draws by inverting the cumulative distribution, in float64."""
    order: torch.Tensor | None = None
    scaled = logits.double() / s.temperature
    if 0 < s.top_k < scaled.shape[0]:
        scaled, order = torch.topk(scaled, s.top_k)
    if s.top_p < 1.0 and order is None:
        scaled, order = torch.sort(scaled, descending=True)
    probabilities = torch.softmax(scaled, dim=0)
    if s.top_p < 1.0:  # the smallest set whose mass reaches top_p, the most likely token always in it
        before = probabilities.cumsum(0) - probabilities
        probabilities = torch.where(before < s.top_p, probabilities, 0.0)
    if s.min_p > 0.0:
        probabilities = torch.where(probabilities >= s.min_p * probabilities.max(), probabilities, 0.0)
    cumulative = probabilities.cumsum(0)
    rng = random.Random(s.seed)
    points = torch.tensor([rng.random() for _ in range(s.n)], dtype=torch.float64, device=cumulative.device)
    picks = torch.searchsorted(cumulative, points * cumulative[-1], right=True)
    last = int(torch.nonzero(probabilities)[-1])  # rounding may push a point past the last possible token
    picks = picks.clamp_(max=last)
    return (picks if order is None else order[picks]).tolist()
