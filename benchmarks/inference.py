"""Chat under load: the service over HTTP against static-batch generate, PEFT's adapter_names and `transformers serve`.

Service and peers take turns in the same run, each in a process of its own with the same number of torch threads, on
prompts of one length, sampling at temperature 1 without a stop; the tiny model writes 48 tokens whatever the crowd.
Tokens per second of CPU are those of the process that generates, its HTTP included: the fairer figure on a machine
that does other work too. A static batch shows its first token when it is done, so that is what the time to the first
token is compared with. `transformers serve` runs with continuous batching, and without adapters. Each figure is the
median of the rounds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from measuring import Result, interleaved_ms, stack

TINY = Path(__file__).parent.parent / "host" / "tuneyard_host" / "tiny" / "model"
THREADS = max(1, (os.cpu_count() or 1) // 2)
ADAPTERS, SPARE = 8, 12
CROWDS = (1, 16, 64, 256)
SLOW = 64
"""The largest crowd of the slow peers, adapter_names and `transformers serve`."""
GOALS = {
    (1, "generate", 0): ">= 2",
    (64, "generate", ADAPTERS): ">= 1.5",
    (256, "generate", ADAPTERS): ">= 1",
}
SERVICE = """
import sys, torch, uvicorn
from pathlib import Path
from tuneyard.settings import BaseModelSpec
from tuneyard_host.inference.service import create_app
model, adapters, listener = sys.argv[1:]
app = create_app([BaseModelSpec(id="b", source=model)], lambda key: Path(adapters, key).read_bytes())
uvicorn.run(app, fd=int(listener), log_level="warning", timeout_keep_alive=120)
"""
PEER = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
model, adapters, threads, most = sys.argv[1:]
torch.set_num_threads(int(threads))
plain, mixed = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval() for _ in range(2))
mixed = PeftModel.from_pretrained(mixed, f"{adapters}/a0", adapter_name="a0")
for n in range(1, int(most)):
    mixed.load_adapter(f"{adapters}/a{n}", adapter_name=f"a{n}")
mixed.eval()
for line in sys.stdin:
    which, batch, tokens = line.split()
    batch, tokens = int(batch), int(tokens)
    ids = torch.randint(5, 2000, (batch, 14))
    named = {"adapter_names": [f"a{n % int(most)}" for n in range(batch)]} if which == "adapter_names" else {}
    with torch.inference_mode():
        (mixed if named else plain).generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=0, **named)
    print("done", flush=True)
"""


@dataclass(frozen=True)
class Speed:
    """What a run came to."""

    per_cpu_second: float
    per_second: float
    seconds: float

    @classmethod
    def median(cls, runs: list[Speed]) -> Speed:
        """The median of each figure by itself."""
        return cls(
            *(statistics.median(getattr(run, part.name) for run in runs) for part in dataclasses.fields(cls))
        )


def measure() -> list[Result]:
    """On the tiny model, about five minutes on two idle cores."""
    return _door() + measured(TINY, tokens=48, rounds=5)


def measured(
    model: Path, *, tokens: int, rounds: int, budget: int = 12_288, serve: bool = True
) -> list[Result]:
    """Every case on one model, the median of the rounds; a crowd's answers together have at most ``budget`` tokens."""
    with tempfile.TemporaryDirectory() as folder:
        save_adapters(model, Path(folder), ADAPTERS + SPARE)
        with (
            _service(model, folder) as ours,
            _peer(model, folder) as peer,
            _serve(model, start=serve) as served,
        ):
            return asyncio.run(_cases(_Bench(ours, peer, served, model, tokens, rounds, budget)))


def save_adapters(model: Path, folder: Path, count: int) -> None:
    """PEFT folders ``a0``, ``a1``, ... with random weights on all linear layers."""
    import torch
    from safetensors.torch import save

    config = json.loads((model / "config.json").read_text())
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    told = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "bias": "none",
        "base_model_name_or_path": str(model), "target_modules": [name.split(".")[1] for name in shapes],
    }  # fmt: skip
    for number in range(count):
        tensors = {}
        for layer in range(config["num_hidden_layers"]):
            for name, (out, in_) in shapes.items():
                path = f"base_model.model.model.layers.{layer}.{name}"
                tensors[f"{path}.lora_A.weight"] = torch.randn(8, in_) * 0.05
                tensors[f"{path}.lora_B.weight"] = torch.randn(out, 8) * 0.05
        place = folder / f"a{number}"
        place.mkdir()
        (place / "adapter_model.safetensors").write_bytes(save(tensors))
        (place / "adapter_config.json").write_text(json.dumps(told))


@dataclass(frozen=True)
class Server:
    """A process that answers over HTTP."""

    pid: int
    url: str


class _Bench:
    """The processes, and runs on them."""

    def __init__(
        self,
        service: Server,
        peer: subprocess.Popen[str],
        served: Server | None,
        model: Path,
        tokens: int,
        rounds: int,
        budget: int,
    ) -> None:
        self.service, self.peer, self.served, self.model = service, peer, served, str(model)
        self.most, self.tokens, self.rounds, self.budget = tokens, tokens, rounds, budget

    async def __aenter__(self) -> _Bench:
        """Open a client whose cost does not grow with the crowd: of httpx, a request among 256 takes 15 ms."""
        pool, patience = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(600)
        self.client = aiohttp.ClientSession(connector=pool, timeout=patience)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.close()

    def body(self, number: int, adapter: int | None, **options: Any) -> dict[str, Any]:
        """An engine request that writes all its tokens."""
        chat = {
            "model": "m", "messages": [{"role": "user", "content": f"hello {number}"}], "seed": number,
            "max_tokens": self.tokens, "ignore_eos": True, **options,
        }  # fmt: skip
        named = None if adapter is None else {"checkpoint_id": f"a{adapter}", "prefix": f"a{adapter}/"}
        return {"chat": chat, "base_model": "b", "adapter": named, "team": "t", "project": "p"}

    async def ask(self, number: int, adapter: int | None = None, **options: Any) -> int:
        """One whole answer; how many tokens it has."""
        return await self._written(self.service, self.body(number, adapter, **options))

    async def _written(self, server: Server, body: dict[str, Any]) -> int:
        async with self.client.post(f"{server.url}/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            tokens: int = (await response.json())["usage"]["completion_tokens"]
            return tokens

    async def stream(self, number: int, adapter: int | None = None, **options: Any) -> AsyncIterator[float]:
        """When each piece of a streamed answer came."""
        body = self.body(number, adapter, stream=True, **options)
        async with self.client.post(f"{self.service.url}/v1/chat/completions", json=body) as response:
            async for line in response.content:
                if b'"content":' in line or b'"finish_reason":"' in line:
                    yield time.perf_counter()

    async def ours(self, crowd: int, adapters: int) -> int:
        """So many requests at once."""
        return sum(
            await asyncio.gather(*[self.ask(i, i % adapters if adapters else None) for i in range(crowd)])
        )

    async def theirs(self, crowd: int, which: str) -> int:
        """One static batch."""
        assert self.peer.stdin is not None and self.peer.stdout is not None
        self.peer.stdin.write(f"{which} {crowd} {self.tokens}\n")
        self.peer.stdin.flush()
        assert await asyncio.to_thread(self.peer.stdout.readline) == "done\n"
        return crowd * self.tokens

    async def serves(self, crowd: int) -> int:
        """The same requests to `transformers serve`; a token that ends a turn ends none there either."""
        assert self.served is not None
        served = self.served
        endless = {"do_sample": True, "eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": self.tokens}
        bodies = [
            self.body(i, None)["chat"] | {"model": self.model, "generation_config": json.dumps(endless)}
            for i in range(crowd)
        ]
        unknown = ("ignore_eos", "seed")
        told = [{name: value for name, value in body.items() if name not in unknown} for body in bodies]
        return sum(await asyncio.gather(*[self._written(served, body) for body in told]))

    async def speeds(self, crowd: int) -> dict[str, Speed]:
        """The medians of each of ours and theirs; they take turns, and who begins changes from round to round."""
        runs: dict[str, tuple[int, Callable[[], Coroutine[Any, Any, int]]]] = {}
        for name, adapters in cases(crowd).items():
            runs[name] = (self.service.pid, partial(self.ours, crowd, adapters))
        for name in ("generate", "adapter_names") if 1 < crowd <= SLOW else ("generate",):
            runs[name] = (self.peer.pid, partial(self.theirs, crowd, name))
        if crowd <= SLOW and self.served is not None:
            runs["transformers serve"] = (self.served.pid, partial(self.serves, crowd))
        found: dict[str, list[Speed]] = {name: [] for name in runs}
        for number in range(self.rounds):
            for name in list(runs if number % 2 else reversed(runs)):
                pid, run = runs[name]
                cpu, began = _cpu_seconds(pid), time.perf_counter()
                try:
                    written = await run()
                except AssertionError as error:
                    if name != "transformers serve":
                        raise
                    sys.stderr.write(f"transformers serve is left out: {error}\n")
                    self.served, found = None, {one: each for one, each in found.items() if one != name}
                    del runs[name]
                    continue
                seconds = time.perf_counter() - began
                found[name].append(Speed(written / (_cpu_seconds(pid) - cpu), written / seconds, seconds))
        return {name: Speed.median(each) for name, each in found.items()}

    async def first_tokens(self, crowd: int, adapters: int) -> list[float]:
        """Milliseconds until the first token of each of so many streams at once."""

        async def first(number: int) -> float:
            began, found = time.perf_counter(), None
            async for at in self.stream(number, number % adapters if adapters else None):
                found = found or (at - began) * 1000
            assert found is not None
            return found

        return sorted(await asyncio.gather(*[first(number) for number in range(crowd)]))

    async def gaps(self, crowd: int, meanwhile: Coroutine[Any, Any, None]) -> float:
        """The median of the milliseconds between two tokens of a stream, while something else goes on."""

        async def one(number: int) -> list[float]:
            times = [at async for at in self.stream(number, number % ADAPTERS)]
            return [(b - a) * 1000 for a, b in itertools.pairwise(times)]

        gaps, _ = await asyncio.gather(asyncio.gather(*[one(number) for number in range(crowd)]), meanwhile)
        return statistics.median(gap for each in gaps for gap in each)


def cases(crowd: int) -> dict[str, int]:
    """What the requests of a crowd name: how many different adapters."""
    return {"base model": 0} if crowd == 1 else {"one adapter": 1, "eight adapters mixed": ADAPTERS}


async def _cases(bench: _Bench) -> list[Result]:
    async with bench:
        await _until_ready(bench)
        return [row for crowd in CROWDS for row in await _crowd(bench, crowd)] + await _swaps(bench)


async def _until_ready(bench: _Bench) -> None:
    """Every process has answered, and made what it makes at its first requests."""
    await _until_it_answers(bench, bench.service)
    if bench.served is not None:
        await _until_it_answers(bench, bench.served)
        await bench.serves(1)
    for which in ("generate", "adapter_names"):
        await bench.theirs(2, which)
    await bench.ours(16, ADAPTERS)


async def _until_it_answers(bench: _Bench, server: Server) -> None:
    for _ in range(2400):
        try:
            async with bench.client.get(f"{server.url}/health"):
                return
        except aiohttp.ClientConnectionError:
            await asyncio.sleep(0.05)
    raise TimeoutError(f"{server.url} did not start")


async def _crowd(bench: _Bench, crowd: int) -> list[Result]:
    """A crowd's rows, in each of its cases."""
    bench.tokens = min(bench.most, bench.budget // crowd)
    speeds = await bench.speeds(crowd)
    results = []
    for name, adapters in cases(crowd).items():
        what, ours = f"{crowd} at once, {name}", speeds[name]
        for peer in ("generate", "adapter_names", "transformers serve"):
            if peer not in speeds or (peer == "adapter_names" and adapters < ADAPTERS):
                continue
            goal = GOALS.get((crowd, peer, adapters), "") if crowd > 1 or bench.model == str(TINY) else ""
            theirs = speeds[peer]
            results += [
                Result.of(f"{what}; {peer}", ours.per_second, theirs.per_second, "tokens/s", goal),
                Result.of(f"{what}; {peer}, by CPU", ours.per_cpu_second, theirs.per_cpu_second, "tokens/s"),
            ]
        bursts = min(bench.rounds, max(1, 128 // crowd))
        firsts = sorted([ms for _ in range(bursts) for ms in await bench.first_tokens(crowd, adapters)])
        p50, p99 = statistics.median(firsts), firsts[min(len(firsts) - 1, len(firsts) * 99 // 100)]
        whole = speeds["generate"].seconds * 1000
        told = f"{p50:.0f} / {p99:.0f} ms", f"{whole:.0f} ms", f"{p50 / whole:.2f}"
        results.append(Result(f"{what}; first token, p50 / p99", *told))
    return results


async def _swaps(bench: _Bench) -> list[Result]:
    """What it costs to bring in an adapter: its first token, and everybody else's next one."""
    bench.tokens = bench.most
    new, known = [], []
    for number in range(SPARE // 2):
        for found, adapter in ((known, number), (new, ADAPTERS + number)):
            began = time.perf_counter()
            await bench.ask(1, adapter, max_tokens=1)
            found.append((time.perf_counter() - began) * 1000)

    async def nothing() -> None:
        return None

    async def swaps() -> None:
        for number in range(SPARE // 2, SPARE):
            await bench.ask(1, ADAPTERS + number, max_tokens=1)

    quiet = await bench.gaps(16, nothing())
    busy = await bench.gaps(16, swaps())
    return [
        Result.of("first token of an adapter never named before, against a known one",
                  statistics.median(new), statistics.median(known), "ms"),
        Result.of("token to token of 16 streams while adapters come in, against none", busy, quiet, "ms", "~ 1"),
    ]  # fmt: skip


def _door() -> list[Result]:
    """What the chat door adds to a request of one token: by HTTP to the door, against by HTTP to the service."""
    ask = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    with stack() as (client, _, state):
        own = json.loads((state / "environment.json").read_text())
        headers = {"Authorization": f"Bearer {own['TUNEYARD_ENGINE_TOKEN']}"}
        model = client.post(
            "/v1/preview/models", json={"project": "bench", "name": "m", "base_model": "tuneyard/tiny"}
        ).json()
        engine = {"base_model": "tuneyard/tiny", "team": "t", "project": "p"}
        with httpx.Client(
            base_url=own["TUNEYARD_INFERENCE_ENGINE_URL"], headers=headers, timeout=60
        ) as service:
            rollout = {"logprobs": True, "return_token_ids": True, "return_tokens_as_token_ids": True}

            def asked(model: str, **options: Any) -> Callable[[], Any]:
                body = ask | {"model": model}
                whole = engine | {"chat": body | options}
                to, sent = (service, whole) if options else (client, body)
                return lambda: to.post("/v1/chat/completions", json=sent).raise_for_status()

            took = interleaved_ms(
                {
                    "service": asked("tuneyard/tiny", n=1),
                    "base": asked("tuneyard/tiny"),
                    "service, a rollout": asked("tuneyard/tiny", **rollout),
                    "trained": asked(model["inference_name"]),
                },
                times=200,
                warm=10,
            )
    return [
        Result(f"what the door adds, {which}, p50", f"{took[name] - took[alone]:.2f} ms",
               f"{took[alone]:.2f} ms whole", goal="<= 3 ms")
        for which, name, alone in (
            ("base model", "base", "service"), ("trained model", "trained", "service, a rollout"))
    ]  # fmt: skip


@contextmanager
def _service(model: Path, adapters: str) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, fd = listener.getsockname()[1], listener.fileno()
        command = [sys.executable, "-c", SERVICE, str(model), adapters, str(fd)]
        with subprocess.Popen(command, pass_fds=[fd], env=_environment()) as process:
            try:
                yield Server(process.pid, f"http://127.0.0.1:{port}")
            finally:
                process.kill()


@contextmanager
def _serve(model: Path, *, start: bool) -> Iterator[Server | None]:
    """`transformers serve`, on as many threads as the service has."""
    if not start:
        yield None
        return
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [
        sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", str(model),
        "--continuous-batching", "--device", "cpu", "--dtype", "float32", "--port", str(port),
    ]  # fmt: skip
    own = _environment() | {"OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
    silent = subprocess.DEVNULL
    with subprocess.Popen(command, env=own, stdout=silent, stderr=silent) as process:
        try:
            yield Server(process.pid, f"http://127.0.0.1:{port}")
        finally:
            process.kill()


@contextmanager
def _peer(model: Path, adapters: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PEER, str(model), adapters, str(THREADS), str(ADAPTERS)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=_environment()
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _environment() -> dict[str, str]:
    """As the local stack starts its processes: idle threads of OpenMP sleep."""
    return {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
