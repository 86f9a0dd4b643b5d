"""Identifiers: random ones, and ones that carry their place in a list."""

from __future__ import annotations

import hashlib
import re
import uuid

from tuneyard.errors import Invalid

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def new() -> str:
    """A random UUID."""
    return str(uuid.uuid4())


def is_uuid(text: str) -> bool:
    """Whether ``text`` is spelled as we spell UUIDs."""
    return _UUID.fullmatch(text) is not None


def ordered(parent: str, position: int) -> str:
    """The UUID (version 8) of the ``position``-th child of ``parent``: same parent and position, same id.

    The first 80 bits are a digest of the parent, the last 48 the position, so a page can start after an id
    without looking anything up.
    """
    head = hashlib.sha256(parent.encode()).digest()[:10]
    return str(uuid.UUID(bytes=_stamped(head + position.to_bytes(6, "big"))))


def position(parent: str, child: str) -> int:
    """Where ``child`` stands among the children of ``parent``; Invalid when it is none of them."""
    if is_uuid(child):
        place = int.from_bytes(uuid.UUID(child).bytes[10:], "big")
        if ordered(parent, place) == child:
            return place
    raise Invalid(
        f"No row has the id {child!r}; send the id of a row of this list as `after`.", param="after"
    )


def _stamped(raw: bytes) -> bytes:
    stamped = bytearray(raw)
    stamped[6] = (stamped[6] & 0x0F) | 0x80
    stamped[8] = (stamped[8] & 0x3F) | 0x80
    return bytes(stamped)
