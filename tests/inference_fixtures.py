"""What the inference tests share: a base model of random weights, adapters for it, and the service over both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from fastapi import FastAPI
from safetensors.torch import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast, Qwen3Config

from tuneyard.errors import NotFound
from tuneyard.settings import BaseModelSpec
from tuneyard_host import bases
from tuneyard_host.inference.engine import Limits
from tuneyard_host.inference.service import create_app

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SHAPES = {
    "self_attn.q_proj": (128, 64), "self_attn.k_proj": (64, 64), "self_attn.v_proj": (64, 64),
    "self_attn.o_proj": (64, 128), "mlp.gate_proj": (160, 64), "mlp.up_proj": (160, 64), "mlp.down_proj": (64, 160),
}  # fmt: skip
LAYERS, CONTEXT, TOKEN = 2, 512, "engine-token"


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with ChatML and tool tags; a few merges, so that characters are split over tokens too."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    text = [Path(__file__).read_text(), "user assistant system tool name arguments true false null"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(text, trainer)
    inner.add_tokens(
        [AddedToken(tag, special=False, normalized=False) for tag in ("<tool_call>", "</tool_call>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )


def save_adapter(folder: Path, *, seed: int, rank: int, modules: list[str], base: Path) -> None:
    """A PEFT folder with random LoRA weights on these modules, strong enough to change every answer."""
    folder.mkdir(parents=True)
    numbers = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for name in modules:
            out, in_ = SHAPES[name]
            path = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.randn(rank, in_, generator=numbers) * 0.2
            tensors[f"{path}.lora_B.weight"] = torch.randn(out, rank, generator=numbers) * 0.2
    targets = [name.split(".")[1] for name in modules]
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base),
        "r": rank, "lora_alpha": 16, "target_modules": targets, "bias": "none", "use_rslora": seed % 2 == 1,
    }  # fmt: skip
    (folder / "adapter_model.safetensors").write_bytes(save(tensors))
    (folder / "adapter_config.json").write_text(json.dumps(config))


@dataclass
class House:
    """A service and what is in it."""

    app: FastAPI
    spec: BaseModelSpec
    bucket: Path
    reads: list[str]

    @property
    def base(self) -> bases.Base:
        return bases.load(self.spec)

    def body(self, text: Any = "Hello", *, adapter: str | None = None, **options: Any) -> dict[str, Any]:
        """An engine request; the options are the chat's, but for ``project``."""
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        chat = {"model": "m", "messages": messages, **options}
        project = chat.pop("project", "p")
        named = None if adapter is None else {"checkpoint_id": adapter, "prefix": f"{adapter}/"}
        return {"chat": chat, "base_model": self.spec.id, "adapter": named, "team": "t", "project": project}

    def client(self) -> httpx.AsyncClient:
        """An HTTP client of the service, with its token."""
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app), base_url="http://engine", headers=headers, timeout=60
        )

    def ask(self, text: str | list[dict[str, Any]] = "Hello", **options: Any) -> dict[str, Any]:
        """One answer."""
        return self.ask_all([(text, options)])[0]

    def ask_all(self, asked: list[tuple[Any, dict[str, Any]]]) -> list[dict[str, Any]]:
        """Answers to requests that are made at the same time."""

        async def all_of_them() -> list[dict[str, Any]]:
            async with self.client() as client:
                return await asyncio.gather(*[one(client, text, options) for text, options in asked])

        async def one(client: httpx.AsyncClient, text: Any, options: dict[str, Any]) -> dict[str, Any]:
            response = await client.post("/v1/chat/completions", json=self.body(text, **options))
            assert response.status_code == 200, response.text
            answer: dict[str, Any] = response.json()
            return answer

        return asyncio.run(all_of_them())

    def refused(
        self, text: str | list[dict[str, Any]] = "Hello", **options: Any
    ) -> tuple[int, dict[str, Any]]:
        """The status and ``error`` of a request that is not answered."""

        async def once() -> httpx.Response:
            async with self.client() as client:
                return await client.post("/v1/chat/completions", json=self.body(text, **options))

        response = asyncio.run(once())
        return response.status_code, response.json().get("error", {})

    def openai(self, adapter: str | None = None) -> openai.AsyncOpenAI:
        """The openai SDK, with a door in between that names the base model and the adapter."""
        client = httpx.AsyncClient(transport=Door(self, adapter))
        return openai.AsyncOpenAI(
            api_key=TOKEN, base_url="http://engine/v1", http_client=client, max_retries=0
        )


class Door(httpx.AsyncBaseTransport):
    """Stands where the chat door stands: wraps the client's body into the engine's."""

    def __init__(self, house: House, adapter: str | None) -> None:
        self._house, self._adapter, self._inner = house, adapter, httpx.ASGITransport(house.app)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Pass the request on."""
        chat = json.loads(await request.aread())
        body = json.dumps(self._house.body(chat.pop("messages"), adapter=self._adapter, **chat))
        headers = {"authorization": request.headers["authorization"], "content-type": "application/json"}
        return await self._inner.handle_async_request(
            httpx.Request("POST", request.url, headers=headers, content=body)
        )


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3 of random weights."""
    return save_base(tmp_path_factory.mktemp("base"), Qwen3Config, head_dim=32, tie_word_embeddings=True)


def save_base(folder: Path, family: type[PreTrainedConfig], **settings: Any) -> Path:
    """A small model of that family, of random weights."""
    tokens = tokenizer()
    config = family(
        hidden_size=64, num_hidden_layers=LAYERS, intermediate_size=160, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=len(tokens), max_position_embeddings=CONTEXT, eos_token_id=tokens.eos_token_id,
        initializer_range=0.2, **settings,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokens.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def bucket(tmp_path_factory: pytest.TempPathFactory, base_folder: Path) -> Path:
    """Adapters ``a0`` to ``a7``, of several ranks; ``a3`` is on the attention only."""
    folder = tmp_path_factory.mktemp("bucket")
    for seed in range(8):
        modules = [name for name in SHAPES if seed != 3 or name.startswith("self_attn")]
        save_adapter(
            folder / f"a{seed}", seed=seed, rank=4 if seed % 3 else 8, modules=modules, base=base_folder
        )
    return folder


@contextmanager
def served(spec: BaseModelSpec, bucket: Path = Path(), limits: Limits | None = None) -> Iterator[House]:
    """A service with this base model, whose adapters lie in that folder."""
    reads: list[str] = []

    def read_blob(key: str) -> bytes:
        reads.append(key)
        if not (bucket / key).exists():
            raise NotFound(f"No object {key!r}.")
        return (bucket / key).read_bytes()

    app = create_app([spec], read_blob, TOKEN, limits)
    yield House(app, spec, bucket, reads)
    asyncio.run(app.state.servers.close())


@pytest.fixture(scope="session")
def house(base_folder: Path, bucket: Path) -> Iterator[House]:
    """The service, with its engine running."""
    with served(BaseModelSpec(id="tuneyard/test", source=str(base_folder)), bucket) as built:
        yield built
