"""Rows: what is shared, what is computed twice, and that nobody sees a stranger."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from training_fixtures import histories
from tuneyard_host.training import packing
from tuneyard_host.training.packing import History, Row, cuts, pack, row_length, shared_beginnings


def branching(seed: int, *, number: int = 12) -> list[History]:
    """Conversations that branch at random places, some of them the beginning of others, some twice."""
    rng = random.Random(seed)
    made: list[list[int]] = []
    for _ in range(number):
        start = rng.choice(made)[: rng.randrange(1, 120)] if made and rng.random() < 0.8 else []
        made.append(start + [rng.randrange(3) for _ in range(rng.choice([0, 1, 5, 30, 60]) if start else 40)])
    return [
        History(
            ids, [at > 0 and rng.random() < 0.5 for at in range(len(ids))], [-1.0] * len(ids), owner=owner
        )
        for owner, ids in enumerate(made)
    ]


def seen_by(row: Row) -> list[set[int]]:
    """For each token of a row, the places that it attends to."""
    starts = list(itertools.accumulate(row.forest.lengths, initial=0))
    seen: list[set[int]] = []
    for path in row.forest.paths:
        above = {place for run in path[:-1] for place in range(starts[run], starts[run + 1])}
        for place in range(starts[path[-1]], starts[path[-1] + 1]):
            seen.append(above | set(range(starts[path[-1]], place + 1)))
    return seen


@pytest.mark.parametrize("seed", range(30))
def test_every_conversation_is_found_whole_in_a_row_and_sees_itself_and_nothing_else(seed: int):
    given = branching(seed)

    rows = pack(given, length=150)

    found = []
    for row in rows:
        seen = seen_by(row)
        assert len(row.ids) == sum(row.forest.lengths) <= 150
        for number, owner in enumerate(row.owners):
            history = given[owner]
            found.append(owner)
            mine = (row.history == number).nonzero()[:, 0].tolist()
            trained = [at for at, trains in enumerate(history.trained) if trains]
            assert sorted(row.targets[mine].tolist()) == sorted(history.ids[at] for at in trained)
            for term in mine:
                last = int(row.predictors[term])
                path = sorted(seen[last])
                depth = int(row.positions[last]) + 1
                assert row.positions[path].tolist() == list(range(depth))
                assert row.ids[path].tolist() == history.ids[:depth]
                assert int(row.targets[term]) == history.ids[depth]
    assert sorted(found) == list(range(len(given)))


@pytest.mark.parametrize("seed", range(20))
def test_no_two_branching_points_of_a_conversation_are_close(seed: int):
    ordered = sorted(history.ids for history in branching(seed, number=30))

    shared = shared_beginnings(ordered)

    for before, after, taken in zip(ordered, ordered[1:], shared[1:], strict=False):
        assert before[:taken] == after[:taken]
        assert taken == 0 or taken >= packing.SHORTEST_SHARED
    for row in pack(branching(seed, number=30), length=10_000):
        branches = {row.forest.lengths[path[-2]] for path in row.forest.paths if len(path) > 1}
        assert all(length >= packing.SHORTEST_SHARED for length in branches)


@pytest.mark.parametrize("seed", range(20))
def test_the_cuts_are_the_best_there_are(seed: int):
    rng = random.Random(seed)
    costs = [rng.randrange(5, 30) for _ in range(8)]
    shared = [0] + [rng.choice([0, 0, min(a, b) // 2]) for a, b in itertools.pairwise(costs)]

    def price(places: tuple[int, ...]) -> tuple[int, int, int] | None:
        slices = list(itertools.pairwise([0, *places, len(costs)]))
        sizes = [sum(costs[a:b]) - sum(shared[a + 1 : b]) for a, b in slices]
        if any(size > 60 for size in sizes):
            return None
        return sum(shared[a] for a, _ in slices), len(sizes), sum(size * size for size in sizes)

    every = (
        places
        for count in range(len(costs))
        for places in itertools.combinations(range(1, len(costs)), count)
    )
    best = min(found for places in every if (found := price(places)))

    assert price(tuple(a for a, _ in cuts(costs, shared, length=60))[1:]) == best


def test_a_group_computes_its_prompt_once():
    given = histories([(0, 50)] * 8, prompts=[300])

    (row,) = pack(given, length=2048)

    assert len(row.ids) == 300 + 8 * 50
    assert row.num_trained == 8 * 50


def test_groups_share_a_system_prompt_too():
    system = list(range(100, 200))
    given = [
        History(system + [group] * 60 + [group, trajectory] * 10, [False] * 160 + [True] * 20, [-1.0] * 180)
        for group in range(3)
        for trajectory in range(4)
    ]

    (row,) = pack(given, length=2048)

    assert len(row.ids) == 100 + 3 * 60 + 3 * 4 * 20 - 3 * 3  # the first token of an answer is its group's


def test_a_turn_that_two_branches_train_on_is_computed_once_and_counted_twice():
    turn = [7] * 40
    given = [
        History([1] * 30 + turn + [answer] * 5, [False] * 30 + [True] * 45, [-1.0] * 75, owner=answer)
        for answer in (8, 9)
    ]

    (row,) = pack(given, length=2048)

    assert len(row.ids) == 30 + 40 + 5 + 5
    assert row.num_trained == 2 * 45


def test_a_row_is_longer_than_usual_only_where_that_saves_work():
    apart = histories([(number, 20) for number in range(40)], prompts=[80] * 40)
    together = histories([(0, 200)] * 16, prompts=[1000])
    long = histories([(0, 10)], prompts=[5000])

    assert row_length(apart) == 2048
    assert row_length(together) == 8192
    assert row_length(long) == 5010
    assert row_length([]) == 2048


def test_rows_come_out_equally_full():
    rows = pack(histories([(number, 100) for number in range(24)], prompts=[0] * 24), length=2048)

    assert sorted(len(row.ids) for row in rows) == [1200, 1200]


def test_a_row_keeps_what_each_trained_token_needs():
    given = histories([(0, 3), (0, 2)], prompts=[40], seed=5)

    (row,) = pack(given, length=2048)

    for number, owner in enumerate(row.owners):
        mine = (row.history == number).nonzero()[:, 0]
        history = given[owner]
        known = [value for value in history.logprobs if not math.isnan(value)]
        torch.testing.assert_close(row.logprobs[mine], torch.tensor(known))
        assert row.advantages[mine].tolist() == [pytest.approx(history.advantage)] * len(mine)
        assert row.weights[mine].tolist() == [pytest.approx(history.weight)] * len(mine)
