"""Uploads: how inputs that are too large for a request body get in."""

from __future__ import annotations

from typing import Any

from tuneyard import blobs, ids
from tuneyard.records import Identity
from tuneyard.settings import settings


def create(caller: Identity) -> dict[str, Any]:
    """A presigned address to PUT a file to, and the ``upload://`` URL under which the team's jobs may name it."""
    upload_id = ids.new()
    seconds = settings().upload_seconds
    return {
        "id": upload_id,
        "object": "upload",
        "url": f"upload://{upload_id}",
        "expires_in": seconds,
        "upload_url": blobs.upload_url(blobs.upload_key(caller.team, upload_id), seconds=seconds),
    }
