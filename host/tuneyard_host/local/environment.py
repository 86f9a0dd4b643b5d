"""The environment of the local processes: our own settings, and AWS as the emulator is it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

REGION = "us-east-1"


def aws(endpoint: str) -> dict[str, str]:
    """How the AWS libraries find the emulator, whatever the user's own AWS configuration says."""
    return {
        "AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": REGION, "AWS_REGION": REGION, "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull, "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }  # fmt: skip


def settings(outputs: dict[str, str], parameters: dict[str, str]) -> dict[str, str]:
    """The TUNEYARD_ variables: every output and parameter of the stack under its name in capitals."""
    return {f"TUNEYARD_{_capitals(name)}": value for name, value in {**parameters, **outputs}.items()}


def clean() -> dict[str, str]:
    """This process's environment without what would lead a child to somebody's real AWS account.

    Threads of OpenMP wait asleep: trainer and inference share the cores, and where waiting threads spin instead, each
    gradient step of a busy machine takes several times as long.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"} | kept


def enter(values: dict[str, str]) -> None:
    """Make these the AWS and Tuneyard settings of this process; before anything reads them."""
    kept = clean()
    os.environ.clear()
    os.environ |= kept | values


def enter_running(folder: Path) -> None:
    """Make the running stack's settings ours, unless this process was given settings of its own."""
    from tuneyard_host.local.folder import LocalError

    if "TUNEYARD_TABLE_NAME" in os.environ:
        return
    try:
        enter(json.loads((folder / "environment.json").read_text()))
    except OSError as error:
        raise LocalError(
            f"No Tuneyard runs on the state folder {folder}. Start it with `tuneyard up`, or name its folder with "
            "--state DIR."
        ) from error


def _capitals(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).upper()
