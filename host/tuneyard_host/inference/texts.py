"""From tokens to characters: what each token is in bytes, and how text is handed out without ever splitting one."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Vocabulary:
    """The bytes of every token of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        inner = tokenizer.backend_tokenizer
        self.size: int = len(tokenizer)
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special = frozenset(
            i for i in special if tokenizer.added_tokens_decoder[i].content not in (OPEN, CLOSE)
        )
        added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
        decoder = json.loads(inner.to_str()).get("decoder") or {}
        kinds = {part.get("type") for part in (decoder, *decoder.get("decoders", ()))}
        self._told: dict[int, tuple[str, list[int]]] = {}
        self._bytes: list[bytes] = [b""] * (max(tokenizer.get_vocab().values(), default=-1) + 1)
        for piece, i in tokenizer.get_vocab().items():
            if i in added:
                self._bytes[i] = added[i].encode()
            elif "ByteLevel" in kinds:
                self._bytes[i] = bytes(_BYTE_OF[c] for c in piece if c in _BYTE_OF)
            elif "ByteFallback" in kinds:
                whole = piece.startswith("<0x") and piece.endswith(">") and len(piece) == 6
                self._bytes[i] = bytes([int(piece[3:5], 16)]) if whole else piece.replace("▁", " ").encode()
            else:
                self._bytes[i] = inner.decode([i]).encode()

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for; a special token's are those of its name."""
        return self._bytes[token] if token < len(self._bytes) else b""

    def name(self, token: int) -> str:
        """A token as text; one that is only part of a character shows the replacement character."""
        return self.bytes_of(token).decode("utf-8", "replace")

    def shown(self, tokens: Iterable[int], *, special: bool) -> bytes:
        """The bytes a reader sees; special tokens only when asked for."""
        return b"".join([self.bytes_of(t) for t in tokens if special or t not in self.special])

    def told(self, token: int) -> tuple[str, list[int]]:
        """A token as log-probabilities tell of it: its text and its bytes."""
        told = self._told.get(token)
        if told is None:
            told = self._told[token] = self.name(token), list(self.bytes_of(token))
        return told


class Reader:
    """Text as far as it is certain: whole characters, and up to the first stop string, never past it."""

    def __init__(self, stops: Sequence[str] = (), *, keep_stop: bool = False) -> None:
        self.stops = [stop for stop in stops if stop]
        self.found: str | None = None
        self._keep_stop = keep_stop
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def feed(self, data: bytes, *, final: bool = False, waits: bool = True) -> str:
        """The text that has become certain. ``waits`` false looks for no stop string in it (min_tokens)."""
        self._held += self._characters.decode(data, final)
        if self.found is not None:
            return ""
        if self.stops and waits:
            hits = [(self._held.find(stop), stop) for stop in self.stops if stop in self._held]
            if hits:
                at, self.found = min(hits, key=lambda hit: hit[0])
                return self._held[: at + len(self.found) if self._keep_stop else at]
        keep = 0 if final or not waits else max((overlap(self._held, stop) for stop in self.stops), default=0)
        ready = self._held[: len(self._held) - keep]
        self._held = self._held[len(ready) :]
        return ready


def overlap(text: str, mark: str) -> int:
    """How many of the text's last characters could be the beginning of ``mark``."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0


def _byte_of() -> dict[str, int]:
    """The character by which byte-level BPE writes each byte, turned round (GPT-2's ``bytes_to_unicode``)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_of()
