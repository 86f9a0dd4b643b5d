"""The house is what its plan says: doors, template, settings and documents name the same things."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

from conftest import ROOT
from tuneyard.settings import Settings
from tuneyard_host import reference
from tuneyard_host.local import doors

WEB_ADAPTER = {"AWS_LAMBDA_EXEC_WRAPPER", "AWS_LWA_INVOKE_MODE", "AWS_LWA_PORT"}
STATUS = {
    "health.system_check": 503,
    "models.get_unknown": 404,
    "training_jobs.create_for_unknown_model": 404,
    "chat.completion_without_inference": 503,
}


def functions(template: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The template's functions by the name of their folder."""
    found = template["Resources"].values()
    mine = [resource["Properties"] for resource in found if resource["Type"] == "AWS::Serverless::Function"]
    return {properties["CodeUri"].removeprefix("functions/"): properties for properties in mine}


def routes_of(module: Any) -> set[tuple[str, str]]:
    router = getattr(module, "router", None)
    routes = [route for route in router.routes if isinstance(route, APIRoute)] if router else []
    return {(method, route.path) for route in routes for method in route.methods}


def test_each_function_folder_is_a_resource_and_the_other_way_round(template: dict[str, Any]):
    assert set(functions(template)) == set(doors.modules())


def test_each_route_is_an_api_event_or_spelled_out_and_the_other_way_round(template: dict[str, Any]):
    spelled_out = {
        (method.upper(), path)
        for path, methods in template["Resources"]["Api"]["Properties"]["DefinitionBody"]["paths"].items()
        for method in methods
    }
    for name, module in doors.modules().items():
        declared = {
            (event["Properties"]["Method"], event["Properties"]["Path"])
            for event in functions(template)[name].get("Events", {}).values()
            if event["Type"] == "Api"
        }
        assert (name, declared) == (name, set() if name == "chat" else routes_of(module))
    assert spelled_out == routes_of(doors.modules()["chat"])


def test_each_environment_variable_is_a_setting(template: dict[str, Any]):
    names = set(template["Globals"]["Function"]["Environment"]["Variables"])
    for properties in functions(template).values():
        names |= set(properties.get("Environment", {}).get("Variables", {}))
    (container,) = template["Resources"]["TrainerTask"]["Properties"]["ContainerDefinitions"]
    trainers = {variable["Name"] for variable in container["Environment"]} - {"AWS_DEFAULT_REGION"}
    known = {f"TUNEYARD_{field.upper()}" for field in Settings.model_fields}

    assert names - {"POWERTOOLS_SERVICE_NAME", *WEB_ADAPTER} <= known
    required = {f"TUNEYARD_{n.upper()}" for n, f in Settings.model_fields.items() if f.is_required()}
    assert required <= names
    assert required <= trainers <= known


@pytest.fixture
def loop() -> Iterator[None]:
    """An event loop in this thread, as a handler finds it in Lambda; ``asyncio.run`` of another test took it away."""
    made = asyncio.new_event_loop()
    asyncio.set_event_loop(made)
    yield
    asyncio.set_event_loop(None)
    made.close()


@pytest.mark.parametrize("path", sorted((ROOT / "events").glob("*.json")), ids=lambda path: path.stem)
def test_each_sample_event_goes_through_its_real_handler(path: Path, key: str, loop: None):
    function, name = path.stem.split(".")
    event = json.loads(path.read_text().replace("$KEY", key))
    module = doors.modules()[function]

    handler = getattr(module, "handler", None) or getattr(module, name)
    answer = handler(event, None)

    if "httpMethod" in event:
        assert answer["statusCode"] == STATUS.get(path.stem, 200), answer
        assert json.loads(answer["body"]) is not None


def test_each_function_has_a_sample_event():
    named = {path.stem.split(".")[0] for path in (ROOT / "events").glob("*.json")}

    assert named == set(doors.modules())


def test_the_readmes_endpoint_table_is_the_routes():
    assert reference.endpoint_table() in (ROOT / "README.md").read_text()


def test_the_openapi_file_is_the_routes():
    assert json.loads((ROOT / "docs" / "openapi.json").read_text()) == reference.openapi()


def test_no_file_names_a_machine_path():
    for path in [*ROOT.glob("layers/**/*.py"), *ROOT.glob("host/**/*.py"), *ROOT.glob("functions/**/*.py")]:
        assert not re.search(r"/(work|root|home/\w+)/", path.read_text()), path
