"""The table: the one module that can spell a key.

row             pk                          sk                          by_team / by_model / by_webhook / by_trigger /
                                                                        due
Team            TEAM#{team}                 TEAM
Member          TEAM#{team}                 MEMBER#{user}
Secret          TEAM#{team}                 SECRET#{name}
Registry        TEAM#{team}                 REGISTRY#{name}
ApiKey          KEY#{sha256}                KEY                         by_team TEAM#{team}#KEYS
Model           MODEL#{id}                  MODEL                       by_team TEAM#{team}#MODELS,
                                                                        due MODELS when deleted
Checkpoint      MODEL#{id}                  STEP#{step}
OpenJob         MODEL#{id}                  OPEN#{created_at}#{job}     jobs of a model that are not final, in order
Collection      PROJECT#{entity}/{project}  COLLECTION#{name}           makes {entity}/{project}/{name} unique
Alias           ALIASES#{collection id}     ALIAS#{alias}
Version         VERSIONS#{collection id}    VERSION#{version}
Label           LABELS#{collection id}      LABEL#{version}#{kind}#{name}
Job             JOB#{id}                    JOB                         by_team TEAM#{team}#JOBS,
                                                                        by_model MODEL#{id}#JOBS,
                                                                        due JOBS while not final
JobEvent        JOB#{id}                    EVENT#{seq}
Run             RUN#{id}                    RUN
RunRow          RUN#{id}                    ROW#{row}
ArtifactEvent   EVENT#{id}                  EVENT                       due EVENTS until published
Webhook         WEBHOOK#{id}                WEBHOOK                     by_team TEAM#{team}#WEBHOOKS
Slot            WEBHOOK#{id}                SLOT#{number}               expires
Waiting         WEBHOOK#{id}                WAITING#{since}#{delivery}  expires
Automation      AUTOMATION#{id}             AUTOMATION                  by_team TEAM#{team}#AUTOMATIONS,
                                                                        by_trigger SCOPE#{scope}#{event} while enabled
Pace            AUTOMATION#{id}             PACE
Fired           AUTOMATION#{id}             RUN#{run}                   expires
Delivery        DELIVERY#{id}               DELIVERY                    by_webhook WEBHOOK#{id}#DELIVERIES,
                                                                        by_trigger AUTOMATION#{id}#DELIVERIES,
                                                                        due DELIVERIES#{shard} while open,
                                                                        due HELD#{webhook} while held; expires
Attempt         DELIVERY#{id}               ATTEMPT#{number}            expires
Idempotency     IDEMPOTENCY#{team}          KEY#{sha256}                expires
Usage           USAGE#{team}                DAY#{day}#{project}#{model}
Worker          WORKERS                     WORKER#{kind}#{name}        expires

Scalars are attributes of their own, so that conditions can name them; everything else (floats, lists, maps) is JSON
text in the attribute ``json``. Of the kinds in ``_PACKED`` most scalars are in that text as well: a row of thirty
attributes costs several times as much to send, check, store and read as one of ten.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import boto3
from boto3.dynamodb.conditions import Attr, ConditionBase, ConditionExpressionBuilder, Key
from botocore.config import Config
from botocore.exceptions import ClientError
from pydantic_core import from_json, to_json

from tuneyard.errors import Conflict
from tuneyard.once import Once
from tuneyard.records import (
    Alias,
    ApiKey,
    ArtifactEvent,
    Checkpoint,
    Collection,
    Idempotency,
    Job,
    JobEvent,
    Label,
    Member,
    Model,
    OpenJob,
    Record,
    Registry,
    Run,
    RunRow,
    Team,
    Usage,
    Version,
    Worker,
)
from tuneyard.settings import USER_AGENT, settings
from tuneyard.webhook_records import (
    Attempt,
    Automation,
    Delivery,
    DeliveryStatus,
    Fired,
    Pace,
    Secret,
    Slot,
    Waiting,
    Webhook,
)

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

R = TypeVar("R", bound=Record)
Keys = tuple[str, str]


class Place(NamedTuple):
    """Where a record stands in an index, known without the record."""

    created_at: int
    id: str


_KEYS: dict[type[Record], Callable[..., Keys]] = {
    Team: lambda name: (f"TEAM#{name}", "TEAM"),
    Member: lambda team, user: (f"TEAM#{team}", f"MEMBER#{user}"),
    Secret: lambda team, name: (f"TEAM#{team}", f"SECRET#{name}"),
    Registry: lambda team, name: (f"TEAM#{team}", f"REGISTRY#{name}"),
    ApiKey: lambda hash: (f"KEY#{hash}", "KEY"),
    Model: lambda id: (f"MODEL#{id}", "MODEL"),
    Checkpoint: lambda model_id, step: (f"MODEL#{model_id}", f"STEP#{step:010d}"),
    OpenJob: lambda model_id, created_at, job_id: (f"MODEL#{model_id}", f"OPEN#{created_at:013d}#{job_id}"),
    Collection: lambda *path: _in_project("/".join(path)),
    Alias: lambda collection_id, alias: (f"ALIASES#{collection_id}", f"ALIAS#{alias}"),
    Version: lambda collection_id, version: (f"VERSIONS#{collection_id}", f"VERSION#{version:010d}"),
    Label: lambda collection_id, version, kind, name: (
        f"LABELS#{collection_id}",
        f"LABEL#{version:010d}#{kind}#{name}",
    ),
    Job: lambda id: (f"JOB#{id}", "JOB"),
    JobEvent: lambda job_id, seq: (f"JOB#{job_id}", f"EVENT#{seq:010d}"),
    Run: lambda id: (f"RUN#{id}", "RUN"),
    RunRow: lambda run_id, row: (f"RUN#{run_id}", f"ROW#{row:010d}"),
    ArtifactEvent: lambda id: (f"EVENT#{id}", "EVENT"),
    Webhook: lambda id: (f"WEBHOOK#{id}", "WEBHOOK"),
    Slot: lambda webhook_id, number: (f"WEBHOOK#{webhook_id}", f"SLOT#{number:03d}"),
    Waiting: lambda webhook_id, since, delivery_id: (
        f"WEBHOOK#{webhook_id}",
        f"WAITING#{since:013d}#{delivery_id}",
    ),
    Automation: lambda id: (f"AUTOMATION#{id}", "AUTOMATION"),
    Pace: lambda automation_id: (f"AUTOMATION#{automation_id}", "PACE"),
    Fired: lambda automation_id, run_id: (f"AUTOMATION#{automation_id}", f"RUN#{run_id}"),
    Delivery: lambda id: (f"DELIVERY#{id}", "DELIVERY"),
    Attempt: lambda delivery_id, number: (f"DELIVERY#{delivery_id}", f"ATTEMPT#{number:06d}"),
    Idempotency: lambda team, hash: (f"IDEMPOTENCY#{team}", f"KEY#{hash}"),
    Usage: lambda team, day, project, model: (f"USAGE#{team}", f"DAY#{day}#{project}#{model}"),
    Worker: lambda kind, name: ("WORKERS", f"WORKER#{kind}#{name}"),
}
_IDENTITY: dict[type[Record], tuple[str, ...]] = {
    Team: ("name",),
    Member: ("team", "user"),
    Secret: ("team", "name"),
    Registry: ("team", "name"),
    ApiKey: ("hash",),
    Model: ("id",),
    Checkpoint: ("model_id", "step"),
    OpenJob: ("model_id", "created_at", "job_id"),
    Collection: ("name",),
    Alias: ("collection_id", "alias"),
    Version: ("collection_id", "version"),
    Label: ("collection_id", "version", "kind", "name"),
    Job: ("id",),
    JobEvent: ("job_id", "seq"),
    Run: ("id",),
    RunRow: ("run_id", "row"),
    ArtifactEvent: ("id",),
    Webhook: ("id",),
    Slot: ("webhook_id", "number"),
    Waiting: ("webhook_id", "since", "delivery_id"),
    Automation: ("id",),
    Pace: ("automation_id",),
    Fired: ("automation_id", "run_id"),
    Delivery: ("id",),
    Attempt: ("delivery_id", "number"),
    Idempotency: ("team", "hash"),
    Usage: ("team", "day", "project", "model"),
    Worker: ("kind", "name"),
}
_INDEXED: dict[type[Record], Callable[[Any], dict[str, Keys]]] = {
    ApiKey: lambda r: {"by_team": (f"TEAM#{r.team}#KEYS", _when(r))},
    Model: lambda r: {
        "due" if r.deleted_at else "by_team": (
            "MODELS" if r.deleted_at else f"TEAM#{r.entity}#MODELS",
            _when(r),
        )
    },
    Job: lambda r: {
        "by_team": (f"TEAM#{r.team}#JOBS", _when(r)),
        "by_model": (f"MODEL#{r.model_id}#JOBS", _when(r)),
        **({} if r.status.final else {"due": ("JOBS", _when(r))}),
    },
    ArtifactEvent: lambda r: {} if r.published_at else {"due": ("EVENTS", _when(r))},
    Webhook: lambda r: {"by_team": (f"TEAM#{r.team}#WEBHOOKS", _when(r))},
    Automation: lambda r: {
        "by_team": (f"TEAM#{r.team}#AUTOMATIONS", _when(r)),
        **({"by_trigger": (f"SCOPE#{r.scope}#{r.event}", _when(r))} if r.enabled else {}),
    },
    Delivery: lambda r: {
        "by_webhook": (f"WEBHOOK#{r.webhook_id}#DELIVERIES", _when(r)),
        "by_trigger": (f"AUTOMATION#{r.automation_id}#DELIVERIES", _when(r)),
        **_due_delivery(r),
    },
}
_PARTITIONS: dict[tuple[type[Record], str], str] = {
    (ApiKey, "by_team"): "TEAM#{}#KEYS",
    (Model, "by_team"): "TEAM#{}#MODELS",
    (Model, "due"): "MODELS",
    (Job, "by_team"): "TEAM#{}#JOBS",
    (Job, "by_model"): "MODEL#{}#JOBS",
    (Job, "due"): "JOBS",
    (ArtifactEvent, "due"): "EVENTS",
    (Webhook, "by_team"): "TEAM#{}#WEBHOOKS",
    (Automation, "by_team"): "TEAM#{}#AUTOMATIONS",
    (Automation, "by_trigger"): "SCOPE#{}",
    (Delivery, "by_webhook"): "WEBHOOK#{}#DELIVERIES",
    (Delivery, "by_trigger"): "AUTOMATION#{}#DELIVERIES",
    (Delivery, "due"): "HELD#{}",
}
_CHILDREN: dict[type[Record], tuple[str, str]] = {
    Checkpoint: ("MODEL#", "STEP#"),
    OpenJob: ("MODEL#", "OPEN#"),
    Alias: ("ALIASES#", "ALIAS#"),
    JobEvent: ("JOB#", "EVENT#"),
    RunRow: ("RUN#", "ROW#"),
    Usage: ("USAGE#", "DAY#"),
    Worker: ("WORKERS", "WORKER#"),
    Member: ("TEAM#", "MEMBER#"),
    Secret: ("TEAM#", "SECRET#"),
    Registry: ("TEAM#", "REGISTRY#"),
    Collection: ("PROJECT#", "COLLECTION#"),
    Version: ("VERSIONS#", "VERSION#"),
    Label: ("LABELS#", "LABEL#"),
    Slot: ("WEBHOOK#", "SLOT#"),
    Waiting: ("WEBHOOK#", "WAITING#"),
    Attempt: ("DELIVERY#", "ATTEMPT#"),
}
_PACKED: dict[type[Record], tuple[str, ...]] = {
    Delivery: ("rev", "status", "expires"),
    Attempt: ("expires",),
}
"""Kinds that are only ever written whole, with what conditions name of them and what the table itself reads."""


@Once
def _client() -> DynamoDBClient:
    # the table checks every request itself: to check it here as well would be a third of the time of a write
    retries: Any = {"mode": "standard", "max_attempts": 5}
    config = Config(
        user_agent=USER_AGENT, retries=retries, max_pool_connections=64, parameter_validation=False
    )
    client = boto3.client("dynamodb", config=config)
    client.meta.events.register_last("before-parameter-build.dynamodb", _set_aside)
    client.meta.events.register_first("before-call.dynamodb", _put_in)
    client.meta.events.register("before-parse.dynamodb", _take_out)
    return client


def _set_aside(params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
    """Keep a request from boto3, which would go through every value of it by its model: it is as the wire wants it."""
    context["tuneyard"] = dict(params)
    params.update({name: type(value)() for name, value in params.items() if isinstance(value, dict | list)})


def _put_in(params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
    params["body"] = to_json(context.pop("tuneyard"))


def _take_out(response_dict: dict[str, Any], customized_response_dict: dict[str, Any], **_: Any) -> None:
    """Read an answer as it is; what went wrong is boto3's to read."""
    if response_dict["status_code"] == 200:
        customized_response_dict.update(from_json(response_dict["body"]))
        response_dict["body"] = b"{}"


class ConditionFailed(Conflict):
    """A conditional write found the table otherwise; ``failed`` holds the places of the writes that were refused."""

    def __init__(self, failed: list[int]) -> None:
        super().__init__("The record changed in the meantime. Read it again, then repeat the request.")
        self.failed = failed


@dataclass(frozen=True)
class Put:
    """Write a whole record; ``new`` refuses to overwrite one."""

    record: Record
    new: bool = False
    when: ConditionBase | None = None


@dataclass(frozen=True)
class Update:
    """Change a record that exists: None removes an attribute, ``add`` counts, ``drop`` leaves an index."""

    kind: type[Record]
    identity: tuple[Any, ...]
    set: dict[str, Any] = field(default_factory=dict)
    add: dict[str, int] = field(default_factory=dict)
    drop: str | None = None
    when: ConditionBase | None = None


@dataclass(frozen=True)
class Count:
    """Add to the counters of a record, which is made when it is not there yet."""

    kind: type[Record]
    identity: tuple[Any, ...]
    add: dict[str, int]


@dataclass(frozen=True)
class Delete:
    """Remove a record; without ``when`` it may be gone already."""

    kind: type[Record]
    identity: tuple[Any, ...]
    when: ConditionBase | None = None


@dataclass(frozen=True)
class Check:
    """Refuse the transaction unless a record is as ``when`` says."""

    kind: type[Record]
    identity: tuple[Any, ...]
    when: ConditionBase


Write = Put | Update | Count | Delete | Check


def get(kind: type[R], *identity: Any) -> R | None:
    """The record as it stands now (a consistent read), or None."""
    item = (
        _client()
        .get_item(TableName=settings().table_name, Key=_key(kind, identity), ConsistentRead=True)
        .get("Item")
    )
    return _record(kind, item) if item else None


def get_many(*wanted: tuple[type[Record], tuple[Any, ...]]) -> list[Record | None]:
    """At most 100 records of any kinds by one consistent read, in the order asked for; None for those not there."""
    keys = [_key(kind, identity) for kind, identity in wanted]
    left: Any = {settings().table_name: {"Keys": keys, "ConsistentRead": True}} if keys else {}
    items: dict[tuple[str, str], Any] = {}
    while left:
        answer = _client().batch_get_item(RequestItems=left)
        for item in answer["Responses"].get(settings().table_name, []):
            items[item["pk"]["S"], item["sk"]["S"]] = item
        left = answer.get("UnprocessedKeys")
    found = [items.get((key["pk"]["S"], key["sk"]["S"])) for key in keys]
    return [_record(kind, item) if item else None for (kind, _), item in zip(wanted, found, strict=True)]


def write(change: Put | Update | Count | Delete) -> None:
    """Make one change; ConditionFailed when its condition does not hold."""
    transact(change)


def transact(*changes: Write) -> None:
    """Make all changes or none (at most 100); ConditionFailed names the ones whose condition does not hold.

    Two writers that only got in each other's way are no failure: the write is tried again.
    """
    items = [_change(change) for change in changes]
    for patience in (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, None):
        try:
            _send(items)
            return
        except ClientError as error:
            failed = _failed_conditions(error)
            if failed:
                raise ConditionFailed(failed) from error
            if failed is None or patience is None:
                raise
            time.sleep(patience * random.uniform(0.5, 1.5))


def _send(items: list[dict[str, Any]]) -> None:
    if len(items) == 1 and "ConditionCheck" not in items[0]:
        ((verb, parameters),) = items[0].items()
        getattr(_client(), {"Put": "put_item", "Update": "update_item", "Delete": "delete_item"}[verb])(
            **parameters
        )
    else:
        _client().transact_write_items(TransactItems=items)  # type: ignore[arg-type]


def _failed_conditions(error: ClientError) -> list[int] | None:
    """The places of the conditions that did not hold, [] when another transaction was in the way, None otherwise."""
    code = error.response["Error"]["Code"]
    if code == "ConditionalCheckFailedException":
        return [0]
    if code in ("TransactionConflictException", "TransactionInProgressException"):
        return []
    if code != "TransactionCanceledException":
        return None
    reasons = [reason.get("Code") for reason in error.response.get("CancellationReasons", [])]
    failed = [place for place, reason in enumerate(reasons) if reason == "ConditionalCheckFailed"]
    return failed or ([] if "TransactionConflict" in reasons else None)


def count(kind: type[R], *identity: Any, attribute: str) -> int:
    """Add one to a counter of a record that exists, and return its new value."""
    answer = _client().update_item(
        TableName=settings().table_name,
        Key=_key(kind, identity),
        ReturnValues="UPDATED_NEW",
        UpdateExpression="ADD #a :one",
        ConditionExpression="attribute_exists(pk)",
        ExpressionAttributeNames={"#a": attribute},
        ExpressionAttributeValues={":one": {"N": "1"}},
    )
    return int(answer["Attributes"][attribute]["N"])


def children(
    kind: type[R], parent: str, *, after: tuple[Any, ...] | None = None, limit: int, descending: bool = False
) -> list[R]:
    """At most ``limit`` records of one item collection in order (a consistent read), after the place named."""
    partition, prefix = _CHILDREN[kind]
    condition = Key("pk").eq(partition + parent) & Key("sk").begins_with(prefix)
    start = None if after is None else _key(kind, (parent, *after))
    return [_record(kind, item) for item in _query(condition, None, limit, descending, start=start)]


def listed(
    kind: type[R],
    index: str,
    owner: str,
    *,
    after: R | Place | None = None,
    limit: int,
    descending: bool = False,
    only: ConditionBase | None = None,
) -> list[R]:
    """At most ``limit`` records of an index partition, in order of creation; see the table of indexes above."""
    condition: ConditionBase = Key(f"{index}_pk").eq(_PARTITIONS[kind, index].format(owner))
    if after is not None:
        edge = Key(f"{index}_sk")
        condition &= edge.lt(_when(after)) if descending else edge.gt(_when(after))
    return [_record(kind, item) for item in _query(condition, index, limit, descending, only=only)]


def due_deliveries(shard: int, *, until: int, limit: int) -> list[Delivery]:
    """The deliveries of a shard whose time or whose sender's lease is over, the longest overdue first."""
    condition = Key("due_pk").eq(f"DELIVERIES#{shard}") & Key("due_sk").lt(f"{until:013d}#")
    return [_record(Delivery, item) for item in _query(condition, "due", limit, descending=False)]


def place_of(change: Write) -> Keys:
    """The key of what a write is about."""
    if isinstance(change, Put):
        kind = type(change.record)
        return _KEYS[kind](*(getattr(change.record, name) for name in _IDENTITY[kind]))
    return _KEYS[change.kind](*change.identity)


def reachable() -> None:
    """Ask the table for a row that is not there: raises when the table cannot be reached."""
    _client().get_item(TableName=settings().table_name, Key={"pk": {"S": "PING"}, "sk": {"S": "PING"}})


def exists() -> ConditionBase:
    """The condition that the record is there."""
    return Attr("pk").exists()


def _query(
    condition: ConditionBase,
    index: str | None,
    limit: int,
    descending: bool,
    *,
    only: ConditionBase | None = None,
    start: dict[str, Any] | None = None,
) -> Iterator[dict[str, Any]]:
    names, values = _Names(), _Values()
    request: dict[str, Any] = {
        "TableName": settings().table_name,
        "ScanIndexForward": not descending,
        "KeyConditionExpression": _expression(condition, names, values, is_key=True),
    }
    if only is not None:
        request["FilterExpression"] = _expression(only, names, values)
    if index is None:
        request["ConsistentRead"] = True
    else:
        request["IndexName"] = index
    request |= {"ExpressionAttributeNames": names, "ExpressionAttributeValues": values}
    if start is not None:
        request["ExclusiveStartKey"] = start
    while limit > 0:
        answer = _client().query(**request, Limit=limit if only is None else 100)
        for item in answer["Items"][:limit]:
            yield item
            limit -= 1
        if "LastEvaluatedKey" not in answer:
            return
        request["ExclusiveStartKey"] = answer["LastEvaluatedKey"]


def _change(change: Write) -> dict[str, Any]:
    names, values = _Names(), _Values()
    condition: ConditionBase | None
    request: dict[str, Any] = {"TableName": settings().table_name}
    match change:
        case Put(record, new, when):
            request["Item"] = _item(record)
            condition = Attr("pk").not_exists() if new else None
            condition = when if condition is None else condition | when if when is not None else condition
        case Update(kind, identity, changed, add, drop, when):
            request["Key"] = _key(kind, identity)
            request["UpdateExpression"] = _update(changed, add, drop, names, values)
            condition = exists() if when is None else exists() & when
        case Count(kind, identity, add):
            request["Key"] = _key(kind, identity)
            named = dict(zip(_IDENTITY[kind], identity, strict=True))
            request["UpdateExpression"] = _update(named, add, None, names, values)
            condition = None
        case Delete(kind, identity, when) | Check(kind, identity, when):
            request["Key"] = _key(kind, identity)
            condition = when
    if condition is not None:
        request["ConditionExpression"] = _expression(condition, names, values)
    if names:
        request["ExpressionAttributeNames"] = dict(names)
    if values:
        request["ExpressionAttributeValues"] = dict(values)
    verb = {Check: "ConditionCheck", Count: "Update"}.get(type(change), type(change).__name__)
    return {verb: request}


def _update(
    changed: dict[str, Any],
    add: dict[str, int],
    drop: str | None,
    names: dict[str, str],
    values: dict[str, Any],
) -> str:
    sets, removes = [], [f"{drop}_pk", f"{drop}_sk"] if drop else []
    for name, value in changed.items():
        if value is None:
            removes.append(name)
            continue
        names[f"#{name}"] = name
        values[f":{name}"] = _scalar(value)
        sets.append(f"#{name} = :{name}")
    adds = []
    for name, value in add.items():
        names[f"#{name}"] = name
        values[f":{name}"] = _scalar(value)
        adds.append(f"#{name} :{name}")
    for name in removes:
        names[f"#{name}"] = name
    parts = []
    if sets:
        parts.append("SET " + ", ".join(sets))
    if removes:
        parts.append("REMOVE " + ", ".join(f"#{name}" for name in removes))
    if adds:
        parts.append("ADD " + ", ".join(adds))
    return " ".join(parts)


class _Names(dict[str, str]):
    """Placeholders of attribute names in one request."""


class _Values(dict[str, Any]):
    """Placeholders of values in one request."""


def _expression(
    condition: ConditionBase, names: dict[str, str], values: dict[str, Any], *, is_key: bool = False
) -> str:
    built = ConditionExpressionBuilder().build_expression(condition, is_key_condition=is_key)
    text = built.condition_expression
    prefix = "k" if is_key else "c"
    for placeholder, name in built.attribute_name_placeholders.items():
        names[f"#{prefix}{placeholder[1:]}"] = name
        text = text.replace(placeholder, f"#{prefix}{placeholder[1:]}")
    for placeholder, value in built.attribute_value_placeholders.items():
        values[f":{prefix}{placeholder[1:]}"] = _scalar(value)
        text = text.replace(placeholder, f":{prefix}{placeholder[1:]}")
    return text


def _key(kind: type[Record], identity: tuple[Any, ...]) -> dict[str, Any]:
    pk, sk = _KEYS[kind](*identity)
    return {"pk": {"S": pk}, "sk": {"S": sk}}


def _in_project(path: str) -> Keys:
    project, _, name = path.rpartition("/")
    return f"PROJECT#{project}", f"COLLECTION#{name}"


def _due_delivery(r: Delivery) -> dict[str, Keys]:
    match r.status:
        case DeliveryStatus.PENDING:
            return {"due": (f"DELIVERIES#{r.shard}", f"{r.due_at:013d}#{r.id}")}
        case DeliveryStatus.ATTEMPTING:
            return {"due": (f"DELIVERIES#{r.shard}", f"{r.lease_until or 0:013d}#{r.id}")}
        case DeliveryStatus.HELD:
            return {"due": (f"HELD#{r.webhook_id}", _when(r))}
    return {}


def _when(record: Any) -> str:
    """The sort key of an index: creation time, then id."""
    return f"{record.created_at:013d}#{record.id}"


def _item(record: Record) -> dict[str, Any]:
    kind = type(record)
    item = _key(kind, tuple(getattr(record, name) for name in _IDENTITY[kind]))
    if apart := _PACKED.get(kind):
        item |= {name: _scalar(getattr(record, name)) for name in apart}
        item["json"] = {"S": record.model_dump_json(exclude=set(apart), exclude_none=True)}
    else:
        item |= _apart(record)
    for index, (pk, sk) in _INDEXED.get(kind, lambda _: {})(record).items():
        item |= {f"{index}_pk": {"S": pk}, f"{index}_sk": {"S": sk}}
    return item


def _apart(record: Record) -> dict[str, Any]:
    """The attributes of a record whose scalars stand on their own."""
    item, rest = {}, {}
    for name, value in record.model_dump(mode="json").items():
        if isinstance(value, str | bool | int):
            item[name] = _scalar(value)
        elif value is not None:
            rest[name] = value
    if rest:
        item["json"] = {"S": json.dumps(rest, separators=(",", ":"), allow_nan=False)}
    return item


def _scalar(value: Any) -> dict[str, Any]:
    """A text, number or truth value as the table writes it."""
    match value:
        case str():
            return {"S": str(value)}
        case bool():
            return {"BOOL": value}
        case int():
            return {"N": str(value)}
    raise TypeError(f"{type(value).__name__} is no attribute")


def _record(kind: type[R], item: dict[str, Any]) -> R:
    values = {name: _value(item[name]) for name in item.keys() & kind.model_fields.keys()}
    rest = from_json(item["json"]["S"]) if "json" in item else {}
    return kind.model_validate(values | rest)


def _value(written: dict[str, Any]) -> str | int | bool:
    ((kind, value),) = written.items()
    return int(value) if kind == "N" else value
