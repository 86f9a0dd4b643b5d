"""Artifacts, registries and runs through the public door, and the events that they raise."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import botocore.client
import pytest
from fastapi.testclient import TestClient

from tuneyard import blobs, ids, leases, runs, table
from tuneyard.records import ArtifactEvent, Identity, Job, JobStatus, Run
from tuneyard.settings import settings

MODEL = {"project": "p", "name": "agent", "base_model": "tuneyard/tiny"}
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "logprobs": None}
GROUP = {"trajectories": [{"messages_and_choices": [{"role": "user", "content": "?"}, CHOICE], "reward": 1}]}
DATA = "/v1/projects/acme/p/collections/data"
AGENT = "/v1/projects/acme/p/collections/agent"
LINE = b'{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}\n'


@pytest.fixture
def model(api: TestClient) -> dict[str, Any]:
    """A model without checkpoints."""
    made: dict[str, Any] = api.post("/v1/preview/models", json=MODEL).json()
    return made


def uploaded(api: TestClient, body: bytes = LINE) -> str:
    """The URL of an upload."""
    url = str(api.post("/v1/preview/uploads").json()["url"])
    key = blobs.uploaded_key("acme", url)
    assert key is not None
    blobs.put(key, body)
    return url


def trained(api: TestClient, model_id: str, number: int = 0) -> Job:
    """A job that made a checkpoint."""
    body = {
        "model_id": model_id,
        "trajectory_groups": [GROUP],
        "experimental_config": {"epsilon": 1 + number},
    }
    made = api.post("/v1/preview/training-jobs", json=body).json()
    job = leases.claim(made["id"], worker="w")
    assert job is not None
    model = api.get(f"/v1/preview/models/{model_id}").json()
    leases.commit(
        job,
        step=model["last_step"] + 1,
        files={"adapter_config.json": b"{}"},
        metrics={"reward": 0.5, "loss": 1.25},
        lineage={},
    )
    return job


def events() -> list[tuple[str, str | None]]:
    """The events so far in order, none of which the bus of these tests takes."""
    found = table.listed(ArtifactEvent, "due", "", limit=100)
    return [(one.type.value, one.alias or one.tag or one.data.get("state")) for one in found]


def test_a_data_set_has_versions_with_files_and_metadata_and_can_be_trained_on(
    api: TestClient, model: dict[str, Any]
):
    for number in (0, 1):
        body = {"files": {"train.jsonl": uploaded(api)}, "metadata": {"rows": number}}
        made = api.post(f"{DATA}/versions", json=body).json()
        assert (made["version"], made["aliases"]) == (number, [f"v{number}", "latest"])

    listed = api.get(f"{DATA}/versions", params={"order": "desc"}).json()
    assert [row["aliases"] for row in listed["data"]] == [["v1", "latest"], ["v0"]]
    assert api.get(f"{DATA}/versions/v0").json()["metadata"] == {"rows": 0}
    assert api.get(f"{DATA}/versions/latest").json()["version"] == 1
    assert "X-Amz-Signature" in api.get(f"{DATA}/versions/1").json()["files"][0]["url"]
    for version in ("", ":v0", ":latest", ":1"):
        url = f"wandb-artifact:///acme/p/data{version}"
        job = api.post(
            "/v1/preview/sft-training-jobs", json={"model_id": model["id"], "training_data_url": url}
        )
        assert job.status_code == 200, job.text
        assert blobs.get(blobs.input_key(job.json()["id"])) == LINE


@pytest.mark.parametrize(
    ("url", "status"),
    [
        ("wandb-artifact:///acme/p/nothing:v0", 404),
        ("wandb-artifact:///acme/p/data:v7", 404),
        ("wandb-artifact:///rivals/p/data:v0", 404),
        ("wandb-artifact:///data", 422),
        ("wandb-artifact:///acme/p/empty:v0", 422),
    ],
)
def test_training_data_that_is_no_artifact_is_refused(
    api: TestClient, model: dict[str, Any], url: str, status: int
):
    api.post(f"{DATA}/versions", json={"files": {"train.jsonl": uploaded(api)}})
    api.post("/v1/projects/acme/p/collections/empty/versions", json={})

    answer = api.post(
        "/v1/preview/sft-training-jobs", json={"model_id": model["id"], "training_data_url": url}
    )

    assert answer.status_code == status


def test_each_checkpoint_is_a_version_of_its_models_collection(api: TestClient, model: dict[str, Any]):
    assert api.get(AGENT).json()["type"] == "model"
    for number in range(2):
        trained(api, model["id"], number)

    listed = api.get(f"{AGENT}/versions").json()["data"]
    assert [row["aliases"] for row in listed] == [["step1"], ["step2", "latest"]]
    assert listed[0]["metadata"]["reward"] == 0.5
    assert api.put(f"{AGENT}/versions/1/aliases/production").status_code == 200
    for name in ("1", "v1", "step1", "production"):
        assert api.get(f"{AGENT}/versions/{name}").json()["version"] == 1
    assert [kind for kind, _ in events()].count("ADD_ARTIFACT_ALIAS") == 5
    assert ("RUN_STATE", "finished") in events()


def test_a_moved_alias_is_one_event_and_the_same_again_none(api: TestClient):
    for _ in range(2):
        api.post(f"{DATA}/versions", json={})
    before = len(events())

    for version in (0, 0, 1, 1):
        assert api.put(f"{DATA}/versions/{version}/aliases/prod").status_code == 200

    assert events()[before:] == [("ADD_ARTIFACT_ALIAS", "prod")] * 2
    rows = api.get(f"{DATA}/versions").json()["data"]
    assert [row["aliases"] for row in rows] == [["v0"], ["v1", "latest", "prod"]]
    assert api.delete(f"{DATA}/versions/0/aliases/prod").status_code == 404
    assert api.delete(f"{DATA}/versions/1/aliases/prod").status_code == 200
    assert api.get(f"{DATA}/versions/prod").status_code == 404
    assert len(events()) == before + 2


def test_tags_are_free_and_told_once(api: TestClient):
    for _ in range(2):
        api.post(f"{DATA}/versions", json={})
    before = len(events())

    for version in (0, 0, 1):
        assert api.put(f"{DATA}/versions/{version}/tags/gold").status_code == 200

    assert events()[before:] == [("ADD_ARTIFACT_TAG", "gold")] * 2
    assert api.delete(f"{DATA}/versions/0/tags/gold").json()["tags"] == []
    assert api.delete(f"{DATA}/versions/0/tags/gold").status_code == 404
    assert api.get(f"{DATA}/versions/1").json()["tags"] == ["gold"]


def test_computed_names_can_neither_be_given_nor_removed(api: TestClient):
    for _ in range(2):
        api.post(f"{DATA}/versions", json={})
    before = len(events())

    for alias, status in (("latest", 422), ("v1", 422), ("step3", 422), ("7", 422), ("v0", 200)):
        assert api.put(f"{DATA}/versions/0/aliases/{alias}").status_code == status, alias
    assert api.put(f"{DATA}/versions/1/aliases/latest").status_code == 200
    assert api.delete(f"{DATA}/versions/1/aliases/latest").status_code == 422
    assert len(events()) == before


@pytest.mark.parametrize(
    "alias", ['x","admin":true,"y":"', "🚀 go", "שלום", "a b", "50%", "a:b", "?q=1&r#s", "$" + "{SECRET}"]
)
def test_an_alias_may_be_any_text(api: TestClient, alias: str):
    api.post(f"{DATA}/versions", json={})

    assert api.put(f"{DATA}/versions/0/aliases/{quote(alias, safe='')}").json()["aliases"][-1] == alias
    assert api.get(f"{DATA}/versions/{quote(alias, safe='')}").json()["version"] == 0
    assert api.delete(f"{DATA}/versions/0/aliases/{quote(alias, safe='')}").status_code == 200


@pytest.mark.parametrize("alias", ["a\nb", " a", "a\\b", "x" * 257, "\x00"])
def test_an_alias_that_cannot_be_is_422(api: TestClient, alias: str):
    api.post(f"{DATA}/versions", json={})

    assert api.put(f"{DATA}/versions/0/aliases/{quote(alias, safe='')}").status_code == 422


@pytest.mark.parametrize(
    "metadata", ['{"a": NaN}', '{"a": "\\ud800"}', '{"a": "' + "x" * 70_000 + '"}', "[]"]
)
def test_metadata_that_cannot_be_kept_is_422(api: TestClient, metadata: str):
    body = f'{{"metadata": {metadata}}}'

    answer = api.post(f"{DATA}/versions", content=body, headers={"Content-Type": "application/json"})

    assert answer.status_code == 422


def test_metadata_with_every_kind_of_text_comes_back_as_it_was(api: TestClient):
    metadata = {
        "q": 'a"b\\c',
        "nul": "a\0b",
        "u": "\u2028",
        "deep": {"x": [1, 1.5, None, True]},
        "": "empty key",
    }

    api.post(f"{DATA}/versions", json={"metadata": metadata})

    assert api.get(f"{DATA}/versions/v0").json()["metadata"] == metadata


def test_a_link_is_a_version_of_the_registry_and_one_event(api: TestClient):
    for _ in range(2):
        api.post(f"{DATA}/versions", json={"metadata": {"k": "v"}})
    before = len(events())
    link = {"registry": "datasets", "collection": "good ones"}

    first = api.post(f"{DATA}/versions/1/links", json=link)
    again = api.post(f"{DATA}/versions/1/links", json=link)

    assert first.status_code == 200 and first.json()["id"] == again.json()["id"]
    assert first.json()["source"] == "acme/p/data:v1" and first.json()["metadata"] == {"k": "v"}
    assert events()[before:] == [("LINK_ARTIFACT", None)]
    assert [row["id"] for row in api.get("/v1/registries").json()["data"]] == ["datasets"]
    linked = "/v1/registries/datasets/collections"
    assert [row["id"] for row in api.get(linked).json()["data"]] == ["good ones"]
    assert api.put(f"{linked}/good ones/versions/0/aliases/production").json()["aliases"][-1] == "production"
    assert api.get(f"{DATA}/versions/1").json()["links"] == ["acme/wandb-registry-datasets/good ones"]
    assert api.delete(f"{linked}/good ones/versions/production").status_code == 200
    assert api.get(f"{linked}/good ones/versions").json()["data"] == []
    assert api.get(f"{DATA}/versions/1").json()["links"] == []
    assert api.post(f"{DATA}/versions/1/links", json=link).json()["version"] == 1


def test_names_that_are_taken_or_a_registrys_are_refused(api: TestClient, model: dict[str, Any]):
    api.post(f"{DATA}/versions", json={})

    assert api.post(f"{AGENT}/versions", json={}).status_code == 409
    taken = api.post("/v1/preview/models", json=MODEL | {"name": "data"})
    assert taken.status_code == 409 and "data set" in taken.json()["error"]["message"]
    assert api.post("/v1/preview/models", json=MODEL | {"project": "wandb-registry-x"}).status_code == 422
    path = "/v1/projects/acme/wandb-registry-x/collections/c/versions"
    assert api.post(path, json={}).status_code == 422


def test_lists_come_in_pages_and_refuse_an_unknown_place(api: TestClient):
    for number in range(5):
        api.post(f"/v1/projects/acme/p/collections/c{number}/versions", json={})
        api.post(f"{DATA}/versions", json={})
        api.put(f"{DATA}/versions/{number}/tags/t{number}")

    for path, ordered in (
        ("/v1/projects/acme/p/collections", ["c0", "c1", "c2", "c3", "c4", "data"]),
        (f"{DATA}/versions", [0, 1, 2, 3, 4]),
    ):
        for order, expected in (("asc", ordered), ("desc", ordered[::-1])):
            seen: list[Any] = []
            after = None
            while True:
                query = {"limit": 2, "order": order} | ({"after": after} if after else {})
                page = api.get(path, params=query).json()
                seen += [row.get("version", row["id"]) for row in page["data"]]
                after = page["last_id"]
                if not page["has_more"]:
                    break
            assert seen == expected
        assert api.get(path, params={"after": "nonsense"}).status_code == 422
    tags = [
        row["tags"]
        for row in api.get(f"{DATA}/versions", params={"limit": 3, "order": "desc"}).json()["data"]
    ]
    assert tags == [["t4"], ["t3"], ["t2"]]


def test_a_link_goes_with_all_its_names_at_once(
    api: TestClient, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    api.post(f"{DATA}/versions", json={})
    api.post(f"{DATA}/versions/0/links", json={"registry": "r", "collection": "c"})
    link = "/v1/registries/r/collections/c/versions/0"
    assert api.put(f"{link}/aliases/production").status_code == 200
    assert api.put(f"{link}/tags/good").status_code == 200
    calls: list[str] = []
    original = botocore.client.BaseClient._make_api_call

    def noted(self: Any, operation: str, parameters: Any) -> Any:
        calls.append(operation)
        return original(self, operation, parameters)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", noted)
    assert api.delete(link).status_code == 200

    assert [one for one in calls if one not in ("GetItem", "Query", "BatchGetItem")] == ["TransactWriteItems"]
    assert api.get(link).status_code == 404
    assert api.get(f"{DATA}/versions/0").json()["links"] == []


def test_another_teams_artifacts_and_runs_are_404(
    api: TestClient, stranger: dict[str, str], model: dict[str, Any]
):
    api.post(f"{DATA}/versions", json={})
    api.post(f"{DATA}/versions/0/links", json={"registry": "r", "collection": "c"})

    for method, path, body in (
        ("GET", "/v1/projects/acme/p/collections", None),
        ("GET", DATA, None),
        ("POST", f"{DATA}/versions", {}),
        ("GET", f"{DATA}/versions", None),
        ("GET", f"{DATA}/versions/0", None),
        ("PUT", f"{DATA}/versions/0/aliases/x", None),
        ("PUT", f"{DATA}/versions/0/tags/x", None),
        ("POST", f"{DATA}/versions/0/links", {"registry": "r", "collection": "c"}),
        ("GET", "/v1/registries/r/collections", None),
        ("GET", "/v1/registries/r/collections/c/versions", None),
        ("PUT", "/v1/registries/r/collections/c/versions/0/aliases/x", None),
        ("GET", "/v1/projects/acme/p/runs/agent/metrics", None),
        ("POST", f"/v1/projects/acme/p/runs/{model['run_id']}/metrics", {"metrics": {"a": 1}}),
        ("POST", f"/v1/projects/rivals/p/runs/{model['run_id']}/metrics", {"metrics": {"a": 1}}),
    ):
        answer = api.request(method, path, json=body, headers=stranger)
        assert (answer.status_code, method, path) == (404, method, path)
    assert api.get("/v1/registries", headers=stranger).json()["data"] == []


def test_metrics_are_appended_and_read_in_order_by_run_or_model(api: TestClient, model: dict[str, Any]):
    by_name, by_id = (f"/v1/projects/acme/p/runs/{run}/metrics" for run in ("agent", model["run_id"]))
    for number in range(3):
        assert api.post(by_name, json={"metrics": {"loss": number}}).json()["row"] == number + 1

    first = api.get(by_id, params={"limit": 2}).json()
    assert [row["metrics"] for row in first["data"]] == [{"loss": 0.0}, {"loss": 1.0}] and first["has_more"]
    rest = api.get(by_id, params={"after": first["last_id"]}).json()
    assert [row["row"] for row in rest["data"]] == [3] and not rest["has_more"]
    assert [kind for kind, _ in events()] == ["RUN_METRIC"] * 3
    assert api.get(by_id, params={"after": ids.ordered(model["run_id"], 9)}).status_code == 422
    assert api.get("/v1/projects/acme/p/runs/nothing/metrics").status_code == 404
    for bad in ({}, {"": 1}, {"a": "x"}, {"a": True}, {"a": None}):
        assert api.post(by_id, json={"metrics": bad}).status_code == 422
    nan = api.post(by_id, content='{"metrics": {"a": NaN}}', headers={"Content-Type": "application/json"})
    assert nan.status_code == 422


def test_the_result_of_a_job_is_a_row_of_its_models_run(api: TestClient, model: dict[str, Any]):
    job = trained(api, model["id"])

    (row,) = api.get("/v1/projects/acme/p/runs/agent/metrics").json()["data"]

    assert row["metrics"] == {"train/reward": 0.5, "train/loss": 1.25, "train/step": 1.0}
    assert api.get(f"/v1/preview/training-jobs/{job.id}").json()["status"] == JobStatus.SUCCEEDED


def test_each_gradient_step_is_a_row_of_its_models_run_and_an_event_once(
    api: TestClient, model: dict[str, Any]
):
    made = api.post("/v1/preview/training-jobs", json={"model_id": model["id"], "trajectory_groups": [GROUP]})
    job = leases.claim(made.json()["id"], worker="w")
    assert job is not None
    leases.report(job, "gradient_step", {"loss": 1.5, "reward": 1}, steps_done=1)

    with pytest.raises(leases.Lost):
        leases.report(job, "gradient_step", {"loss": 1.5, "reward": 1}, steps_done=1)

    (row,) = api.get("/v1/projects/acme/p/runs/agent/metrics").json()["data"]
    assert row["metrics"] == {"gradient_step/loss": 1.5, "gradient_step/reward": 1.0}
    assert [kind for kind, _ in events()].count("RUN_METRIC") == 1


def test_the_last_values_of_a_metric_are_found_between_rows_without_it(
    api: TestClient, model: dict[str, Any], caller: Identity
):
    run = table.get(Run, model["run_id"])
    assert run is not None
    for number in range(30):
        runs.append(
            run, {"often": float(number)} | ({"rare": float(number)} if number % 10 == 0 else {}), author="a"
        )

    assert runs.values_before(run.id, "rare", row=31, limit=5) == [20.0, 10.0, 0.0]
    assert runs.values_before(run.id, "often", row=11, limit=3) == [9.0, 8.0, 7.0]
    assert runs.values_before(run.id, "often", row=1, limit=3) == []


def test_an_event_that_the_bus_refused_is_still_there_for_the_sweep(api: TestClient):
    api.post(f"{DATA}/versions", json={})

    (one,) = table.listed(ArtifactEvent, "due", "", limit=10)

    assert (one.alias, one.collection, one.version_name) == ("latest", "acme/p/data", "v0")
    assert one.published_at is None and settings().bus_name
