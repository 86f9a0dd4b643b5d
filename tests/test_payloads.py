"""Payloads: whatever is in a value, the body is the template with that value in one string and nothing else."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuneyard import matching, payloads
from tuneyard.errors import Invalid
from tuneyard.payloads import Unrenderable
from tuneyard.records import ArtifactEvent, EventType
from tuneyard.webhook_records import MetricRule

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def event(**fields: Any) -> ArtifactEvent:
    """An alias event with these fields."""
    known: dict[str, Any] = {
        "id": "e", "type": EventType.ADD_ARTIFACT_ALIAS, "entity": "acme", "project": "p", "author": "ada",
        "collection": "acme/p/agent", "version": 3, "version_name": "step3", "alias": "prod", "created_at": 0,
    }  # fmt: skip
    return ArtifactEvent(**known | fields)


def rendered(template: Any, secrets: dict[str, str] | None = None, **fields: Any) -> Any:
    """The body of a template, read back."""
    text = template if isinstance(template, str) else json.dumps(template)
    return json.loads(payloads.render(text, event(**fields), {}, secrets or {}))


@given(TEXT)
def test_any_alias_is_one_string_and_never_a_key(alias: str):
    assert rendered({"text": "<${alias}>", "n": 1}, alias=alias) == {"text": f"<{alias}>", "n": 1}


@given(st.dictionaries(TEXT.filter(lambda key: key and "}" not in key), JSON, min_size=1, max_size=4))
def test_any_metadata_round_trips(metadata: dict[str, Any]):
    for key, value in metadata.items():
        got = rendered({"v": f"${{artifact_metadata.{key}}}"}, metadata=metadata)["v"]
        if isinstance(value, str):
            assert got == value
        else:
            assert got == "" if value is None else json.loads(got) == value


PARTS = st.sampled_from(
    ["${alias}", "${tag}", "${artifact_metadata.k}", "${KEY}", "${ACCESS_TOKEN}", "$", "}", '"']
)
FIELDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="{"), max_size=20)
TEMPLATES = st.dictionaries(
    FIELDS,
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.lists(PARTS | FIELDS, max_size=4).map("".join),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(FIELDS, inner, max_size=4),
        max_leaves=10,
    ),
    max_size=5,
)
HOSTILE = TEXT | st.sampled_from(
    ['","admin":true,"x":"', "\\", "\0\u2028", "${KEY}", "$${", "]}", "\u202e🚀"]
)


def filled(node: Any, values: dict[str, str]) -> Any:
    """A template filled by hand: the text between variables, the values where they stand, ``${`` for ``$${``."""
    if isinstance(node, dict):
        return {key: filled(value, values) for key, value in node.items()}
    if isinstance(node, list):
        return [filled(value, values) for value in node]
    if not isinstance(node, str):
        return node
    return "".join(values.get(part, part) for part in re.split(r"(\$\$\{|\$\{[^}]*\})", node))


@given(TEMPLATES, st.tuples(*[HOSTILE] * 5))
def test_any_values_leave_valid_json_with_the_keys_and_strings_of_the_template(
    template: dict[str, Any], told: tuple[str, ...]
):
    alias, tag, metadata, key, token = told
    payloads.check(json.dumps(template), secret="KEY")

    body = rendered(
        template, {"KEY": key, "ACCESS_TOKEN": token}, alias=alias, tag=tag, metadata={"k": metadata}
    )

    names = ("${alias}", "${tag}", "${artifact_metadata.k}", "${KEY}", "${ACCESS_TOKEN}")
    assert body == filled(template, dict(zip(names, told, strict=True)) | {"$${": "${"})


@given(TEXT, TEXT)
def test_a_value_is_never_expanded_again(before: str, after: str):
    body = rendered(
        {"v": "${alias}"},
        {"ACCESS_TOKEN": "secret", "KEY": "secret"},
        alias=f"{before}${{ACCESS_TOKEN}}${{KEY}}{after}",
    )

    assert body == {"v": f"{before}${{ACCESS_TOKEN}}${{KEY}}{after}"}


@given(TEXT, st.dictionaries(TEXT.filter(lambda key: "${" not in key), JSON, max_size=4))
def test_a_template_without_variables_is_sent_as_it_is(name: str, rest: dict[str, Any]):
    template = {"name": name, "rest": rest}
    if "${" not in json.dumps(template):
        assert rendered(template) == template


@given(st.text(max_size=200))
def test_no_text_breaks_the_check(text: str):
    try:
        payloads.check(text, secret=None)
    except Invalid:
        return
    assert isinstance(rendered(text), dict)


@given(
    st.lists(st.sampled_from(["$", "{", "}", "${alias}", "$${", "a", "${", "$$"]), max_size=12).map("".join)
)
def test_dollars_mean_the_same_to_the_check_and_the_sender(text: str):
    template = json.dumps({"v": text})
    try:
        payloads.check(template, secret=None)
    except Invalid:
        with pytest.raises(Unrenderable):
            payloads.render(template, event(), {}, {})
        return
    expected = text.replace("$${", "\0").replace("${alias}", "prod").replace("\0", "${")
    assert rendered(template)["v"] == expected


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ('{"n": ${alias}}', "inside a string"),
        ('{"${alias}": 1}', "variables can stand in values only"),
        ('{"a": 1, "a": 2}', "twice"),
        ("[]", "JSON object"),
        ('"${alias}"', "JSON object"),
        ('{"a": "${nope}"}', "${nope}"),
        ('{"a": "${SECRET}"}', "${SECRET}"),
        ('{"a": "${}"}', "no variable"),
        ('{"a": "${alias"}', "no closing brace"),
        ('{"a": "${artifact_metadata.}"}', "no variable"),
        ('{"a": "${artifact_metadata}"}', "no variable"),
        ('{"a": "\\ud800"}', "surrogate"),
        ('{"a": 1e999}', "too large"),
        ('{"a": NaN}', "NaN"),
        ('{"a": ' + "9" * 5000 + "}", "integer"),
        ("[" * 10_000 + "]" * 10_000, "32 levels"),
        ('{"a":' * 10_000 + "1" + "}" * 10_000, "32 KB"),
        ('{"a":' * 40 + "1" + "}" * 40, "32 levels"),
        (json.dumps({"a": "x" * 33_000}), "32 KB"),
        ("", "JSON"),
        ("{'a': 1}", "JSON"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused_with_the_reason(template: str, names: str):
    with pytest.raises(Invalid) as refused:
        payloads.check(template, secret="KEY")

    assert names in str(refused.value)
    assert refused.value.param == "payload"


def test_every_variable_is_known_and_filled():
    names = [*payloads.NAMES, *payloads.MORE_NAMES, "ACCESS_TOKEN", "KEY", "artifact_metadata.a b"]
    template = json.dumps({name: f"${{{name}}}" for name in names})
    payloads.check(template, secret="KEY")

    body = rendered(
        template, {"ACCESS_TOKEN": "t", "KEY": "k"}, metadata={"a b": {"c": [1, None]}}, tag="gold"
    )

    assert body["project_name"] == "p" and body["entity_name"] == "acme"
    assert body["event_type"] == "ADD_ARTIFACT_ALIAS" and body["event_author"] == "ada"
    assert (body["alias"], body["tag"], body["artifact_collection_name"]) == ("prod", "gold", "agent")
    assert body["artifact_version"] == "wandb-artifact:///acme/p/agent:step3"
    assert body["artifact_version_string"] == "acme/p/agent:prod"
    assert body["artifact_metadata.a b"] == '{"c":[1,null]}'
    assert (body["ACCESS_TOKEN"], body["KEY"]) == ("t", "k")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (True, "true"),
        (1.5, "1.5"),
        (7, "7"),
        ("x", "x"),
        (None, ""),
        ([1, "é"], '[1,"é"]'),
        ('q"\\\0\u2028', 'q"\\\0\u2028'),
    ],
)
def test_metadata_is_always_text(value: Any, shown: str):
    assert rendered({"v": "${artifact_metadata.k}"}, metadata={"k": value}) == {"v": shown}
    assert rendered({"v": "${artifact_metadata.other}"}, metadata={"k": value}) == {"v": ""}


def test_emoji_and_right_to_left_text_are_utf_8():
    body = payloads.render('{"t": "${alias}"}', event(alias="\u202e🚀 שלום"), {}, {})

    assert body == '{"t":"\u202e🚀 שלום"}'.encode()


def test_a_webhook_that_lost_its_secret_makes_a_body_impossible_and_says_so():
    with pytest.raises(Unrenderable, match="another secret"):
        payloads.render('{"k": "${KEY}"}', event(), {}, {})


@pytest.mark.parametrize(
    ("payload", "check"),
    [
        (
            {
                "event_type": "model-promoted",
                "client_payload": {
                    "event_author": "${event_author}", "artifact_version": "${artifact_version}",
                    "artifact_version_string": "${artifact_version_string}", "project_name": "${project_name}",
                    "artifact_collection_name": "${artifact_collection_name}", "entity_name": "${entity_name}",
                },
            },
            lambda body: body["event_type"] == "model-promoted" and len(body["client_payload"]) == 6,
        ),
        (
            {"text": "*${event_author}* promoted <https://x.example|${artifact_version_string}> :rocket: $5"},
            lambda body: body == {"text": "*ada* promoted <https://x.example|acme/p/agent:prod> :rocket: $5"},
        ),
    ],
)  # fmt: skip
def test_payloads_of_known_receivers(payload: dict[str, Any], check: Any):
    template = json.dumps(payload)
    payloads.check(template, secret=None)

    assert check(rendered(template))


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|aa)+$", "^(.*a){20}$"])
def test_no_pattern_is_slow(pattern: str):
    matching.check_pattern(pattern, param="alias_regex")
    began = time.perf_counter()

    matching.found(pattern, "a" * 9_999 + "!")

    assert time.perf_counter() - began < 0.05


@pytest.mark.parametrize(
    "pattern", ["(", "a{1001}", r"(?=x)", r"(a)\1", "x" * 257, "\ud800", "((((a{100}){100}){100}))"]
)
def test_what_re2_refuses_is_refused(pattern: str):
    with pytest.raises(Invalid):
        matching.check_pattern(pattern, param="alias_regex")


def test_patterns_are_unanchored_and_case_sensitive():
    assert matching.found("prod", "my-production") and not matching.found("prod", "PROD")
    assert matching.found("^v[0-9]+$", "v12") and not matching.found("^v[0-9]+$", "v12b")


@pytest.mark.parametrize(
    ("aggregate", "window", "comparison", "threshold", "values", "fires"),
    [
        ("last", 5, ">", 0.9, [0.95, 0.1], 0.95),
        ("last", 5, ">", 0.9, [0.9], None),
        ("avg", 3, ">=", 2.0, [3, 2, 1, 0], 2.0),
        ("min", 2, "<", 1.0, [2, 0.5, 0.1], 0.5),
        ("max", 5, "<=", 1.0, [1, 0.5], 1.0),
        ("max", 1, "==", 1.0, [1, 5], 1.0),
        ("last", 5, "!=", 0.0, [0.0], None),
        ("avg", 5, ">", 0.0, [], None),
        ("avg", 3, ">", 0.0, [1.5e308] * 3, pytest.approx(1.5e308)),
    ],
)
def test_a_metric_is_aggregated_over_its_window_and_compared(
    aggregate: Any, window: int, comparison: Any, threshold: float, values: list[float], fires: float | None
):
    rule = MetricRule(
        name="m", aggregate=aggregate, window=window, comparison=comparison, threshold=threshold
    )

    assert matching.metric(rule, values) == fires
