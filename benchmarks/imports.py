"""Import time of each function in a fresh interpreter, against fastapi + mangum + boto3 and a first client alone."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

from measuring import Result

ROOT = Path(__file__).parent.parent
PEER = "import fastapi, mangum, boto3; boto3.client('dynamodb', region_name='us-east-1'); fastapi.FastAPI()"
ENVIRONMENT = {
    "TUNEYARD_TABLE_NAME": "t", "TUNEYARD_BUCKET_NAME": "b", "TUNEYARD_TRAINING_QUEUE_URL": "q",
    "TUNEYARD_EVENT_QUEUE_URL": "q", "TUNEYARD_DELIVERY_QUEUE_URL": "q", "TUNEYARD_BUS_NAME": "b",
    "TUNEYARD_BASE_MODELS": '[{"id": "tuneyard/tiny", "source": "builtin:tiny"}]', "AWS_DEFAULT_REGION": "us-east-1",
}  # fmt: skip


def measure() -> list[Result]:
    """CPU milliseconds, the median of nine fresh processes each, taken in turns."""
    programs = {"peer": PEER}
    for app in sorted((ROOT / "functions").glob("*/app.py")):
        client = "; from tuneyard import table; table._client()"
        programs[app.parent.name] = f"import sys; sys.path.insert(0, {str(app.parent)!r}); import app{client}"
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(9):
        for name, program in programs.items():
            times[name].append(_cpu_ms(program))
    peer = statistics.median(times.pop("peer"))
    return [Result.of(name, statistics.median(found), peer, "ms CPU") for name, found in times.items()]


def _cpu_ms(program: str) -> float:
    code = f"import os\n{program}\nt = os.times(); print((t.user + t.system) * 1000)"
    answer = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=True
    )
    return float(answer.stdout)
