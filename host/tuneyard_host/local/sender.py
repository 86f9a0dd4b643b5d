"""The webhook sender: event and delivery queue worked off by threads of one process, and the sweep beside them."""

from __future__ import annotations

import logging
import os
import signal
import threading

from tuneyard.places import ours
from tuneyard.settings import settings
from tuneyard_host.local import doors
from tuneyard_host.local.consumers import BATCH, Consumer

MATCHERS, SENDERS, SWEEP_SECONDS, SECONDS_TO_FINISH = 4, 64, 2.0, 2.0
"""Of the senders one webhook never holds more than ``webhook_in_flight``, so that six dead endpoints delay nobody."""

logger = logging.getLogger("tuneyard.sender")


def matching() -> Consumer:
    """What matches events with automations."""
    match = doors.module("webhook_sender").match
    return Consumer(settings().event_queue_url, match, most=MATCHERS, hidden=15)


def sending() -> Consumer:
    """What sends deliveries."""
    send = doors.module("webhook_sender").send
    queue = settings().delivery_queue_url
    return Consumer(queue, send, most=SENDERS, hidden=60, batch=BATCH, waiting=lambda: ours.waiters)


def serve() -> None:
    """Match, send and sweep until SIGTERM; what is not finished soon afterwards goes on at the next start."""
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    module, consumers = doors.module("webhook_sender"), (matching(), sending())
    for consumer in consumers:
        consumer.start()
    while not stop.is_set():
        try:
            module.sweep({}, None)
        except Exception:
            logger.exception("sweep failed")
        stop.wait(SWEEP_SECONDS)
    for consumer in consumers:
        consumer.stop(patience=SECONDS_TO_FINISH)
    os._exit(0)  # an endpoint that never answers holds its thread, and with it the interpreter
