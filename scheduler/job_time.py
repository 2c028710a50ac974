"""How long a pass takes: ``t = a + Σ (b·new + c·new·(cached + new/2))``, fitted at start and refitted from every pass.

``a`` is what a pass costs whatever it holds, ``b`` the work of a token in the linear layers, ``c`` that of a
query-key pair in attention; a segment of ``new`` tokens behind ``cached`` others has ``new·(cached + new/2)`` pairs.
The features are additive: cutting a segment in two changes nothing, so a pass may be described by any segmentation.

The fit is recursive least squares with exponential forgetting in information form (Haykin, *Adaptive Filter Theory*,
ch. 10): relative errors are minimised, since a 16-token pass matters as much as a 16,000-token one; a residual far
outside the usual counts with bounded weight (Huber), since a noisy neighbour only ever adds time; coefficients are kept
non-negative by solving the three-variable problem over its active sets. The first fit stays on as a weak anchor, so
that a long run of passes of one shape cannot let the other coefficients drift.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

__all__ = ["JobTimeModel", "Segment"]

Segment = tuple[int, int]  # new tokens, tokens before them whose KV they attend to
Vector = tuple[float, float, float]

_TOKENS, _PAIRS = 1e3, 1e6  # units of the second and third feature: keeps the normal equations well scaled
_HUBER = 2.0  # residuals beyond so many times the usual one count linearly
_LEAST_USUAL = 0.02  # the usual relative residual is never taken to be smaller
_ANCHOR = 2.0  # observations' worth of trust in the first fit that is never forgotten
_GUESS = 2.0  # observations' worth of trust in coefficients that were given, not fitted; forgotten like any other
_TYPICAL: tuple[Segment, ...] = ((16, 0), (256, 0), (4096, 0), (64, 4096))
_RIDGE = 1e-9  # makes directions that were never observed solvable
_WINDOW = 512  # predictions that the error figures cover


class JobTimeModel:
    """Predicts seconds; learns from what passes took. ``coefficients`` are ``(a, b, c)`` in s, s a token, s a pair.

    Not thread-safe: the caller holds its own lock.
    """

    def __init__(self, a: float = 0.01, b: float = 1e-4, c: float = 1e-9, *, forgetting: float = 0.995) -> None:
        """``a`` in s, ``b`` in s a token, ``c`` in s a pair, used until the first fit. ``forgetting``: weight of the
        previous observation against the newest. Raises ValueError for values out of range."""
        if min(a, b, c) < 0 or not 0 < forgetting <= 1:
            raise ValueError(f"coefficients must not be negative and forgetting lies in (0, 1]: {a, b, c, forgetting}")
        self._learn((a, b * _TOKENS, c * _PAIRS))
        self._anchor = self._theta
        self._forgetting = forgetting
        # Σ w x xᵀ and Σ w x of relative rows, older ones forgotten: at first what the given coefficients would show.
        typical = [(_features([shape]), t) for shape in _TYPICAL if (t := self.predict(*shape)) > 0]
        self._matrix, self._vector = _normal_equations(typical, [_GUESS / len(_TYPICAL)] * len(typical))
        self._anchor_matrix = [[0.0] * 3 for _ in range(3)]
        self._usual = 0.1  # running median of the relative residual
        self._recent: deque[tuple[float, float]] = deque(maxlen=_WINDOW)  # predicted before, measured
        self._fit_r2 = 0.0
        self._observations = 0
        self.underestimate = 0.0  # what one pass in twenty takes longer than predicted, relative; at most 1

    # --- predicting --------------------------------------------------------------------------------------------------

    def predict(self, new: int, cached: int) -> float:
        """Seconds for a pass of one segment."""
        a, b, c = self.coefficients
        return a + new * (b + c * (cached + new / 2))

    def predict_many(self, segments: Iterable[Segment]) -> float:
        """Seconds for one pass over all ``segments``: a single ``a``."""
        return self._dot(_features(segments))

    def marginal(self, new: int, cached: int) -> float:
        """Seconds that a segment adds to a pass that runs anyway."""
        return self.predict(new, cached) - self._theta[0]

    # --- learning ----------------------------------------------------------------------------------------------------

    def fit(self, samples: Sequence[tuple[int, int, float]]) -> None:
        """From scratch, from ``(new, cached, seconds)`` of single passes; forgets what was learnt before.

        Raises ValueError without a single sample of positive time.
        """
        rows = [(_features([(new, cached)]), seconds) for new, cached, seconds in samples if seconds > 0]
        if not rows:
            raise ValueError("a fit needs at least one sample of positive time")
        weights = [1.0] * len(rows)
        for _ in range(5):  # reweighted: a sample far off the others loses its pull
            matrix, vector = _normal_equations(rows, weights)
            self._learn(_non_negative(matrix, vector))
            residuals = [abs(self._dot(x) / t - 1.0) for x, t in rows]
            usual = max(_median(residuals), _LEAST_USUAL)
            weights = [min(1.0, _HUBER * usual / r) if r else 1.0 for r in residuals]
        self._usual = usual
        self._matrix, self._vector = matrix, vector
        self._anchor = self._theta
        share = _ANCHOR / len(rows)
        self._anchor_matrix = [[share * v for v in row] for row in matrix]
        self._recent.clear()
        self.underestimate = 0.0
        self._fit_r2 = _r2([(self._dot(x), t) for x, t in rows])

    def observe(self, segments: Iterable[Segment], seconds: float) -> float:
        """Learns that one pass over ``segments`` took ``seconds``; returns what was predicted before learning it.

        A time that is not a positive finite number teaches nothing.
        """
        features = _features(segments)
        predicted = self._dot(features)
        if not (seconds > 0 and math.isfinite(seconds)):
            return predicted
        self._recent.append((predicted, seconds))
        short = sorted(t / p - 1.0 for p, t in self._recent if p > 0)
        self.underestimate = min(1.0, max(0.0, _quantile(short, 0.95))) if short else 0.0
        self._observations += 1
        residual = abs(predicted / seconds - 1.0)
        weight = 1.0 if residual <= _HUBER * self._usual else _HUBER * self._usual / residual
        # A running median: up or down by a fixed ratio, whatever the size of the surprise.
        self._usual = min(1.0, max(_LEAST_USUAL, self._usual * (1.05 if residual > self._usual else 1 / 1.05)))
        row = [f / seconds for f in features]
        for i in range(3):
            for j in range(3):
                self._matrix[i][j] = self._forgetting * self._matrix[i][j] + weight * row[i] * row[j]
            self._vector[i] = self._forgetting * self._vector[i] + weight * row[i]
        matrix = [[self._matrix[i][j] + self._anchor_matrix[i][j] for j in range(3)] for i in range(3)]
        pulled = _product(self._anchor_matrix, self._anchor)
        self._learn(_non_negative(matrix, [self._vector[i] + pulled[i] for i in range(3)]))
        return predicted

    # --- telling -----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Coefficients, R², and the relative error of predictions made before the pass was observed."""
        a, b, c = self.coefficients
        errors = sorted(abs(p / t - 1.0) for p, t in self._recent)
        return {
            "job_time_fixed_seconds": a,
            "job_time_seconds_per_token": b,
            "job_time_seconds_per_pair": c,
            "job_time_r2": _r2(self._recent) if len(self._recent) > 2 else self._fit_r2,
            "job_time_error_median": _quantile(errors, 0.5),
            "job_time_error_p95": _quantile(errors, 0.95),
            "job_time_observations": float(self._observations),
        }

    def describe(self) -> str:
        """One line for a log."""
        a, b, c = self.coefficients
        r2 = self.stats()["job_time_r2"]
        return f"{a * 1e3:.2f} ms + {b * 1e6:.2f} µs a token + {c * 1e9:.3f} ns a pair, R² {r2:.4f}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values from which ``from_dict`` makes an equal model (its error history aside)."""
        return {
            "theta": list(self._theta),
            "anchor": list(self._anchor),
            "anchor_matrix": self._anchor_matrix,
            "matrix": self._matrix,
            "vector": self._vector,
            "forgetting": self._forgetting,
            "usual": self._usual,
            "r2": self._fit_r2,
        }

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> JobTimeModel:
        """Raises KeyError, TypeError or ValueError for what ``to_dict`` did not write."""
        model = cls(forgetting=float(kept["forgetting"]))
        model._learn(_vector_of(kept["theta"]))
        model._anchor = _vector_of(kept["anchor"])
        model._anchor_matrix = [list(_vector_of(row)) for row in kept["anchor_matrix"]]
        model._matrix = [list(_vector_of(row)) for row in kept["matrix"]]
        model._vector = list(_vector_of(kept["vector"]))
        if min(model._theta) < 0 or len(model._matrix) != 3 or len(model._anchor_matrix) != 3:
            raise ValueError("not a job-time model")
        model._usual, model._fit_r2 = float(kept["usual"]), float(kept["r2"])
        return model

    def _learn(self, theta: Vector) -> None:
        self._theta = theta
        self.coefficients: Vector = (theta[0], theta[1] / _TOKENS, theta[2] / _PAIRS)

    def _dot(self, features: Vector) -> float:
        a, b, c = self._theta
        return a * features[0] + b * features[1] + c * features[2]


def _features(segments: Iterable[Segment]) -> Vector:
    tokens, pairs = 0, 0.0
    for new, cached in segments:
        tokens += new
        pairs += new * (cached + new / 2)
    return 1.0, tokens / _TOKENS, pairs / _PAIRS


def _normal_equations(
    rows: Sequence[tuple[Vector, float]], weights: Sequence[float]
) -> tuple[list[list[float]], list[float]]:
    """Of ``Σ w (x·θ / t − 1)²``."""
    matrix = [[0.0] * 3 for _ in range(3)]
    vector = [0.0] * 3
    for (x, t), w in zip(rows, weights, strict=True):
        for i in range(3):
            for j in range(3):
                matrix[i][j] += w * x[i] * x[j] / (t * t)
            vector[i] += w * x[i] / t
    return matrix, vector


def _non_negative(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> Vector:
    """Minimises ``θᵀMθ/2 − vᵀθ`` over θ ≥ 0: the best feasible one among the solutions of all active sets."""
    best: Vector = (0.0, 0.0, 0.0)
    best_cost = math.inf
    for size in (3, 2, 1):
        for free in combinations(range(3), size):
            solved = _solve([[matrix[i][j] for j in free] for i in free], [vector[i] for i in free])
            if solved is None or min(solved) < 0:
                continue
            theta = [0.0, 0.0, 0.0]
            for i, value in zip(free, solved, strict=True):
                theta[i] = value
            half = sum(theta[i] * (_product(matrix, theta)[i] / 2 - vector[i]) for i in range(3))
            if half < best_cost:
                best, best_cost = (theta[0], theta[1], theta[2]), half
        if size == 3 and best_cost < math.inf:  # the unconstrained optimum is feasible, hence the optimum
            return best
    return best


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float] | None:
    """Gaussian elimination with partial pivoting, rows and columns scaled to a unit diagonal; None if singular."""
    n = len(vector)
    scale = [1.0 / math.sqrt(matrix[i][i]) if matrix[i][i] > 0 else 1.0 for i in range(n)]
    rows = [
        [matrix[i][j] * scale[i] * scale[j] + (_RIDGE if i == j else 0.0) for j in range(n)] + [vector[i] * scale[i]]
        for i in range(n)
    ]
    for k in range(n):
        pivot = max(range(k, n), key=lambda r: abs(rows[r][k]))
        if abs(rows[pivot][k]) < 1e-14:
            return None
        rows[k], rows[pivot] = rows[pivot], rows[k]
        for r in range(k + 1, n):
            factor = rows[r][k] / rows[k][k]
            for j in range(k, n + 1):
                rows[r][j] -= factor * rows[k][j]
    solved = [0.0] * n
    for k in reversed(range(n)):
        solved[k] = (rows[k][n] - sum(rows[k][j] * solved[j] for j in range(k + 1, n))) / rows[k][k]
    return [value * s for value, s in zip(solved, scale, strict=True)]


def _product(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> list[float]:
    return [sum(m * v for m, v in zip(row, vector, strict=True)) for row in matrix]


def _vector_of(values: Sequence[float]) -> Vector:
    first, second, third = values
    return float(first), float(second), float(third)


def _median(values: Sequence[float]) -> float:
    return _quantile(sorted(values), 0.5)


def _quantile(ordered: Sequence[float], q: float) -> float:
    """Of sorted values, the nearest rank; 0 for none."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


def _r2(pairs: Iterable[tuple[float, float]]) -> float:
    """Share of the variance of the measured times that the predictions explain; 0 where there is no variance."""
    both = list(pairs)
    mean = sum(t for _, t in both) / len(both)
    total = sum((t - mean) ** 2 for _, t in both)
    return 1.0 - sum((t - p) ** 2 for p, t in both) / total if total > 0 else 0.0
