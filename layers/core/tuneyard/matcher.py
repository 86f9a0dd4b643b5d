"""From an event to deliveries: page by page, each automation that listens gets one row, whatever is repeated."""

from __future__ import annotations

from boto3.dynamodb.conditions import Attr

from tuneyard import deliveries, grouped, matching, payloads, queues, runs, table
from tuneyard.deliveries import KEPT_MS
from tuneyard.records import ArtifactEvent, EventType
from tuneyard.settings import settings
from tuneyard.webhook_records import Automation, Delivery, DeliveryStatus, Fired, Pace

PAGE = 100
_DAY_MS = 24 * 3_600_000


def match(event_id: str, *, now: int, scope: str | None = None, after: table.Place | None = None) -> None:
    """Match an event with a page of automations. The next page is asked for first, so that nothing can be left out.

    Without a scope it is the event's first page: then the other scopes that it happened in are asked for too.
    """
    event = table.get(ArtifactEvent, event_id)
    if event is None:
        return
    if scope is None:
        scope = f"{event.entity}/{event.project}"
        if event.also_in is not None:
            queues.send_page(event.id, scope=event.also_in, after=None)
    found = table.listed(Automation, "by_trigger", f"{scope}#{event.type}", after=after, limit=PAGE + 1)
    if len(found) > PAGE:
        last = found[PAGE - 1]
        queues.send_page(event.id, scope=scope, after=(last.created_at, last.id))
    wanted = [
        (automation, delivery)
        for automation in found[:PAGE]
        if matching.listens(automation, event) and (delivery := _delivery(automation, event, now))
    ]
    made = _fire(wanted, event, now)
    queues.ring(*(queues.Ring.of(delivery) for delivery in made))


def _delivery(automation: Automation, event: ArtifactEvent, now: int) -> Delivery | None:
    """The delivery of an event to an automation that listens; None when its metric is not past the threshold."""
    values: dict[str, str] | None = {}
    if event.type is EventType.RUN_METRIC:
        values = _metric(automation, event)
    if values is None:
        return None
    return Delivery(
        id=deliveries.id_of(event.id, automation.id),
        team=automation.team,
        webhook_id=automation.webhook_id,
        automation_id=automation.id,
        event_id=event.id,
        event_type=event.type,
        status=DeliveryStatus.PENDING,
        template=automation.payload,
        values=values,
        created_at=now,
        due_at=now,
        expires=(now + KEPT_MS) // 1000,
    )


def _fire(wanted: list[tuple[Automation, Delivery]], event: ArtifactEvent, now: int) -> list[Delivery]:
    """Write deliveries, each together with its firing; those come back that were not there, and may be sent."""
    made = []
    while wanted:
        paces = table.get_many(*((Pace, (automation.id,)) for automation, _ in wanted))
        tried, writes = [], []
        for (automation, delivery), pace in zip(wanted, paces, strict=True):
            once = _once_a_day(automation, event, now)
            paced = _paced(automation, pace if isinstance(pace, Pace) else None, now)
            if paced is None:
                _skip(delivery, once, now)
            else:
                tried.append((automation, delivery))
                writes.append((paced, table.Put(delivery, new=True), *once))
        failures = grouped.transact_each(writes)
        made += [delivery for (_, delivery), failure in zip(tried, failures, strict=True) if failure is None]
        wanted = [
            one for one, failure in zip(tried, failures, strict=True) if failure and failure.failed == [0]
        ]
    return made


def _skip(delivery: Delivery, once: list[table.Write], now: int) -> None:
    reason = (
        f"The automation fired {settings().fires_per_minute} times in this minute already. If the webhook makes such "
        "events itself, it is a loop; otherwise send the delivery again."
    )
    skipped = delivery.model_copy(
        update={"status": DeliveryStatus.SKIPPED_RATE, "reason": reason, "finished_at": now}
    )
    try:
        table.transact(table.Put(skipped, new=True), *once)
    except table.ConditionFailed:
        return


def _paced(automation: Automation, pace: Pace | None, now: int) -> table.Put | table.Update | None:
    """The write that counts one more firing in this minute, or None when the automation had its share."""
    minute = now // 60_000
    if pace is None or pace.minute != minute:
        first = Pace(automation_id=automation.id, minute=minute, fired=1)
        return table.Put(first, new=True, when=Attr("minute").ne(minute))
    if pace.fired >= settings().fires_per_minute:
        return None
    room = Attr("minute").eq(minute) & Attr("fired").lt(settings().fires_per_minute)
    return table.Update(Pace, (automation.id,), add={"fired": 1}, when=room)


def _once_a_day(automation: Automation, event: ArtifactEvent, now: int) -> list[table.Write]:
    """The write that keeps a run-metric automation from firing twice a day for one run."""
    if event.type is not EventType.RUN_METRIC:
        return []
    fired = Fired(
        automation_id=automation.id,
        run_id=event.run_id or "",
        event_id=event.id,
        at=now,
        expires=(now + 2 * _DAY_MS) // 1000,
    )
    return [table.Put(fired, new=True, when=Attr("at").lte(now - _DAY_MS))]


def _metric(automation: Automation, event: ArtifactEvent) -> dict[str, str] | None:
    """What the metric came to, as payload variables, when it is past the threshold."""
    rule = automation.metric
    if rule is None:
        return None
    window = 1 if rule.aggregate == "last" else rule.window
    values = [float(event.data["metrics"][rule.name])]
    if window > 1:
        values += runs.values_before(
            event.run_id or "", rule.name, row=int(event.data["row"]), limit=window - 1
        )
    value = matching.metric(rule, values)
    if value is None:
        return None
    return {
        "metric_name": rule.name,
        "metric_value": payloads.text(value),
        "metric_threshold": f"{rule.comparison.value} {payloads.text(rule.threshold)}",
    }
