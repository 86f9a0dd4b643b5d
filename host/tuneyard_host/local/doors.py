"""The functions' modules. Their folders are no packages: each is a world of its own, as in Lambda."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from tuneyard_host.local import sources


def modules() -> dict[str, ModuleType]:
    """Every function's ``app.py`` by the name of its folder."""
    return {name: module(name) for name in sources.function_names()}


def module(name: str) -> ModuleType:
    """One function's ``app.py``."""
    place = f"tuneyard_function_{name}"
    if place not in sys.modules:
        spec = importlib.util.spec_from_file_location(place, sources.root() / "functions" / name / "app.py")
        assert spec is not None and spec.loader is not None  # noqa: S101 - a file location always has both
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[place] = loaded  # pydantic looks the names in annotations up here
        spec.loader.exec_module(loaded)
    return sys.modules[place]
