"""The chat function's two modes: streaming behind the Lambda Web Adapter, and whole answers through Mangum."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from samtranslator.translator.transform import transform

from conftest import ROOT, Stack
from tuneyard_host.local import doors

PATHS = {
    "/v1/chat/completions": "post", "/v1/chat/completions/": "post", "/v1/models": "get", "/v1/usage": "get",
}  # fmt: skip


class NoPolicies:
    """The transform's list of AWS's managed policies, of which the template uses none."""

    def load(self) -> dict[str, str]:
        return {}


def resources(template: dict[str, Any], *, streaming: bool) -> dict[str, Any]:
    """What CloudFormation makes of the template: SAM's transform, then the conditions settled."""
    parsed = json.loads(json.dumps(template))
    for resource in parsed["Resources"].values():
        for place in ("CodeUri", "ContentUri"):
            if place in resource.get("Properties", {}):
                resource["Properties"][place] = "s3://bucket/code.zip"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        made = transform(parsed, {"ChatStreaming": str(streaming).lower()}, NoPolicies())
    settled: dict[str, Any] = settle(made["Resources"], streaming)
    return settled


def settle(node: Any, streaming: bool) -> Any:
    if isinstance(node, list):
        return [kept for item in node if (kept := settle(item, streaming)) is not None]
    if not isinstance(node, dict):
        return node
    if node.keys() == {"Fn::If"} and node["Fn::If"][0] == "ChatStreams":
        return settle(node["Fn::If"][1 if streaming else 2], streaming)
    if node == {"Ref": "AWS::NoValue"}:
        return None
    return {name: kept for name, item in node.items() if (kept := settle(item, streaming)) is not None}


def integrations(made: dict[str, Any]) -> dict[str, dict[str, Any]]:
    paths = made["Api"]["Properties"]["Body"]["paths"]
    return {path: paths[path][method]["x-amazon-apigateway-integration"] for path, method in PATHS.items()}


def test_streaming_goes_through_the_web_adapter_on_every_path_of_the_function(template: dict[str, Any]):
    made = resources(template, streaming=True)

    function = made["ChatFunction"]["Properties"]
    assert (function["Handler"], function["Timeout"]) == ("run.sh", 900)
    assert any("LambdaAdapterLayerX86" in json.dumps(layer) for layer in function["Layers"])
    variables = function["Environment"]["Variables"]
    assert variables["AWS_LAMBDA_EXEC_WRAPPER"] == "/opt/bootstrap"
    assert variables["AWS_LWA_INVOKE_MODE"] == "response_stream"
    for integration in integrations(made).values():
        assert integration["responseTransferMode"] == "STREAM" and integration["timeoutInMillis"] == 900_000
        assert (
            "/2021-11-15/functions/${ChatFunction.Arn}/response-streaming-inv"
            in integration["uri"]["Fn::Sub"]
        )


def test_without_streaming_nothing_of_it_is_left(template: dict[str, Any]):
    made = resources(template, streaming=False)

    function = made["ChatFunction"]["Properties"]
    assert (function["Handler"], function["Timeout"], len(function["Layers"])) == ("app.handler", 29, 1)
    assert not [name for name in function["Environment"]["Variables"] if name.startswith("AWS_")]
    for integration in integrations(made).values():
        assert "responseTransferMode" not in integration
        assert "/2015-03-31/functions/${ChatFunction.Arn}/invocations" in integration["uri"]["Fn::Sub"]


@pytest.mark.parametrize("streaming", [True, False])
def test_the_other_functions_answer_whole_and_api_gateway_may_call_each(
    template: dict[str, Any], streaming: bool
):
    made = resources(template, streaming=streaming)

    paths = made["Api"]["Properties"]["Body"]["paths"]
    others = [
        m["x-amazon-apigateway-integration"] for p, ms in paths.items() if p not in PATHS for m in ms.values()
    ]
    assert len(others) > 50 and not any("responseTransferMode" in integration for integration in others)
    called = {json.dumps(i["uri"]).partition("functions/${")[2].partition(".Arn")[0] for i in others} | {
        "ChatFunction"
    }
    permitted = {
        r["Properties"]["FunctionName"]["Ref"]
        for r in made.values()
        if r["Type"] == "AWS::Lambda::Permission"
    }
    assert called <= permitted


def test_both_modes_serve_the_same_application():
    module = doors.modules()["chat"]

    assert module.handler.app is module.app
    assert os.access(ROOT / "functions" / "chat" / "run.sh", os.X_OK)


@contextmanager
def started(state: Path) -> Iterator[str]:
    """functions/chat/run.sh as the web adapter starts it, with the settings of the running stack; its address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    own = json.loads((state / "environment.json").read_text())
    own |= {"LAMBDA_TASK_ROOT": str(ROOT / "functions" / "chat"), "AWS_LWA_PORT": port}
    own |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "layers" / "core"),
    }
    with subprocess.Popen([ROOT / "functions" / "chat" / "run.sh"], env=own) as process:
        try:
            for _ in range(300):  # the adapter asks for `/` until there is any answer
                try:
                    assert httpx.get(f"http://127.0.0.1:{port}/").status_code == 404
                    break
                except httpx.ConnectError:
                    time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


@pytest.mark.live
def test_what_the_web_adapter_starts_streams_token_by_token(stack: Stack):
    body = {"model": "tuneyard/tiny", "messages": [{"role": "user", "content": "Tell me a story."}],
            "stream": True, "max_tokens": 60, "ignore_eos": True}  # fmt: skip
    headers = {"Authorization": f"Bearer {stack.api_key}"}
    with (
        started(stack.state) as address,
        httpx.Client(base_url=address, headers=headers, timeout=30) as client,
    ):
        client.post("/v1/chat/completions", json=body).raise_for_status()
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            came = [time.monotonic() for line in response.iter_lines() if line.startswith("data:")]
        models = client.get("/v1/models").json()

    assert response.headers["content-type"].startswith("text/event-stream")
    assert len(came) > 30 and came[len(came) // 2] - came[0] > 0.2 * (came[-1] - came[0])
    assert "tuneyard/tiny" in {model["id"] for model in models["data"]}
