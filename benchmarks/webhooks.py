"""How fast webhooks are: from event to POST, beside a dead endpoint, against a bare loop that signs and posts.

The first rows are of a running local stack and its public API. The others are of the real match and send handlers in
threads of one process, with the emulated AWS and the receiver as processes of their own. The emulator answers a call
for the table in some milliseconds of the same processor and sorts a whole partition for each page, so a page's time
grows there with the partition; what DynamoDB bills and takes its time for are the rows that a query evaluates.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import statistics
import time
from typing import Any, NamedTuple

import httpx

from emulated import Evaluated, Hooks, answering, surroundings
from measuring import Result, stack

ROWS, ROUNDS = 100_000, 10


class Bench:
    """A team with a data set, and threads that match and send."""

    def __init__(self, hooks: str) -> None:
        from tuneyard import artifacts, credentials, teams
        from tuneyard.records import Identity, Role
        from tuneyard.settings import settings
        from tuneyard_host.local import sender

        self.hooks, self.settings = Hooks(hooks), settings()
        self.caller = Identity("acme", "ada", Role.ADMIN, "k")
        teams.create_team("acme")
        teams.create_key(team="acme", user="ada", role=Role.ADMIN)
        credentials.put(self.caller, "SIGN", secrets.token_hex(32))
        self.of, self.version, _ = artifacts.add_version(
            self.caller, "acme/p", "data", files={}, metadata={"a": 1}
        )
        self.match, self.send = sender.matching(), sender.sending()

    def automation(self, path: str) -> str:
        """A webhook and an automation of every alias."""
        from tuneyard import automations, webhooks
        from tuneyard.records import EventType

        hook = webhooks.create(
            self.caller,
            name="n",
            url=self.hooks.address + path,
            access_token=None,
            secret="SIGN",
            own_host="",
        )
        fields = {
            "name": "a",
            "event": EventType.ADD_ARTIFACT_ALIAS,
            "alias_regex": ".",
            "webhook_id": hook.id,
        }
        return automations.create(self.caller, scope="acme/p", fields=fields).id

    def delete(self, automation_id: str) -> None:
        """Delete an automation."""
        from tuneyard import automations

        automations.delete(self.caller, automations.get(self.caller, automation_id))

    def fire(self) -> float:
        """Add an alias; when it was done."""
        from tuneyard import labels

        labels.add_alias(self.caller, self.of, self.version, secrets.token_hex(8))
        return time.time()


class Rate(NamedTuple):
    """How fast something was done over and over."""

    a_second: float
    a_cpu_second: float
    """By the processor time of the process that did it, whatever the others took."""

    @classmethod
    def mean(cls, rates: list[Rate]) -> Rate:
        """The rate of doing as much at each of these rates."""
        return cls(*map(statistics.harmonic_mean, zip(*rates, strict=True)))


def bare_loop(url: str, many: int, *, pooled: bool) -> Rate:
    """Requests of a loop that signs and posts, with nothing around it."""
    body, key = b'{"type":"ADD_ARTIFACT_ALIAS"}' * 20, b"k" * 64
    with httpx.Client() as client:
        began, worked = time.perf_counter(), time.process_time()
        for _ in range(many):
            signature = hmac.new(key, body, hashlib.sha256).hexdigest()
            headers = {"X-Service-Signature": signature, "Content-Type": "application/json"}
            if not pooled:
                headers["Connection"] = "close"
            client.post(url, content=body, headers=headers)
        return Rate(many / (time.perf_counter() - began), many / (time.process_time() - worked))


class Customer:
    """A team of the local stack, by its public API, with a data set to name."""

    def __init__(self, http: httpx.Client, team: str, hooks: Hooks) -> None:
        self.http, self.team, self.hooks = http, team, hooks
        self.data = f"/v1/projects/{team}/bench/collections/data/versions"
        self._ok(http.put(f"/v1/teams/{team}/secrets/SIGN", json={"value": secrets.token_hex(32)}))
        self._ok(http.post(self.data, json={}))

    def webhook(self, path: str) -> str:
        """A signed webhook, called for each alias by turns of six automations, of which none may fire too often."""
        body = {"name": "n", "url": self.hooks.address + path, "secret": "SIGN"}
        hook = str(self._ok(self.http.post(f"/v1/teams/{self.team}/webhooks", json=body))["id"])
        scope = {"type": "project", "entity": self.team, "project": "bench"}
        for turn in range(6):
            more = {"event": "ADD_ARTIFACT_ALIAS", "alias_regex": f"^{turn}-", "webhook_id": hook}
            body = {"name": "a", "team": self.team, "scope": scope} | more
            self._ok(self.http.post("/v1/automations", json=body))
        return hook

    def enable(self, hook: str, enabled: bool) -> None:
        """Switch the automations of a webhook on or off."""
        rows = self._ok(self.http.get("/v1/automations", params={"webhook_id": hook, "limit": 100}))["data"]
        for row in rows:
            self._ok(self.http.patch(f"/v1/automations/{row['id']}", json={"enabled": enabled}))

    def latencies(self, path: str, many: int) -> list[float]:
        """Seconds from the API's answer to the request at the endpoint, one event after the other."""
        known = len(self.hooks.times(path))
        found = []
        for number in range(1, many + 1):
            self._ok(self.http.put(f"{self.data}/0/aliases/{number % 6}-{secrets.token_hex(4)}"))
            began = time.time()
            found.append(self.hooks.arrived(path, many=known + number)[-1] - began)
        return found

    @staticmethod
    def _ok(answer: httpx.Response) -> dict[str, Any]:
        answer.raise_for_status()
        return dict(answer.json())


def percentile(values: list[float], share: float) -> float:
    """The milliseconds below which this share of the values, given in seconds, lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] * 1e3


def from_event_to_post() -> list[Result]:
    """The time from the API's answer to the POST: beside a second endpoint that is well or dead, in turns."""
    with answering() as hooks, stack() as (http, told, _):
        customer = Customer(http, told["team"], Hooks(hooks))
        customer.webhook("/measured")
        others = {"/other": customer.webhook("/other"), "/dead": customer.webhook("/dead")}
        customer.latencies("/measured", 6)
        taken: dict[str, list[float]] = {path: [] for path in others}
        for turn in range(ROUNDS * 2):
            now, then = ("/other", "/dead") if turn % 2 else ("/dead", "/other")
            customer.enable(others[then], False)
            customer.enable(others[now], True)
            taken[now] += customer.latencies("/measured", 10)
    well, dead = taken["/other"], taken["/dead"]
    return [
        Result("event to POST, p50", f"{percentile(well, 0.5):.0f} ms"),
        Result("event to POST, p99", f"{percentile(well, 0.99):.0f} ms"),
        Result.of(
            "p50 beside a dead endpoint, peer: beside one that is well",
            percentile(dead, 0.5), percentile(well, 0.5), "ms", "<= 1.1",
        ),
        Result.of(
            "p99 beside a dead endpoint, peer: beside one that is well",
            percentile(dead, 0.99), percentile(well, 0.99), "ms", "<= 1.1",
        ),
    ]  # fmt: skip


def deliveries_a_second(bench: Bench, many: int) -> list[Result]:
    """Deliveries of rows that are there already, to 20 webhooks, against the bare loops before and after them."""
    from tuneyard import queues
    from tuneyard_host.local import sender

    made = [bench.automation("/rate") for _ in range(20)]
    bench.send.stop()
    for _ in range(many // 20):
        bench.fire()
    while queues.waiting(bench.settings.delivery_queue_url) < many // 10:
        time.sleep(0.2)
    url, loops = f"{bench.hooks.address}/ok", [(False, True), (True, False)]
    bare = [(pooled, bare_loop(url, many // 2, pooled=pooled)) for pooled in loops[0]]
    bench.send = sender.sending()
    began, worked = time.time(), time.process_time()
    bench.send.start()
    took = bench.hooks.arrived("/rate", many=many, every=0.5)[-1] - began
    rate = Rate(many / took, many / (time.process_time() - worked))
    bare += [(pooled, bare_loop(url, many // 2, pooled=pooled)) for pooled in loops[1]]
    fresh, pooled = (Rate.mean([one for how, one in bare if how is pooled]) for pooled in (False, True))
    for id in made:
        bench.delete(id)
    told = "claimed, signed, sent and recorded, peer: bare httpx loop,"
    return [
        Result.of(
            f"deliveries {told} a connection for each", rate.a_second, fresh.a_second, "a second", ">= 0.7"
        ),
        Result.of(f"deliveries {told} one connection", rate.a_second, pooled.a_second, "a second"),
        Result.of(
            f"deliveries {told} a connection for each, by the processor time of either",
            rate.a_cpu_second,
            fresh.a_cpu_second,
            "a CPU second",
        ),
    ]


def fan_out(bench: Bench, many: int) -> list[Result]:
    """One event that a thousand automations listen to, with 20 webhooks between them."""
    from tuneyard import ids, table
    from tuneyard.webhook_records import Automation, Delivery

    seeds = [table.get(Automation, bench.automation("/fan")) for _ in range(20)]
    made = [seed.id for seed in seeds if seed is not None]
    while len(made) < many:
        seed = seeds[len(made) % 20]
        assert seed is not None
        made.append(ids.new())
        table.write(table.Put(seed.model_copy(update={"id": made[-1]})))
    began = bench.fire()
    took = bench.hooks.arrived("/fan", many=many, every=0.5)[-1] - began
    time.sleep(2)
    rows = sum(len(table.listed(Delivery, "by_trigger", id, limit=10)) for id in made)
    sent = len(bench.hooks.times("/fan"))
    for id in made:
        table.write(table.Delete(Automation, (id,)))
    return [
        Result.of(f"fan-out of {many}: rows, peer: automations", rows, many, "rows", "1.00"),
        Result.of(f"fan-out of {many}: ids at the endpoint", sent, many, "ids", "1.00"),
        Result(f"fan-out of {many}: the last POST after", f"{took:.1f} s"),
    ]


def history(bench: Bench) -> list[Result]:
    """The first page of a webhook's history and one from its middle, at 100 deliveries and at 100,000."""
    from tuneyard import deliveries, table
    from tuneyard.webhook_records import Delivery, DeliveryStatus

    evaluated = Evaluated()
    client = table._client()
    client.meta.events.register("after-call.dynamodb.Query", evaluated)

    def filled(owner: str, many: int) -> None:
        for start in range(0, many, 25):
            puts: Any = []
            for number in range(start, min(many, start + 25)):
                row = Delivery(
                    id=f"msg_{owner}{number:08d}", team="acme", webhook_id=owner, automation_id="a", event_id="e",
                    event_type="ADD_ARTIFACT_ALIAS", status=DeliveryStatus.SUCCEEDED, created_at=1000 + number,
                    due_at=0, expires=0,
                )  # fmt: skip
                puts.append({"PutRequest": {"Item": table._item(row)}})
            client.batch_write_item(RequestItems={bench.settings.table_name: puts})

    def page(owner: str, after: str | None) -> tuple[float, int]:
        evaluated.rows, began = 0, time.perf_counter()
        found = deliveries.page("by_webhook", owner, after=after, limit=21, descending=True)
        assert len(found) == 21
        return time.perf_counter() - began, evaluated.rows

    sizes = {"short": 100, "long": ROWS}
    for owner, many in sizes.items():
        filled(owner, many)
    results = []
    for name, share in (("first", None), ("middle", 0.5)):
        rows, times = {}, {}
        for owner, many in sizes.items():
            after = None if share is None else f"msg_{owner}{int(many * share):08d}"
            taken = [page(owner, after) for _ in range(3)]
            times[owner], rows[owner] = statistics.median(one for one, _ in taken) * 1e3, taken[0][1]
        at = f"{name} page of history at {ROWS:,} deliveries, peer: at 100"
        results += [
            Result.of(f"{at}: rows evaluated", rows["long"], rows["short"], "rows", "<= 1.2"),
            Result.of(f"{at}: on the emulator", times["long"], times["short"], "ms"),
        ]
    return results


def measure() -> list[Result]:
    """Run everything."""
    results = from_event_to_post()
    with surroundings() as hooks:
        bench = Bench(hooks)
        bench.match.start()
        bench.send.start()
        results += deliveries_a_second(bench, 2000)
        results += fan_out(bench, 1000)
        bench.match.stop()
        bench.send.stop()
        return results + history(bench)
