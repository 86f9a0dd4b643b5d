"""What is stored: one class for one kind of row. Times are milliseconds since 1970 (UTC)."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from tuneyard.configs import LoraSettings
from tuneyard.errors import Forbidden


class Record(BaseModel):
    """A row of the table."""

    model_config = ConfigDict(protected_namespaces=())


class Role(StrEnum):
    """What a key may do in its team."""

    ADMIN = "admin"
    MEMBER = "member"


class JobStatus(StrEnum):
    """Where a training job stands; the last three are final."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        """Whether the job will never change again."""
        return self in (JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.CANCELLED)


class JobKind(StrEnum):
    """What a job computes."""

    RL = "rl"
    SFT = "sft"


class EventType(StrEnum):
    """What automations listen to; the last two are of webhooks themselves."""

    ADD_ARTIFACT_ALIAS = "ADD_ARTIFACT_ALIAS"
    ADD_ARTIFACT_TAG = "ADD_ARTIFACT_TAG"
    LINK_ARTIFACT = "LINK_ARTIFACT"
    RUN_METRIC = "RUN_METRIC"
    RUN_STATE = "RUN_STATE"
    WEBHOOK_DISABLED = "webhook.disabled"
    WEBHOOK_TEST = "webhook.test"


class Team(Record):
    """Who owns models, keys and bills; its name is the ``entity`` of everything it owns."""

    name: str
    created_at: int


class ApiKey(Record):
    """A bearer key, kept as the SHA-256 of its 256 random bits."""

    id: str
    hash: str
    team: str
    user: str
    role: Role
    name: str = ""
    created_at: int
    revoked_at: int | None = None


class Member(Record):
    """A user of a team; ``admin_of`` names the projects and registries that a plain member administers."""

    team: str
    user: str
    role: Role
    admin_of: list[str] = Field(default_factory=list)
    """``project:{project}`` and ``registry:{registry}``."""
    created_at: int


class Identity(NamedTuple):
    """The team and user that a key stands for."""

    team: str
    user: str
    role: Role
    key_id: str

    def require_admin(self, to_do: str) -> None:
        """Forbidden unless the key is an administrator's."""
        if self.role is not Role.ADMIN:
            raise Forbidden(f"Only an administrator of team {self.team!r} may {to_do}.")


class Model(Record):
    """A trainable model: a base model, and the adapter checkpoints that its jobs make."""

    id: str
    entity: str
    project: str
    name: str
    base_model: str
    run_id: str
    lora: LoraSettings = Field(default_factory=LoraSettings)
    created_at: int
    created_by: str
    last_step: int = 0
    """The step of the newest checkpoint that was ever made; no step is used twice."""
    active_job: str | None = None
    deleted_at: int | None = None
    """Set first when it is deleted: from then on it is not found, while its jobs, checkpoints and files go."""

    @property
    def collection(self) -> str:
        """The name of its artifact collection, ``entity/project/name``."""
        return f"{self.entity}/{self.project}/{self.name}"


class Checkpoint(Record):
    """An adapter that a job made: a version of the model's artifact collection."""

    id: str
    model_id: str
    step: int
    job_id: str
    kind: JobKind
    prefix: str
    metrics: dict[str, float] = Field(default_factory=dict)
    files: list[CheckpointFile] = Field(default_factory=list)
    lineage: dict[str, Any] = Field(default_factory=dict)
    created_at: int


class CheckpointFile(BaseModel):
    """One object of a checkpoint; ``name`` is relative to the checkpoint's prefix."""

    name: str
    size: int
    sha256: str


class OpenJob(Record):
    """A job of a model that is not final yet; the first one of a model is the one that may run."""

    model_id: str
    created_at: int
    job_id: str


class Collection(Record):
    """The name of an artifact collection, ``entity/project/name``, and what its versions are.

    The versions of a model's collection are its checkpoints, and the model's id is the collection's. Other collections
    have versions of their own: files of a data set, or in a registry links to versions elsewhere.
    """

    name: str
    id: str
    """What its aliases, versions and labels hang on; the model's id when it is a model's."""
    kind: Literal["model", "dataset", "registry"] = "model"
    versions: int = 0
    """How many versions of its own it ever had: the number of the next one."""
    created_at: int = 0
    created_by: str = ""

    @property
    def scope(self) -> str:
        """The ``entity/project`` that it is in."""
        return self.name.rpartition("/")[0]

    @property
    def short_name(self) -> str:
        """Its name inside its project."""
        return self.name.rpartition("/")[2]

    def version_name(self, version: int) -> str:
        """The alias that a version has for ever: ``step{N}`` of a checkpoint, ``v{N}`` of others."""
        return f"step{version}" if self.kind == "model" else f"v{version}"


class Alias(Record):
    """A name for one version of a collection; the version of a checkpoint is its step.

    ``collection_id`` is the model's id, so that a new model of the same name starts without its predecessor's.
    """

    collection_id: str
    alias: str
    version: int


class Version(Record):
    """A version of a collection: files with metadata; in a registry also what it is a link to."""

    id: str
    collection_id: str
    version: int
    metadata: dict[str, Any] = Field(default_factory=dict)
    files: list[CheckpointFile] = Field(default_factory=list)
    prefix: str
    source: str | None = None
    """In a registry: the version that is linked, ``entity/project/name:version``."""
    created_at: int
    created_by: str


class Label(Record):
    """An alias, a tag or a link as a list of versions shows it, sorted by version."""

    collection_id: str
    version: int
    kind: Literal["alias", "tag", "link"]
    name: str
    """The alias or tag; of a link the registry's collection, ``entity/project/name``."""
    target: int | None = None
    """Of a link: its version in that collection."""


REGISTRY_PROJECT = "wandb-registry-"
"""A registry's collections are those of a project of this name and the registry's."""


class Registry(Record):
    """A place of a team that versions of all its projects are linked into."""

    team: str
    name: str
    created_at: int
    created_by: str

    @property
    def scope(self) -> str:
        """The ``entity/project`` that its collections are in."""
        return f"{self.team}/{REGISTRY_PROJECT}{self.name}"


class Idempotency(Record):
    """Which job a request made, so that the same request again makes none."""

    team: str
    hash: str
    body_hash: str
    job_id: str
    expires: int
    """Seconds since 1970: when the table forgets it."""


class Job(Record):
    """A training job, its lease while it runs, and its outcome."""

    id: str
    team: str
    model_id: str
    run_id: str = ""
    run_user: str = ""
    collection: str
    base_model: str
    kind: JobKind
    status: JobStatus
    config: dict[str, Any]
    experimental_config: dict[str, Any]
    input_key: str
    training_data_url: str | None = None
    created_at: int
    created_by: str
    started_at: int | None = None
    finished_at: int | None = None
    error_message: str | None = None
    checkpoint_step: int | None = None
    num_sequences: int | None = None
    steps_done: int = 0
    num_trained_tokens: int | None = None

    parent_step: int | None = None
    """The checkpoint that the job goes on from, settled when it first starts; 0 is the base model."""
    rung_at: int | None = None

    last_event: int = 0
    """Events of the job so far: the sequence number of its newest one."""
    progress: int = 0
    """Events that its trainer has appended: what a resumed trainer skips."""
    worker: str | None = None
    lease: str | None = None
    lease_until: int | None = None
    deaths: int = 0
    """Workers that died on it since it last made progress."""


class JobEvent(Record):
    """One entry of a job's history; ``seq`` counts from 1 without a gap."""

    id: str
    job_id: str
    seq: int
    type: str
    data: dict[str, Any] = Field(default_factory=dict)
    created_at: int


class Run(Record):
    """The metric history that is made with a model."""

    id: str
    entity: str
    project: str
    name: str
    model_id: str
    user: str
    created_at: int
    last_row: int = 0


class RunRow(Record):
    """One row of a run's history."""

    run_id: str
    row: int
    metrics: dict[str, float]
    created_at: int


EVENTS_KEPT_SECONDS = 30 * 24 * 3600


class ArtifactEvent(Record):
    """Something that happened to an artifact or a run; written in one transaction with the change itself."""

    id: str
    type: EventType
    entity: str
    project: str
    author: str
    collection: str | None = None
    version: int | None = None
    version_name: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    """What was known of the artifact version at that moment; it stays in the table and does not go on the bus."""
    also_in: str | None = None
    """Another ``entity/project`` that it happened in: of a link, where the linked version comes from."""
    alias: str | None = None
    tag: str | None = None
    run_id: str | None = None
    data: dict[str, Any] = Field(default_factory=dict)
    created_at: int
    published_at: int | None = None
    expires: int = Field(default_factory=lambda told: told["created_at"] // 1000 + EVENTS_KEPT_SECONDS)
    """Seconds since 1970: when the table forgets it."""


class Usage(Record):
    """What a team used on one day (UTC), by project and model."""

    team: str
    day: str
    project: str
    model: str
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    trained_tokens: int = 0
    training_ms: int = 0


class Worker(Record):
    """A process that was seen doing its part, so that the system check can tell."""

    kind: Literal["trainer", "sweep", "sender"]
    name: str
    seen_at: int
    expires: int


Checkpoint.model_rebuild()
Version.model_rebuild()
