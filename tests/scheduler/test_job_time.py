import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.job_time import JobTimeModel

A, B, C = 0.004, 2.5e-4, 3e-8


def truth(segments: list[tuple[int, int]]) -> float:
    return A + sum(B * n + C * n * (k + n / 2) for n, k in segments)


def profile(noise: float = 0.0, seed: int = 0) -> list[tuple[int, int, float]]:
    rng = random.Random(seed)
    shapes = [(16, 0), (64, 0), (160, 0), (384, 0), (768, 0), (1536, 0), (3072, 0), (64, 2048), (384, 2048)]
    return [(n, k, truth([(n, k)]) * math.exp(rng.gauss(0, noise))) for n, k in shapes]


def test_a_fit_finds_the_coefficients_of_exact_samples() -> None:
    model = JobTimeModel()
    model.fit(profile())
    assert model.coefficients == pytest.approx((A, B, C), rel=1e-4)
    assert model.stats()["job_time_r2"] > 0.9999


def test_a_fit_shrugs_off_one_sample_that_a_neighbour_disturbed() -> None:
    samples = profile(0.01)
    samples[4] = (samples[4][0], samples[4][1], samples[4][2] * 3)
    model = JobTimeModel()
    model.fit(samples)
    for n, k, _ in samples:
        assert model.predict(n, k) == pytest.approx(truth([(n, k)]), rel=0.1)


@given(
    st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 5000)), min_size=1, max_size=5),
    st.integers(1, 4999),
)
def test_a_segment_cut_in_two_takes_as_long(segments: list[tuple[int, int]], cut: int) -> None:
    model = JobTimeModel(A, B, C)
    n, k = segments[0]
    at = cut % n
    halves = [(at, k), (n - at, k + at), *segments[1:]]
    assert model.predict_many(halves) == pytest.approx(model.predict_many(segments))


def test_a_pass_pays_its_fixed_cost_once() -> None:
    model = JobTimeModel(A, B, C)
    assert model.predict_many([(10, 0), (20, 5)]) == pytest.approx(model.predict(10, 0) + model.predict(20, 5) - A)


def drive(model: JobTimeModel, rng: random.Random, passes: int, slow: float = 1.0, noise: float = 0.03) -> None:
    for _ in range(passes):
        segments = [(rng.randint(16, 4000), rng.choice((0, 512, 4096))) for _ in range(rng.randint(1, 3))]
        model.observe(segments, slow * truth(segments) * math.exp(rng.gauss(0, noise)))


def test_refitting_converges_from_a_wrong_start() -> None:
    model = JobTimeModel(0.05, 1e-3, 1e-7)
    drive(model, random.Random(1), 1500)
    for shape in [(64, 0), (1000, 0), (4000, 4096)]:
        assert model.predict(*shape) == pytest.approx(truth([shape]), rel=0.05)


def test_refitting_follows_a_machine_that_became_slower() -> None:
    model = JobTimeModel()
    model.fit(profile(0.02))
    rng = random.Random(2)
    drive(model, rng, 400)
    drive(model, rng, 1500, slow=1.6)
    assert model.predict(1000, 0) == pytest.approx(1.6 * truth([(1000, 0)]), rel=0.07)


def test_outliers_barely_move_it() -> None:
    model = JobTimeModel()
    model.fit(profile(0.02))
    rng = random.Random(3)
    for i in range(600):
        segments = [(rng.randint(16, 4000), 0)]
        disturbed = 5.0 if i % 20 == 0 else 1.0
        model.observe(segments, truth(segments) * disturbed * math.exp(rng.gauss(0, 0.03)))
    assert model.predict(1000, 0) == pytest.approx(truth([(1000, 0)]), rel=0.05)
    assert model.stats()["job_time_error_median"] < 0.05


def test_passes_of_one_shape_do_not_spoil_the_rest() -> None:
    model = JobTimeModel()
    model.fit(profile(0.01))
    rng = random.Random(4)
    for _ in range(3000):
        model.observe([(64, 0)], truth([(64, 0)]) * math.exp(rng.gauss(0, 0.05)))
    assert model.predict(4000, 0) == pytest.approx(truth([(4000, 0)]), rel=0.15)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 10_000), st.integers(0, 100_000), st.floats(1e-6, 1e3)),
        min_size=1,
        max_size=40,
    )
)
def test_coefficients_never_turn_negative(observed: list[tuple[int, int, float]]) -> None:
    model = JobTimeModel()
    for new, cached, seconds in observed:
        model.observe([(new, cached)], seconds)
        assert min(model.coefficients) >= 0
        assert all(math.isfinite(c) for c in model.coefficients)
    model.fit(observed)
    assert min(model.coefficients) >= 0


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_a_senseless_time_teaches_nothing(seconds: float) -> None:
    model = JobTimeModel(A, B, C)
    before = model.coefficients
    assert model.observe([(100, 0)], seconds) == pytest.approx(truth([(100, 0)]))
    assert model.coefficients == before


def test_it_is_kept_as_json_and_goes_on_learning_alike() -> None:
    model = JobTimeModel()
    model.fit(profile(0.02))
    drive(model, random.Random(5), 50)
    kept = JobTimeModel.from_dict(json.loads(json.dumps(model.to_dict())))
    assert kept.coefficients == model.coefficients
    drive(model, random.Random(6), 20)
    drive(kept, random.Random(6), 20)
    assert kept.coefficients == pytest.approx(model.coefficients)


@pytest.mark.parametrize("spoilt", [{}, {"theta": [1, 2]}, {"theta": [-1.0, 0.0, 0.0]}])
def test_a_file_that_is_no_model_is_refused(spoilt: dict[str, object]) -> None:
    good = JobTimeModel().to_dict()
    with pytest.raises((KeyError, TypeError, ValueError)):
        JobTimeModel.from_dict({**good, **spoilt} if spoilt else {})


def test_errors_are_those_of_predictions_made_before_the_pass() -> None:
    model = JobTimeModel(A, B, C)
    model.observe([(1000, 0)], truth([(1000, 0)]) / 2)
    assert model.stats()["job_time_error_median"] == pytest.approx(1.0)
