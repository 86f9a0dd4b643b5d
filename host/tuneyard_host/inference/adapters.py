"""Adapters in memory: fetched from the bucket the first time a chat names one, the longest unused forgotten first."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from safetensors import SafetensorError

from tuneyard.completions import AdapterRef
from tuneyard.errors import Invalid, ModelNotFound, NotFound

from . import lora

MEMORY = 1 << 30


class Adapters:
    """The adapters of one base model. A checkpoint never changes, so what is in memory is never stale."""

    def __init__(self, model: Any, read_blob: Callable[[str], bytes], memory: int = MEMORY) -> None:
        self._model, self._read_blob, self._memory = model, read_blob, memory
        self._loads: OrderedDict[str, Future[lora.Adapter]] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="adapter")

    async def get(self, ref: AdapterRef) -> lora.Adapter:
        """The adapter of a checkpoint; many who ask at once share one load, which no decode step waits for."""
        with self._lock:
            load = self._loads.get(ref.prefix)
            new = load is None
            if load is None:
                load = self._loads[ref.prefix] = self._pool.submit(self._load, ref)
            self._loads.move_to_end(ref.prefix)
        if new:
            load.add_done_callback(lambda load: self._tidy(ref.prefix, load))
        return await asyncio.shield(asyncio.wrap_future(load))

    def _load(self, ref: AdapterRef) -> lora.Adapter:
        try:
            config = self._read_blob(f"{ref.prefix}adapter_config.json")
            weights = self._read_blob(f"{ref.prefix}adapter_model.safetensors")
            return lora.parse(ref.prefix, weights, json.loads(config), self._model)
        except NotFound as error:
            raise ModelNotFound(f"The files of checkpoint {ref.checkpoint_id!r} are gone.") from error
        except (ValueError, SafetensorError) as error:
            raise Invalid(
                f"The adapter files of checkpoint {ref.checkpoint_id!r} cannot be read: {error}"
            ) from error

    def _tidy(self, prefix: str, load: Future[lora.Adapter]) -> None:
        """Forget a load that failed, so that it is tried again, and the oldest adapters over the memory limit.

        Who runs with an adapter that is forgotten keeps it until done.
        """
        with self._lock:
            if load.cancelled() or load.exception() is not None:
                self._loads.pop(prefix, None)
                return
            whole = [n for n, known in self._loads.items() if known.done() and known.exception() is None]
            done = {name: self._loads[name].result().bytes for name in whole}
            excess = sum(done.values()) - self._memory
            for name in [name for name in whole if name != prefix]:
                if excess <= 0:
                    return
                excess -= done[name]
                del self._loads[name]
