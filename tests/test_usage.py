"""Usage: counters by day, project and model, readable by their team only."""

from __future__ import annotations

from fastapi.testclient import TestClient

from tuneyard import usage


def test_bookings_add_up_and_are_the_teams_own(api: TestClient, stranger: dict[str, str]):
    where = usage.line("acme", "support", "wandb-artifact:///acme/support/agent")
    ledger = usage.Ledger(seconds=0.01)
    for _ in range(3):
        ledger.book(where, requests=1, prompt_tokens=10, completion_tokens=5)
    ledger.book(
        usage.line("acme", "inference", "tuneyard/tiny"), requests=1, prompt_tokens=1, completion_tokens=1
    )
    ledger.close()

    first, second = api.get("/v1/usage").json()["data"]

    assert (first["project"], first["total_tokens"]) == ("inference", 2)
    assert (second["requests"], second["prompt_tokens"], second["completion_tokens"]) == (3, 30, 15)
    assert api.get("/v1/usage", params={"after": first["id"]}).json()["data"] == [second]
    assert api.get("/v1/usage", params={"until": "2020-01-01"}).json()["data"] == []
    assert api.get("/v1/usage", headers=stranger).json()["data"] == []
