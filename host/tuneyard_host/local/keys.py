"""The first API key: made at the first start, kept in the state folder, shown at every start."""

from __future__ import annotations

import contextlib

from tuneyard import teams
from tuneyard.errors import Conflict
from tuneyard.records import Role
from tuneyard_host.local.folder import Folder, write_private


def first_key(folder: Folder, *, team: str, user: str) -> str:
    """The key in the state folder while it is an administrator's of this team; else a new one."""
    with contextlib.suppress(Conflict):
        teams.create_team(team)
    with contextlib.suppress(FileNotFoundError):
        text = folder.key.read_text().strip()
        known = teams.find_key(text)
        if known is not None and known.team == team and known.role is Role.ADMIN:
            return text
    _, text = teams.create_key(team=team, user=user, role=Role.ADMIN)
    write_private(folder.key, text + "\n")
    return text
