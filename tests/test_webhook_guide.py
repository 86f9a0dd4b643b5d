"""The code in docs/webhooks.md, run as it stands there, on messages that we signed."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks import WebhookVerificationError

from conftest import ROOT
from tuneyard import signatures

SECRET, BODY = "long and random", '{"text":"\u202e🚀 \\u0000"}'.encode()
NODE = """
import { readFileSync } from "node:fs";
const { body, headers, secret } = JSON.parse(readFileSync(0));
console.log(isOurs(Buffer.from(body, "base64"), headers, secret));
"""
GO = """
package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
)

func main() {
	var given struct {
		Body    []byte
		Headers map[string]string
		Secret  string
	}
	if err := json.NewDecoder(os.Stdin).Decode(&given); err != nil {
		panic(err)
	}
	header := http.Header{}
	for name, value := range given.Headers {
		header.Set(name, value)
	}
	fmt.Println(IsOurs(given.Body, header, given.Secret))
}
"""


def blocks(language: str) -> list[str]:
    """The guide's code in a language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / "webhooks.md").read_text(), re.DOTALL)


def message(*, age: int = 0, previous: str | None = None) -> dict[str, str]:
    """The headers of a message that was signed so many seconds ago."""
    keys = [SECRET, *([previous] if previous else [])]
    told = {"id": "msg_1", "timestamp": round(time.time()) - age, "body": BODY}
    return {name.lower(): value for name, value in signatures.headers(keys, **told, previous=previous)}


def check(is_ours: Callable[[bytes, dict[str, str], str], bool]) -> None:
    """What every verifier must take, and what it must refuse."""
    pasted, other = signatures.pasteable(SECRET), signatures.pasteable("another")

    assert is_ours(BODY, message(), pasted)
    assert is_ours(BODY, message(previous="another"), other)
    assert not is_ours(BODY + b" ", message(), pasted)
    assert not is_ours(BODY, message(), other)
    assert not is_ours(BODY, message() | {"webhook-id": "msg_2"}, pasted)
    assert not is_ours(BODY, message(age=400), pasted)
    assert not is_ours(BODY, message(age=-400), pasted)
    assert not is_ours(BODY, message() | {"webhook-timestamp": "soon"}, pasted)
    assert not is_ours(BODY, message() | {"webhook-signature": "v1,nonsense"}, pasted)


def by(command: list[str], *, cwd: Path) -> Callable[[bytes, dict[str, str], str], bool]:
    """A verifier that is a program: it reads JSON and prints true or false."""

    def is_ours(body: bytes, headers: dict[str, str], secret: str) -> bool:
        told = {"body": base64.b64encode(body).decode(), "headers": headers, "secret": secret}
        ran = subprocess.run(
            command, cwd=cwd, input=json.dumps(told), capture_output=True, text=True, check=False
        )
        assert ran.stdout in ("true\n", "false\n"), ran.stderr
        return ran.stdout == "true\n"

    return is_ours


def test_the_python_of_the_guide_takes_what_we_sign_and_nothing_else():
    library, plain = blocks("python")
    known: dict[str, Any] = {}
    exec(plain, known)

    def is_ours(body: bytes, headers: dict[str, str], secret: str) -> bool:
        exec(library.replace("whsec_...", secret), known)
        try:
            return bool(known["receive"](body, headers) == json.loads(BODY))
        except WebhookVerificationError:
            return False

    check(is_ours)
    signature = message()["x-service-signature"]
    assert known["is_ours"](BODY, signature, SECRET)
    assert not known["is_ours"](BODY + b" ", signature, SECRET)
    assert not known["is_ours"](BODY, signature, "another")


def test_the_node_of_the_guide_takes_what_we_sign_and_nothing_else(tmp_path: Path):
    if shutil.which("node") is None:
        pytest.skip("there is no node on this machine")
    (code,) = blocks("js")
    (tmp_path / "verify.mjs").write_text(code + NODE)

    check(by(["node", "verify.mjs"], cwd=tmp_path))


def test_the_go_of_the_guide_takes_what_we_sign_and_nothing_else(tmp_path: Path):
    if shutil.which("go") is None:
        pytest.skip("there is no Go on this machine")
    (code,) = blocks("go")
    (tmp_path / "verify.go").write_text("package main\n\n" + code)
    (tmp_path / "main.go").write_text(GO)
    (tmp_path / "go.mod").write_text("module guide\n\ngo 1.21\n")
    program = str(tmp_path / "guide")
    built = subprocess.run(
        ["go", "build", "-o", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr

    check(by([program], cwd=tmp_path))


def test_the_json_of_the_guide_is_json():
    for text in blocks("json"):
        assert json.loads(text), text
