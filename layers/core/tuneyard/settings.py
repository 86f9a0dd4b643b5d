"""What the process reads from its environment: read once, typed, and a missing one stops the process at start."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from tuneyard import __version__

USER_AGENT = f"tuneyard/{__version__}"
"""What AWS is told of who calls: boto3 would put its own together anew for every call."""


class BaseModelSpec(BaseModel):
    """A base model on offer: a Hugging Face folder or id, and the learning rate that works on it."""

    model_config = ConfigDict(frozen=True)

    id: str
    source: str
    learning_rate: float = 5e-6
    context_length: int | None = None
    revision: str | None = None
    quantization: Literal["nf4"] | None = None
    """How the frozen weights are kept while training: nf4 in four bits, by bitsandbytes."""
    engine_url: str = ""
    """A vLLM server that answers chats with it; the embedded engine does where it is empty."""
    engine_folder: str = "/var/lib/tuneyard/adapters"
    """Where the inference service puts adapters and vLLM reads them, under the same path on both sides."""
    engine_adapters: int = Field(32, ge=1)
    """How many adapters vLLM keeps loaded beside those in use."""


class Settings(BaseSettings):
    """Every environment variable that the control plane, the trainer and the inference service know."""

    model_config = SettingsConfigDict(env_prefix="TUNEYARD_", extra="ignore")

    table_name: str
    bucket_name: str
    training_queue_url: str
    event_queue_url: str
    delivery_queue_url: str
    bus_name: str
    base_models: list[BaseModelSpec] = Field(min_length=1)
    inference_engine_url: str = ""
    engine_token: str = ""
    vllm_api_key: str = ""
    max_body_bytes: int = 6_000_000
    max_unpacked_bytes: int = 256_000_000
    events_hold_seconds: float = Field(20.0, ge=0, le=20)
    lease_seconds: float = Field(60.0, ge=2)
    upload_seconds: int = 3600
    max_download_bytes: int = 100_000_000
    download_seconds: float = Field(20.0, gt=0, le=25)
    key_concurrency: int = 2000
    project_concurrency: int = 6000
    scale_to_zero: bool = False
    worker_hour_price: float = 0.0
    secret_prefix: str = "tuneyard"  # noqa: S105  names, not values
    api_host: str = ""
    own_hosts: list[str] = Field(default_factory=list)
    """Names of this API, where webhooks may not go."""
    allow_local_targets: bool = False
    """Webhooks and training data may come from private addresses and over plain HTTP: for the laptop alone."""
    webhook_ports: list[int] = [443]
    webhook_schedule: list[int] = Field([0, 5, 300, 1800, 7200, 18000, 36000, 36000], min_length=1)
    """Seconds from each failed attempt to the next; as many attempts as there are entries."""
    webhook_seconds: float = Field(15.0, gt=0, le=25)
    webhook_in_flight: int = Field(10, ge=1, le=100)
    fires_per_minute: int = Field(60, ge=1)


@lru_cache
def settings() -> Settings:
    """The settings of this process; tests that change the environment call ``settings.cache_clear()``."""
    return Settings()
