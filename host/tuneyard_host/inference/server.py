"""One base model being served: from a request to its choices, whole or as a stream of chunks."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

from tuneyard.completions import EngineRequest
from tuneyard.errors import Unavailable
from tuneyard.settings import BaseModelSpec
from tuneyard_host import bases

from .adapters import Adapters
from .answers import Answer
from .choices import Choice, Piece
from .engine import Engine, Limits
from .grammars import Grammars
from .meter import Meter
from .prompts import Task, is_short, plan
from .sequences import Bell, Sequence
from .texts import Vocabulary


class Server:
    """A base model in memory with its adapters and its engine."""

    def __init__(
        self, spec: BaseModelSpec, read_blob: Callable[[str], bytes], limits: Limits | None, meter: Meter
    ) -> None:
        self._meter = meter
        self.base = bases.load_to_serve(spec)
        self.vocabulary = Vocabulary(self.base.tokenizer)
        self.engine = Engine(self.base, limits)
        self.adapters = Adapters(self.base.model, read_blob)
        self.ends = _ends(self.base)
        self.grammars = Grammars(self.base, self.vocabulary, self.ends)

    async def begin(self, request: EngineRequest) -> Work:
        """Check the request, have its adapter in memory, and queue its choices."""
        asked = request.chat, self.base, self.vocabulary, self.ends, self.grammars
        task = plan(*asked) if is_short(request.chat) else await asyncio.to_thread(plan, *asked)
        adapter = None if request.adapter is None else await self.adapters.get(request.adapter)
        bell = Bell(asyncio.get_running_loop(), asyncio.Event())
        sequences = [
            Sequence(
                prompt=task.prompt,
                sampling=sampling,
                adapter=adapter,
                project=f"{request.team}/{request.project}",
                bell=bell,
                eager=request.chat.stream or bool(task.stops),
            )
            for sampling in task.samplings
        ]
        self._meter.begin(request)
        try:
            self.engine.submit(sequences)
        except Unavailable:
            self._meter.end(request, prompt_tokens=0, completion_tokens=0)
            raise
        choices = [Choice(i, sequence, task, self.vocabulary) for i, sequence in enumerate(sequences)]
        work = Work(self, task, choices, bell)
        work.end = weakref.finalize(work, self._ended, request, sequences)
        return work

    @property
    def load(self) -> dict[str, int]:
        """How busy the engine is."""
        return self.engine.load

    async def close(self) -> None:
        """End the engine; requests that still run hear Unavailable."""
        await asyncio.to_thread(self.engine.close)

    def _ended(self, request: EngineRequest, sequences: list[Sequence]) -> None:
        """The work was read to its end, or given up, or nobody holds it any more."""
        self.engine.cancel(sequences)
        written = sum(len(sequence.tokens) for sequence in sequences)
        self._meter.end(request, prompt_tokens=len(sequences[0].prompt), completion_tokens=written)


class Work:
    """The choices of one request while the engine writes them. Whoever stops reading frees their rows."""

    def __init__(self, server: Server, task: Task, choices: list[Choice], bell: Bell) -> None:
        self._server, self._task, self._choices, self._bell = server, task, choices, bell
        self._answer = Answer(task, fingerprint=f"tuneyard-{server.base.digest[:12]}")
        self.end: Callable[[], object] = lambda: None
        """Frees the rows and books the tokens: called when reading ends, or at the latest when the work is dropped."""

    async def whole(self) -> dict[str, Any]:
        """The ``chat.completion``, when every choice has ended."""
        pieces = [Piece() for _ in self._choices]
        async for choice, piece in self._read():
            pieces[choice.index] += piece
        return self._answer.whole(self._choices, pieces, self._server.vocabulary)

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The ``chat.completion.chunk`` objects, as soon as each is certain."""
        options = self._task.chat.stream_options
        usage = options is not None and options.include_usage
        running = options is not None and options.continuous_usage_stats
        opened: set[int] = set()
        async for choice, piece in self._read():
            first = None if choice.index in opened else self._answer.first(choice)
            opened.add(choice.index)
            for chunk in (first, self._answer.more(choice, piece)):
                if chunk is not None:
                    told = {"usage": self._answer.usage(self._choices) if running else None} if usage else {}
                    yield chunk | told
        if usage:
            yield self._answer.chunk([]) | {"usage": self._answer.usage(self._choices)}

    async def _read(self) -> AsyncIterator[tuple[Choice, Piece]]:
        """The news of each choice, until all have ended."""
        left = list(self._choices)
        try:
            while left:
                await self._bell.event.wait()
                self._bell.event.clear()
                for choice in left:
                    piece = choice.read()
                    if piece.tokens or piece.finish:
                        yield choice, piece
                    if choice.finish is not None:
                        self._server.engine.cancel([choice.sequence])
                left = [choice for choice in left if choice.finish is None]
        finally:
            self.end()


def _ends(base: bases.Base) -> frozenset[int]:
    """The tokens that end a turn, as the tokenizer and the generation settings name them."""
    named = getattr(base.model.generation_config, "eos_token_id", None)
    tokens = named if isinstance(named, list) else [named]
    return frozenset(token for token in [*tokens, base.tokenizer.eos_token_id] if token is not None)
