"""Concurrency limits: counted per key and per project, given back however a request ends."""

from __future__ import annotations

import pytest

from tuneyard.completions import ChatRequest, EngineRequest
from tuneyard.errors import TooManyRequests
from tuneyard_host.inference.meter import Meter


def request(key: str, project: str) -> EngineRequest:
    chat = ChatRequest(model="m", messages=[{"role": "user", "content": "?"}])
    return EngineRequest(chat=chat, base_model="b", team="t", project=project, key_id=key)


def test_over_a_limit_is_429_with_retry_after_and_a_place_is_free_again_at_the_end():
    booked = []
    meter = Meter(
        per_key=2, per_project=3, book=lambda where, **counts: booked.append((where.project, counts))
    )
    meter.begin(request("a", "p"))
    meter.begin(request("a", "p"))

    with pytest.raises(TooManyRequests, match="Concurrency limit reached for requests") as refused:
        meter.begin(request("a", "p"))
    meter.begin(request("b", "p"))
    with pytest.raises(TooManyRequests):
        meter.begin(request("c", "p"))
    meter.begin(request("c", "other"))
    meter.end(request("a", "p"), prompt_tokens=7, completion_tokens=3)
    meter.begin(request("a", "p"))

    assert refused.value.retry_after == 1
    assert booked == [("p", {"requests": 1, "prompt_tokens": 7, "completion_tokens": 3})]
