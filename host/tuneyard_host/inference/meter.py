"""How many requests may run at once for a key and for a project, and what each has used in the end."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from tuneyard import usage
from tuneyard.completions import EngineRequest
from tuneyard.errors import TooManyRequests

Book = Callable[..., None]


class Meter:
    """Counts the requests that run; ``book`` is told the tokens of each when it has ended, however it ended."""

    def __init__(self, *, per_key: int, per_project: int, book: Book | None = None) -> None:
        self._most = {"key": per_key, "project": per_project}
        self._book = book
        self._running: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def begin(self, request: EngineRequest) -> None:
        """Count a request in; TooManyRequests, and nothing counted, over a limit."""
        places = _places(request)
        with self._lock:
            for place in places:
                if self._running[place] >= self._most[place[0]]:
                    raise TooManyRequests("Concurrency limit reached for requests", retry_after=1)
            self._running.update(places)

    def end(self, request: EngineRequest, *, prompt_tokens: int, completion_tokens: int) -> None:
        """Count a request out, and book what it used."""
        with self._lock:
            self._running.subtract(_places(request))
            self._running += Counter()
        if self._book is not None:
            where = usage.line(request.team, request.project, request.chat.model)
            self._book(where, requests=1, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)


def _places(request: EngineRequest) -> list[tuple[str, str]]:
    return [("key", request.key_id), ("project", f"{request.team}/{request.project}")]
