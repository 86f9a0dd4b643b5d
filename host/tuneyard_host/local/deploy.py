"""template.yaml deployed on the emulator, by CloudFormation, as on AWS.

What is different here: code lies in a bucket of the emulator under the digest of its bytes (``sam package`` would
do that); number parameters stand in the template as numbers, because the emulator hands them on as text and its
pollers fail on that; chats do not stream through its API Gateway, which answers 500 to that; and no queue is mapped to
a function, because sender.py works the queues off.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError
from samtranslator.yaml_helper import yaml_parse

from tuneyard_host.local import sources
from tuneyard_host.local.folder import LocalError

if TYPE_CHECKING:
    from mypy_boto3_cloudformation import CloudFormationClient

STACK, CODE_BUCKET = "tuneyard", "tuneyard-code"
SECONDS = 60
_URIS = {"AWS::Serverless::Function": "CodeUri", "AWS::Serverless::LayerVersion": "ContentUri"}


def deploy(*, endpoint: str, parameters: dict[str, str]) -> dict[str, str]:
    """Create the stack, or update it when template, code or parameters differ from what runs; its outputs.

    A stack that is up to date is left alone, so a restart with the same code changes nothing.
    """
    known = {"PythonRuntime": f"python{sys.version_info.major}.{sys.version_info.minor}"} | parameters
    template = local_template(known)
    _upload_code(template, endpoint)
    body = json.dumps(template, sort_keys=True)
    wanted = {name: value for name, value in sorted(known.items()) if name in template["Parameters"]}
    digest = hashlib.sha256((body + json.dumps(wanted)).encode()).hexdigest()
    client = boto3.client("cloudformation", endpoint_url=endpoint, config=Config(retries={"max_attempts": 1}))
    stack = _stack(client)
    if stack is None or {"Key": "digest", "Value": digest} not in stack.get("Tags", []):
        request: Any = {
            "StackName": STACK, "TemplateBody": body, "Tags": [{"Key": "digest", "Value": digest}],
            "Capabilities": ["CAPABILITY_IAM", "CAPABILITY_AUTO_EXPAND"],
            "Parameters": [{"ParameterKey": name, "ParameterValue": value} for name, value in wanted.items()],
        }  # fmt: skip
        (client.create_stack if stack is None else client.update_stack)(**request)
        stack = _finished(client)
    return {output["OutputKey"]: output["OutputValue"] for output in stack.get("Outputs", [])}


def local_template(parameters: dict[str, str]) -> dict[str, Any]:
    """The template as the emulator takes it, its code still named by local paths."""
    template: dict[str, Any] = yaml_parse((sources.root() / "template.yaml").read_text())
    numbers = {
        name: int(parameters.get(name, parameter["Default"]))
        for name, parameter in template["Parameters"].items()
        if parameter["Type"] == "Number"
    }
    localized: dict[str, Any] = _localized(template, numbers)
    return localized


def _localized(node: Any, numbers: dict[str, int]) -> Any:
    if isinstance(node, dict):
        if node.keys() == {"Ref"} and node["Ref"] in numbers:
            return numbers[node["Ref"]]
        kept = {name: value for name, value in node.items() if not _is_mapping(value)}
        return {
            name: value if name == "Variables" else _localized(value, numbers) for name, value in kept.items()
        }
    return [_localized(value, numbers) for value in node] if isinstance(node, list) else node


def _is_mapping(node: Any) -> bool:
    return isinstance(node, dict) and node.get("Type") == "SQS"


def _code(template: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """The properties that name code, and the name of the property."""
    for resource in template["Resources"].values():
        name = _URIS.get(resource["Type"])
        if name and isinstance(resource["Properties"].get(name), str):
            yield resource["Properties"], name


def _upload_code(template: dict[str, Any], endpoint: str) -> None:
    s3 = boto3.client("s3", endpoint_url=endpoint, config=Config(s3={"addressing_style": "path"}))
    with suppress(s3.exceptions.BucketAlreadyOwnedByYou):
        s3.create_bucket(Bucket=CODE_BUCKET)
    there = {entry["Key"] for entry in s3.list_objects_v2(Bucket=CODE_BUCKET).get("Contents", [])}
    used: set[str] = set()
    for properties, name in _code(template):
        package = sources.packed(properties[name])
        key = f"{hashlib.sha256(package).hexdigest()}.zip"
        if key not in there | used:
            s3.put_object(Bucket=CODE_BUCKET, Key=key, Body=package)
        used.add(key)
        properties[name] = {"Bucket": CODE_BUCKET, "Key": key}
    for key in there - used:
        s3.delete_object(Bucket=CODE_BUCKET, Key=key)


def _stack(client: CloudFormationClient) -> dict[str, Any] | None:
    """The stack, or None when there is none; one whose creation failed holds no data and is removed."""
    try:
        stack: Any = client.describe_stacks(StackName=STACK)["Stacks"][0]
    except ClientError:
        return None
    if stack["StackStatus"] in ("CREATE_FAILED", "ROLLBACK_COMPLETE", "ROLLBACK_FAILED"):
        client.delete_stack(StackName=STACK)
        return None
    return dict(stack)


def _finished(client: CloudFormationClient) -> dict[str, Any]:
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        stack = client.describe_stacks(StackName=STACK)["Stacks"][0]
        if not stack["StackStatus"].endswith("_IN_PROGRESS"):
            if stack["StackStatus"] in ("CREATE_COMPLETE", "UPDATE_COMPLETE"):
                return dict(stack)
            raise LocalError(
                f"template.yaml could not be deployed ({_reason(client)}). Correct it and start again."
            )
        time.sleep(0.03)
    raise LocalError(
        f"template.yaml was not deployed within {SECONDS} seconds. The log of the emulator may say why."
    )


def _reason(client: CloudFormationClient) -> str:
    events = client.describe_stack_events(StackName=STACK)["StackEvents"]
    failed = [event for event in reversed(events) if event.get("ResourceStatus", "").endswith("_FAILED")]
    return "; ".join(
        f"{event['LogicalResourceId']}: {event.get('ResourceStatusReason', '')}" for event in failed[:1]
    )
