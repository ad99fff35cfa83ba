import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from composable.data.order import Order, permute

# Parts of the format: runs resume by them.
PERMUTATION_OF_10 = [9, 4, 0, 6, 2, 8, 1, 3, 5, 7]
START_OF_A_MILLION = [700092, 181914, 713804, 347729]
TWO_EPOCHS = [0, 1, 6, 9, 2, 5, 8, 3, 4, 7, 6, 2, 1, 8, 4, 9, 5, 7, 0, 3]


@pytest.mark.parametrize("key", [0, 1, -5, 1 << 70])
def test_every_key_names_a_permutation(key):
    for n in range(1, 301):
        assert sorted(permute(index, n, key) for index in range(n)) == list(range(n))


@pytest.mark.parametrize("n", [10_007, 1 << 16, (1 << 16) + 1])
def test_large_ranges_are_permuted(n):
    assert len({permute(index, n, 3) for index in range(n)}) == n


@given(st.integers(2, 1 << 63), st.integers(0, 1 << 64), st.data())
def test_no_two_indices_meet(n, key, data):
    indices = data.draw(st.sets(st.integers(0, n - 1), min_size=2, max_size=20))
    images = {permute(index, n, key) for index in indices}
    assert len(images) == len(indices)
    assert all(0 <= image < n for image in images)


@pytest.mark.parametrize("n", [3, 4, 5, 8, 17])
def test_each_image_is_as_likely_as_any_other(n):
    keys = 4000
    for index in range(n):
        images = Counter(permute(index, n, key) for key in range(keys))
        # Six standard deviations of a fair count.
        tolerance = 6 * (keys / n * (1 - 1 / n)) ** 0.5
        assert all(abs(images[image] - keys / n) < tolerance for image in range(n)), (index, images)


def test_small_orders_are_all_reached():
    orders = Counter(tuple(permute(index, 4, key) for index in range(4)) for key in range(6000))
    assert len(orders) == 24
    assert max(orders.values()) < 2 * min(orders.values())


def test_neighbours_do_not_stay_together():
    n = 10_000
    images = [permute(index, n, 11) for index in range(n)]
    assert sum(abs(a - b) == 1 for a, b in itertools.pairwise(images)) < 20  # 2 are expected
    assert sum(index == image for index, image in enumerate(images)) < 12  # 1 is expected


def test_the_order_is_the_same_on_every_machine_and_for_ever():
    assert [permute(index, 10, 0) for index in range(10)] == PERMUTATION_OF_10
    assert [permute(index, 1_000_003, 42) for index in range(4)] == START_OF_A_MILLION
    assert [Order(10, seed=1234).at(position) for position in range(20)] == TWO_EPOCHS


@pytest.mark.parametrize("n", [10, 48, 300])
def test_epochs_are_permutations_that_differ_pairwise(n):
    order = Order(n, seed=1234)
    epochs = [[order.at(epoch * n + index) for index in range(n)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    assert all(a != b for a, b in itertools.combinations(epochs, 2))


def test_seeds_give_different_orders():
    orders = {tuple(Order(20, seed).at(index) for index in range(20)) for seed in range(-50, 50)}
    assert len(orders) == 100


def test_an_epoch_of_one_seed_is_no_epoch_of_the_next():
    orders = {
        tuple(Order(20, seed).at(20 * epoch + index) for index in range(20)) for seed in range(9) for epoch in range(9)
    }
    assert len(orders) == 81


def test_without_shuffling_each_epoch_counts_up():
    order = Order(3, seed=1, shuffle=False, epochs=2)
    assert [order.at(position) for position in range(9)] == [0, 1, 2, 0, 1, 2, -1, -1, -1]
    assert [order.epoch(position) for position in range(6)] == [0, 0, 0, 1, 1, 1]
    assert order.total == 6


def test_endless_orders_have_no_total():
    order = Order(7, seed=1)
    assert order.total is None
    assert 0 <= order.at(10**15) < 7
    assert order.epoch(10**15) == 10**15 // 7


@pytest.mark.parametrize("make", [lambda: Order(0, 1), lambda: Order(3, 1, epochs=0), lambda: Order(3, 1).at(-1)])
def test_senseless_orders_are_refused(make):
    with pytest.raises(ValueError, match="got"):
        make()


@pytest.mark.parametrize(("index", "n"), [(0, 0), (3, 3), (-1, 3)])
def test_an_index_outside_of_the_range_is_refused(index, n):
    with pytest.raises(ValueError, match=f"got index {index}, n {n}"):
        permute(index, n, 1)
