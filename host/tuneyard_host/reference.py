"""What is written from the code: the README's endpoint table, docs/openapi.json and the events of docs/webhooks.md.

``python -m tuneyard_host.reference`` writes all anew; tests compare them.
"""

from __future__ import annotations

import json
import re
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute

from tuneyard import web
from tuneyard_host import catalogue
from tuneyard_host.local import doors, sources

_START, _END = "<!-- endpoints -->", "<!-- /endpoints -->"


def endpoint_table() -> str:
    """Every route with the first sentence of its docstring, as Markdown between two marks."""
    lines = [_START, "| Method | Path | |", "|---|---|---|"]
    for router in _routers():
        for route in router.routes:
            if isinstance(route, APIRoute) and route.include_in_schema:
                purpose = (route.endpoint.__doc__ or "").strip().splitlines()[0]
                lines.append(f"| {'/'.join(sorted(route.methods or ()))} | `{route.path}` | {purpose} |")
    return "\n".join([*lines, _END])


def openapi() -> dict[str, Any]:
    """The OpenAPI document of the whole service."""
    app = web.create_app("Serverless Training", *_routers())
    app.version = "1.0.0"
    document: dict[str, Any] = json.loads(json.dumps(app.openapi()))
    return document


def write() -> None:
    """Write all into the working tree."""
    readme = sources.root() / "README.md"
    pattern = re.compile(f"{_START}.*?{_END}", re.DOTALL)
    readme.write_text(pattern.sub(lambda _: endpoint_table(), readme.read_text()))
    guide = sources.root() / "docs" / "webhooks.md"
    guide.write_text(catalogue.PATTERN.sub(lambda _: catalogue.markdown(), guide.read_text()))
    (sources.root() / "docs" / "openapi.json").write_text(
        json.dumps(openapi(), indent=1, sort_keys=True) + "\n"
    )


def _routers() -> list[APIRouter]:
    return [door.router for door in doors.modules().values() if hasattr(door, "router")]


if __name__ == "__main__":
    write()
