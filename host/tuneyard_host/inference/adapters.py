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
            if load is None or (load.done() and load.exception() is not None):
                load = self._loads[ref.prefix] = self._pool.submit(self._load, ref)
            self._loads.move_to_end(ref.prefix)
        adapter = await asyncio.shield(asyncio.wrap_future(load))
        self._forget_oldest()
        return adapter

    def _load(self, ref: AdapterRef) -> lora.Adapter:
        try:
            config = self._read_blob(f"{ref.prefix}adapter_config.json")
            weights = self._read_blob(f"{ref.prefix}adapter_model.safetensors")
            return lora.parse(ref.prefix, weights, json.loads(config), self._model)
        except NotFound as error:
            raise ModelNotFound(f"The files of checkpoint {ref.checkpoint_id!r} are gone.") from error
        except (ValueError, SafetensorError) as error:
            raise Invalid(f"The adapter files of checkpoint {ref.checkpoint_id!r} cannot be read: {error}") from error

    def _forget_oldest(self) -> None:
        """Keep to the memory limit; who runs with a forgotten adapter keeps it until done."""
        with self._lock:
            sizes = {
                prefix: load.result().bytes
                for prefix, load in self._loads.items()
                if load.done() and load.exception() is None
            }
            excess = sum(sizes.values()) - self._memory
            for prefix in list(sizes)[:-1]:
                if excess <= 0:
                    return
                excess -= sizes[prefix]
                del self._loads[prefix]
