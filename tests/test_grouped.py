"""Threads that ask the table at the same time share calls, and each gets what it would have got alone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from boto3.dynamodb.conditions import Attr

from tuneyard import grouped, table
from tuneyard.records import Team


@pytest.fixture
def calls(aws: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many changes, or keys, each call to the table had; the first call waits until all threads have asked."""
    made: list[int] = []
    transact, get_many = table.transact, table.get_many

    def counted(original: Any) -> Any:
        def call(*asked: Any) -> Any:
            made.append(len(asked))
            if len(made) == 1:
                everybody_is_there()
            return original(*asked)

        return call

    def everybody_is_there() -> None:
        for _ in range(1000):
            if len(grouped._writes._waiting) + len(grouped._reads._waiting) >= 19:
                return
            threading.Event().wait(0.01)
        raise AssertionError("the other threads did not come")

    monkeypatch.setattr(table, "transact", counted(transact))
    monkeypatch.setattr(table, "get_many", counted(get_many))
    return made


def together(work: Any) -> list[Any]:
    """What twenty threads get at the same time: an answer or an exception."""

    def one(number: int) -> Any:
        try:
            return work(number)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(20) as pool:
        return list(pool.map(one, range(20)))


def transact(*changes: Any) -> Any:
    """One transaction: what it failed by, or None."""
    (found,) = grouped.transact_each([changes])
    return found


def team(number: int, at: int = 0) -> Team:
    return Team(name=f"t{number}", created_at=at)


def test_twenty_transactions_are_two_calls_and_each_fails_for_its_own_reasons(calls: list[int]):
    for number in range(0, 20, 5):
        table._send([table._change(table.Put(team(number, at=7)))])

    def work(number: int) -> Any:
        same = table.Check(Team, (f"x{number}",), when=Attr("pk").not_exists())
        return transact(same, table.Put(team(number), new=True))

    found = together(work)

    for number, came in enumerate(found):
        if number % 5:
            assert came is None and table.get(Team, f"t{number}") == team(number)
        else:
            assert isinstance(came, table.ConditionFailed) and came.failed == [1]
            assert table.get(Team, f"t{number}") == team(number, at=7)
    assert len(calls) <= 4


def test_changes_of_the_same_record_are_never_in_one_call(calls: list[int]):
    def work(_: int) -> Any:
        return transact(table.Put(team(0), new=True))

    found = together(work)

    assert sum(came is None for came in found) == 1
    assert sum(isinstance(came, table.ConditionFailed) for came in found) == 19
    assert set(calls) == {1}


def test_twenty_reads_are_two_calls_and_name_no_record_twice(calls: list[int]):
    table._send([table._change(table.Put(team(1)))])

    found = together(lambda number: grouped.get_each([((Team, ("t1",)), (Team, (f"none{number}",)))]))

    assert found == [[[team(1), None]]] * 20
    assert len(calls) == 2 and calls[1] <= 20


def test_a_call_that_fails_fails_for_all_in_it_and_the_next_one_goes_on(
    calls: list[int], monkeypatch: pytest.MonkeyPatch
):
    class Unreachable(Exception):
        pass

    counted = table.transact

    def failing(*changes: Any) -> None:
        if len(changes) > 1:
            raise Unreachable
        counted(*changes)

    monkeypatch.setattr(table, "transact", failing)

    found = together(lambda number: transact(table.Put(team(number))))

    assert sum(came is None for came in found) == 1
    assert sum(isinstance(came, Unreachable) for came in found) == 19
    transact(table.Put(team(50)))
    assert table.get(Team, "t50") == team(50)
