"""A request through our Lambda handler, in process, against a bare handler that reads the same row with boto3.

Both speak to the emulated table of a running local stack; the difference is what the framework costs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from measuring import Result, interleaved_ms, stack

ROOT = Path(__file__).parent.parent


def measure() -> list[Result]:
    """Median milliseconds of getting a model."""
    with stack() as (client, told, state):
        model = client.post(
            "/v1/preview/models", json={"project": "bench", "name": "m", "base_model": "tuneyard/tiny"}
        ).json()
        os.environ |= json.loads((state / "environment.json").read_text())
        sys.path.insert(0, str(ROOT / "functions" / "models"))
        import app  # type: ignore[import-not-found]
        import boto3

        table = boto3.client("dynamodb")
        event = json.loads(
            (ROOT / "events" / "models.get_unknown.json").read_text().replace("$KEY", told["api_key"])
        )
        event |= {"path": f"/v1/preview/models/{model['id']}"}
        key = {"pk": {"S": f"MODEL#{model['id']}"}, "sk": {"S": "MODEL"}}

        def bare() -> dict[str, Any]:
            item = table.get_item(TableName=os.environ["TUNEYARD_TABLE_NAME"], Key=key, ConsistentRead=True)[
                "Item"
            ]
            return {
                "statusCode": 200,
                "body": json.dumps({k: next(iter(v.values())) for k, v in item.items()}),
            }

        assert app.handler(event, None)["statusCode"] == 200
        found = interleaved_ms(
            {
                "handler": lambda: app.handler(event, None),
                "bare": bare,
                "door": lambda: client.get(event["path"]),
            },
            times=200,
        )
    return [
        Result.of("GET a model through the Lambda handler", found["handler"], found["bare"], "ms"),
        Result.of("GET a model through the local HTTP door", found["door"], found["bare"], "ms"),
    ]
