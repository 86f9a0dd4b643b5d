"""The adapters that a vLLM server has loaded: fetched when a chat first names one, unloaded when they are in the way.

vLLM reads an adapter from a folder, and may read it again as long as it is loaded: the files stay until it is
unloaded. An adapter with a request under way is never unloaded, whatever the bound.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from aws_lambda_powertools import Logger

from tuneyard.completions import AdapterRef
from tuneyard.errors import Invalid, ModelNotFound, NotFound, Unavailable

from .calls import Calls, Reply
from .wire import told

logger = Logger(service="tuneyard-inference")

OURS = "tuneyard-"
FILES = ("adapter_config.json", "adapter_model.safetensors")
IDLE_SECONDS = 3600.0


@dataclass(eq=False)
class Loaded:
    """An adapter that is loaded, or about to be."""

    load: asyncio.Future[None]
    users: int = 0
    used: float = 0.0


class Adapters:
    """At most ``most`` adapters beside those in use; the longest unused goes first, and all that idle for an hour."""

    def __init__(self, calls: Calls, folder: Path, read_blob: Callable[[str], bytes], most: int) -> None:
        self._calls, self._folder, self._read_blob, self._most = calls, folder, read_blob, most
        self._known: OrderedDict[str, Loaded] = OrderedDict()
        self._leaving: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def adopt(self, names: list[str]) -> None:
        """Take over what an earlier life of this service loaded, so that it is unloaded in its turn."""
        for name in names:
            if name.startswith(OURS) and name not in self._known:
                done = asyncio.get_running_loop().create_future()
                done.set_result(None)
                self._known[name] = Loaded(done, used=time.monotonic())

    def forget(self, ref: AdapterRef) -> None:
        """Load this adapter again when it is next named: vLLM says that it does not have it."""
        self._known.pop(_name(ref), None)

    @asynccontextmanager
    async def held(self, ref: AdapterRef) -> AsyncIterator[str]:
        """The name under which vLLM has the adapter loaded, until the block ends. Who asks at once shares one load."""
        name = _name(ref)
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = Loaded(asyncio.ensure_future(self._load(name, ref)))
        self._known.move_to_end(name)
        known.users += 1
        try:
            await asyncio.shield(known.load)
            yield name
        finally:
            known.users -= 1
            known.used = time.monotonic()
            self._tidy()

    def _tidy(self) -> None:
        """Drop loads that failed, and unload what is idle or over the bound."""
        excess, now = len(self._known) - self._most, time.monotonic()
        for name, known in list(self._known.items()):
            if known.users or not known.load.done():
                continue
            failed = known.load.cancelled() or known.load.exception() is not None
            if failed or excess > 0 or now - known.used > IDLE_SECONDS:
                excess -= 1
                del self._known[name]
                if not failed:
                    self._leaving[name] = asyncio.create_task(self._unload(name))

    async def _load(self, name: str, ref: AdapterRef) -> None:
        if name in self._leaving:
            await self._leaving[name]
        folder = self._folder / name
        await asyncio.to_thread(self._fetch, ref, folder)
        try:
            await self._ask_to_load(name, folder, ref)
        except Invalid:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            raise

    async def _ask_to_load(self, name: str, folder: Path, ref: AdapterRef) -> None:
        response = await self._post("load", {"lora_name": name, "lora_path": str(folder)})
        message, _ = told(response.content)
        match response.status:
            case 200:
                return
            case 400 if "already been loaded" in message:
                return
            case 404 if not message:
                raise Unavailable("vLLM runs without VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.", retry_after=60)
            case 404:
                logger.error("vLLM does not see the adapters' folder", folder=str(folder), reason=message)
                raise Unavailable(f"vLLM does not see {folder}.", retry_after=60)
        raise Invalid(f"vLLM cannot load checkpoint {ref.checkpoint_id!r}: {message}", param="model")

    def _fetch(self, ref: AdapterRef, folder: Path) -> None:
        """Put the adapter's files into the folder; a folder that is there is whole."""
        if folder.exists():
            return
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            for file in FILES:
                (part / file).write_bytes(self._read_blob(f"{ref.prefix}{file}"))
        except NotFound as error:
            shutil.rmtree(part)
            raise ModelNotFound(f"The files of checkpoint {ref.checkpoint_id!r} are gone.") from error
        part.rename(folder)

    async def _unload(self, name: str) -> None:
        try:
            response = await self._post("unload", {"lora_name": name})
            if response.status not in (200, 404):
                logger.warning("adapter not unloaded", adapter=name, reason=told(response.content)[0])
        except Unavailable:
            logger.warning("adapter not unloaded", adapter=name, reason="vLLM does not answer")
        finally:
            await asyncio.to_thread(shutil.rmtree, self._folder / name, ignore_errors=True)
            del self._leaving[name]

    async def _post(self, verb: str, body: dict[str, str]) -> Reply:
        return await self._calls.post(f"/v1/{verb}_lora_adapter", body)


def _name(ref: AdapterRef) -> str:
    return OURS + quote(ref.checkpoint_id, safe="")
