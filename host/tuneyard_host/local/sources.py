"""What is deployed: template.yaml, the functions' folders and the core, packed the same way every time."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import tuneyard
import tuneyard_host
from tuneyard_host.local.folder import LocalError

_NEVER = {"__pycache__", ".pytest_cache", ".mypy_cache"}


def root() -> Path:
    """Where template.yaml and functions/ are: above the code in a checkout, beside it when installed."""
    package = Path(tuneyard_host.__file__).parent
    for folder in (package.parents[1], package.parent / "tuneyard_cloud"):
        if (folder / "template.yaml").is_file():
            return folder
    raise LocalError("template.yaml is missing from this installation of Tuneyard. Install it again.")


def function_names() -> list[str]:
    """The folders of functions/."""
    return sorted(app.parent.name for app in (root() / "functions").glob("*/app.py"))


def packed(uri: str) -> bytes:
    """The zip of a ``CodeUri`` or ``ContentUri`` of the template.

    The layer is the core alone: the emulator runs functions with our own interpreter, which has the libraries.
    """
    if uri == "layers/core":
        return _zip(Path(tuneyard.__file__).parent, inside="python/tuneyard/")
    return _zip(root() / uri)


def _zip(folder: Path, inside: str = "") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file() and not _NEVER & set(file.parts):
                entry = zipfile.ZipInfo(
                    inside + str(file.relative_to(folder))
                )  # dated 1980: same files, same bytes
                entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                archive.writestr(entry, file.read_bytes())
    return buffer.getvalue()
