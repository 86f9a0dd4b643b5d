"""The webhook sender: event and delivery queue worked off by threads of one process, and the sweep beside them."""

from __future__ import annotations

import logging
import os
import signal
import threading

from tuneyard.settings import settings
from tuneyard_host.local import doors
from tuneyard_host.local.consumers import BATCH, Consumer

MATCHERS, SENDERS, SWEEP_SECONDS, SECONDS_TO_FINISH = 4, 64, 2.0, 2.0
"""Of the senders one webhook never holds more than ``webhook_in_flight``, so that six dead endpoints delay nobody."""

logger = logging.getLogger("tuneyard.sender")


def serve() -> None:
    """Match, send and sweep until SIGTERM; what is not finished soon afterwards goes on at the next start."""
    logging.basicConfig(format="%(asctime)s %(name)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    module = doors.module("webhook_sender")
    consumers = [
        Consumer(settings().event_queue_url, module.match, most=MATCHERS, hidden=15),
        Consumer(settings().delivery_queue_url, module.send, most=SENDERS, hidden=60, batch=BATCH),
    ]
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
