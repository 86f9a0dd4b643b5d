"""`tuneyard up` survives being killed, says in a sentence what is wrong, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from conftest import Stack, left_of, running

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
ASK = [{"role": "user", "content": "Answer yes, no or maybe."}]


def http(stack: Stack) -> httpx.Client:
    headers = {"Authorization": f"Bearer {stack.api_key}"}
    return httpx.Client(base_url=stack.base_url, headers=headers, timeout=60)


def lambdas(stack: Stack) -> httpx.Client:
    """The same API by way of the emulator's API Gateway and the real handlers."""
    known = json.loads((stack.state / "environment.json").read_text())
    address = f"{known['AWS_ENDPOINT_URL']}/_aws/execute-api/{known['TUNEYARD_API_ID']}/live"
    headers = {"Authorization": f"Bearer {stack.api_key}"}
    return httpx.Client(base_url=address, headers=headers, timeout=60)


def make_model(client: httpx.Client, name: str) -> dict[str, Any]:
    body = {"project": "local-stack", "name": name, "base_model": "tuneyard/tiny"}
    answer = client.post("/v1/preview/models", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def process_named(stack: Stack, name: str) -> psutil.Process:
    children = psutil.Process(stack.pid).children()
    return next(child for child in children if name in child.cmdline())


def until(true: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.1)


def run_up(*options: str) -> subprocess.CompletedProcess[str]:
    """`tuneyard up` where it cannot run."""
    command = [sys.executable, "-m", "tuneyard_host.cli", "up", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_handlers_answer_through_the_emulators_api_gateway(stack: Stack):
    with lambdas(stack) as client:
        assert client.get("/v1/health").json()["status"] == "ok"
        model = make_model(client, "by-lambda")
        assert client.get(f"/v1/preview/models/{model['id']}").json()["id"] == model["id"]
        unknown = client.get("/v1/preview/models/00000000-0000-0000-0000-000000000000")

    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "not_found" and unknown.json()["detail"]
    with http(stack) as client:
        assert client.get(f"/v1/preview/models/{model['id']}").status_code == 200


def test_the_system_check_is_all_well(stack: Stack):
    with http(stack) as client:
        answer = client.get("/v1/system-check")

    assert answer.status_code == 200, answer.text


def test_the_first_key_is_in_a_file_for_its_owner_alone(stack: Stack):
    file = stack.state / "key"

    assert file.read_text().strip() == stack.api_key
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_web_page_cannot_talk_to_the_emulator(stack: Stack):
    endpoint = json.loads((stack.state / "environment.json").read_text())["AWS_ENDPOINT_URL"]

    answer = httpx.post(endpoint, headers={"Origin": "https://example.com"}, content=b"Action=ListQueues")

    assert answer.status_code == 403


def test_a_second_start_on_the_same_folder_says_so(stack: Stack):
    second = run_up("--state", str(stack.state), "--port", "0")

    assert second.returncode == 1
    assert second.stderr.startswith(f"Another Tuneyard is running on the state folder {stack.state}.")
    assert second.stderr.count("\n") == 1


def test_a_busy_port_says_so(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = run_up("--state", str(tmp_path), "--port", str(port))

    assert refused.returncode == 1
    assert refused.stderr.startswith(f"Port {port} of 127.0.0.1 is taken by another program.")
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize("place", ["a file", "read-only"])
def test_a_state_folder_that_cannot_be_written_says_so(tmp_path: Path, place: str):
    folder = tmp_path / "state"
    if place == "a file":
        folder.write_text("")
    elif os.geteuid() == 0:
        folder = Path("/proc/tuneyard")  # root may write anywhere else
    else:
        folder.mkdir(mode=0o500)
    refused = run_up("--state", str(folder), "--port", "0")

    assert refused.returncode == 1
    assert refused.stderr.startswith(f"The state folder {folder} cannot be written")
    assert refused.stderr.count("\n") == 1


def test_a_base_model_that_cannot_be_read_is_refused_by_name(tmp_path: Path):
    refused = run_up("--state", str(tmp_path), "--port", "0", "--base-model", "mine")

    assert refused.returncode == 1
    assert refused.stderr.startswith("'mine' does not name a base model")


def test_a_killed_inference_service_comes_back(stack: Stack):
    process_named(stack, "inference").kill()

    with http(stack) as client:
        request = {"model": "tuneyard/tiny", "messages": ASK, "max_tokens": 8}
        until(lambda: client.post("/v1/chat/completions", json=request).status_code == 200)


@pytest.mark.slow
def test_what_was_made_survives_kill_9_of_every_part_and_then_of_all_of_them(tmp_path: Path):
    state = tmp_path / "state"
    with running(state) as stack, http(stack) as client:
        model = make_model(client, "kept")
        for _ in range(2):  # the first may have been begun before the model was there
            last = (state / "aws" / "current").resolve()
            until(lambda last=last: (state / "aws" / "current").resolve() != last)
        for name in ("door", "emulator"):
            process_named(stack, name).kill()
        until(lambda: answers(client, f"/v1/preview/models/{model['id']}"))
        family = psutil.Process(stack.pid).children(recursive=True)
        for process in [psutil.Process(stack.pid), *family]:
            process.kill()
        assert left_of(family, seconds=5) == []

    with running(state) as stack, http(stack) as client:
        assert stack.api_key == client.headers["Authorization"].removeprefix("Bearer ")
        assert client.get(f"/v1/preview/models/{model['id']}").json() == model
        name = f"wandb-artifact:///{stack.team}/local-stack/kept"
        answer = client.post("/v1/chat/completions", json={"model": name, "messages": ASK, "max_tokens": 8})
        assert answer.status_code == 200, answer.text


def answers(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
def test_no_process_outlives_a_killed_parent(tmp_path: Path):
    with running(tmp_path / "state") as stack:
        family = psutil.Process(stack.pid).children(recursive=True)
        os.kill(stack.pid, signal.SIGKILL)

        assert left_of(family, seconds=25) == []


def test_replay_on_the_command_line_makes_the_same_adapter_as_the_stacks_trainer(stack: Stack):
    with http(stack) as client:
        model = make_model(client, "replayed")
        rollouts = [
            {"messages_and_choices": [*ASK, {"role": "assistant", "content": answer}], "reward": reward}
            for answer, reward in (("yes", 0.0), ("no", 0.5), ("maybe", 1.0))
        ]
        body = {"model_id": model["id"], "trajectory_groups": [{"trajectories": rollouts}]}
        body["experimental_config"] = {"allow_training_without_logprobs": True}
        job = client.post("/v1/preview/training-jobs", json=body).json()
        path = f"/v1/preview/training-jobs/{job['id']}"
        until(lambda: client.get(path).json()["status"] in ("succeeded", "failed"), seconds=100)

    command = [sys.executable, "-m", "tuneyard_host.cli", "replay", job["id"], "--state", str(stack.state)]
    told = subprocess.run(command, capture_output=True, text=True)

    assert (told.returncode, told.stdout.splitlines()[-1]) == (0, "The same adapter."), told


@pytest.mark.slow
def test_two_processes_train_a_job_together(stack: Stack):
    alone = process_named(stack, "trainer")
    alone.suspend()
    known = json.loads((stack.state / "environment.json").read_text())
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "tuneyard_host.cli",
        "trainer",
        "--name",
        "pair",
        "--nproc",
        "2",
    ]
    try:
        time.sleep(3)  # what it may have asked the queue for comes back empty
        with (
            subprocess.Popen(command, env=os.environ | known | {"OMP_NUM_THREADS": "1"}) as pair,
            http(stack) as client,
        ):
            model = make_model(client, "together")
            rollouts = [
                {"messages_and_choices": [*ASK, {"role": "assistant", "content": answer}], "reward": reward}
                for answer, reward in (("yes", 0.0), ("no", 0.5), ("maybe", 1.0))
            ]
            config = {"allow_training_without_logprobs": True}
            made = []
            for rate in (1e-3, 2e-3):
                body = {"model_id": model["id"], "trajectory_groups": [{"trajectories": rollouts}]}
                body["experimental_config"] = config | {"learning_rate": rate}
                made.append(client.post("/v1/preview/training-jobs", json=body).json()["id"])
            path = f"/v1/preview/training-jobs/{made[-1]}"
            until(lambda: client.get(path).json()["status"] in ("succeeded", "failed"), seconds=200)
            job = client.get(path).json()
            told = client.get(f"{path}/events").json()["data"]
            pair.send_signal(signal.SIGTERM)
            assert pair.wait(60) == 1  # torchrun says so when it is told to stop
    finally:
        alone.resume()

    assert job["status"] == "succeeded", job
    assert [event["type"] for event in told] == ["training_started", "gradient_step", "training_ended"]
    assert job["checkpoint_step"] == 2
