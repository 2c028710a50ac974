import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.ordered_sums import OrderedSums

places = st.tuples(st.floats(-100, 100) | st.sampled_from([0.0, 1.0]), st.integers(0, 1000))


@given(st.lists(st.tuples(places, st.floats(0, 10)), max_size=60), st.data())
def test_it_agrees_with_a_sorted_list(entries: list[tuple[tuple[float, int], float]], data: st.DataObject) -> None:
    reference = dict(entries)
    sums = OrderedSums()
    for place, value in reference.items():
        sums.add(place, value)
    for place in data.draw(st.lists(st.sampled_from(sorted(reference)), unique=True) if reference else st.just([])):
        sums.remove(place)
        del reference[place]
    assert list(sums) == sorted(reference)
    assert len(sums) == len(reference)
    assert sums.total() == pytest.approx(sum(reference.values()))
    place = data.draw(places)
    assert sums.sum_before(place) == pytest.approx(sum(v for p, v in reference.items() if p < place))


def test_it_agrees_across_many_buckets() -> None:
    sums = OrderedSums()
    order = [(i * 7919) % 5003 for i in range(5003)]
    for i in order:
        sums.add((float(i), i), float(i))
    assert list(sums) == [(float(i), i) for i in range(5003)]
    for i in order[:2500]:
        sums.remove((float(i), i))
    left = sorted(order[2500:])
    assert list(sums) == [(float(i), i) for i in left]
    for key in (0, 17, 2500, 5003):
        assert sums.sum_before((float(key), 0)) == sum(i for i in left if i < key)
    assert sums.first() == (float(left[0]), left[0])


def test_removing_what_is_not_there_is_an_error() -> None:
    sums = OrderedSums()
    with pytest.raises(KeyError):
        sums.remove((1.0, 1))
    sums.add((1.0, 1), 2.0)
    with pytest.raises(KeyError):
        sums.remove((1.0, 2))
    with pytest.raises(KeyError):
        sums.remove((2.0, 1))


def test_equal_keys_are_told_apart_by_identity_across_buckets() -> None:
    sums = OrderedSums()
    for i in range(0, 2000, 2):
        sums.add((1.0, i), 1.0)
    for i in range(1, 2000, 2):
        sums.add((1.0, i), 1.0)
    assert [i for _, i in sums] == list(range(2000))
    for i in range(0, 2000, 3):
        sums.remove((1.0, i))
    assert [i for _, i in sums] == [i for i in range(2000) if i % 3]
    assert sums.sum_before((1.0, 0)) == 0.0
    assert sums.sum_before((1.0, 1000)) == sum(1 for i in range(1000) if i % 3)
    assert sums.sum_before((1.1, 0)) == len(sums)
