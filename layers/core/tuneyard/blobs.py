"""The bucket: the one module that can spell an object's key."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from tuneyard import ids
from tuneyard.errors import NotFound
from tuneyard.once import Once
from tuneyard.settings import settings

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


@Once
def _client() -> S3Client:
    return boto3.client("s3", config=Config(signature_version="s3v4", s3={"addressing_style": "path"}))


def input_key(job_id: str) -> str:
    """Where a job's training input lies, gzipped JSON."""
    return f"inputs/{job_id}.json.gz"


def trial_key(job_id: str) -> str:
    """Where the input of a job that is only checked lies, for as long as that takes."""
    return f"trials/{job_id}.json.gz"


def log_key(model_id: str, log_id: str) -> str:
    """Where one call of the log operation is kept, gzipped JSON."""
    return f"logs/{model_id}/{log_id}.json.gz"


def upload_key(team: str, upload_id: str) -> str:
    """Where a client's own upload lies; the team in the key keeps it from every other team."""
    return f"uploads/{team}/{upload_id}"


def uploaded_key(team: str, url: str) -> str | None:
    """The key of the team's upload that ``upload://`` or ``s3://`` names, or None when it names none of theirs."""
    scheme, _, rest = url.partition("://")
    if scheme == "upload" and ids.is_uuid(rest):
        return upload_key(team, rest)
    if scheme == "s3" and url.startswith(uri(upload_key(team, ""))):
        return rest.partition("/")[2]
    return None


def artifact_prefix(collection_id: str, version: int, nonce: str) -> str:
    """Where the files of a data set's version lie; the nonce keeps two that are made at once apart."""
    return f"artifacts/{collection_id}/{version:06d}-{nonce}/"


def model_prefix(model_id: str) -> str:
    """What every object of a model's checkpoints begins with."""
    return f"models/{model_id}/"


def checkpoint_prefix(model_id: str, step: int, job_id: str) -> str:
    """Where the files of a checkpoint lie; the job in it keeps two jobs apart whatever is retried."""
    return f"{model_prefix(model_id)}{step:06d}-{job_id}/"


def progress_prefix(job_id: str) -> str:
    """Where the state of a job that is not over yet lies, for the worker that may have to go on with it."""
    return f"progress/{job_id}/"


def put(key: str, body: bytes) -> None:
    """Store an object; returns when it is durable."""
    _client().put_object(Bucket=settings().bucket_name, Key=key, Body=body)


def put_packed(key: str, body: bytes) -> None:
    """Store an object gzipped."""
    put(key, gzip.compress(body, compresslevel=3, mtime=0))


def get(key: str) -> bytes:
    """The object's bytes; NotFound when there is none."""
    try:
        return _client().get_object(Bucket=settings().bucket_name, Key=key)["Body"].read()
    except ClientError as error:
        if error.response["Error"]["Code"] in ("NoSuchKey", "404"):
            raise NotFound(f"The object {key!r} is not in the bucket.") from error
        raise


def get_unpacked(key: str) -> bytes:
    """The object's bytes, unpacked when they are gzip."""
    body = get(key)
    return gzip.decompress(body) if body.startswith(b"\x1f\x8b") else body


def copy(source: str, target: str) -> None:
    """Copy an object inside the bucket; NotFound when there is none."""
    try:
        where: Any = {"Bucket": settings().bucket_name, "Key": source}
        _client().copy_object(Bucket=settings().bucket_name, Key=target, CopySource=where)
    except ClientError as error:
        if error.response["Error"]["Code"] in ("NoSuchKey", "404"):
            raise NotFound(f"The object {source!r} is not in the bucket.") from error
        raise


def uri(key: str) -> str:
    """The object's ``s3://`` address."""
    return f"s3://{settings().bucket_name}/{key}"


def size(key: str) -> int | None:
    """The object's size in bytes, or None when there is none."""
    try:
        return _client().head_object(Bucket=settings().bucket_name, Key=key)["ContentLength"]
    except ClientError as error:
        if error.response["Error"]["Code"] in ("NoSuchKey", "404"):
            return None
        raise


def keys(prefix: str) -> list[str]:
    """The keys that begin with ``prefix``."""
    pages = _client().get_paginator("list_objects_v2").paginate(Bucket=settings().bucket_name, Prefix=prefix)
    return [entry["Key"] for page in pages for entry in page.get("Contents", [])]


def delete_prefix(prefix: str) -> None:
    """Delete every object whose key begins with ``prefix``."""
    found = keys(prefix)
    for start in range(0, len(found), 1000):
        batch: Any = {"Objects": [{"Key": key} for key in found[start : start + 1000]], "Quiet": True}
        _client().delete_objects(Bucket=settings().bucket_name, Delete=batch)


def download_url(key: str, *, seconds: int) -> str:
    """A link that reads the object without a key of ours, for ``seconds``."""
    parameters = {"Bucket": settings().bucket_name, "Key": key}
    return _client().generate_presigned_url("get_object", Params=parameters, ExpiresIn=seconds)


def upload_url(key: str, *, seconds: int) -> str:
    """A link that takes the object by PUT without a key of ours, for ``seconds``."""
    parameters = {"Bucket": settings().bucket_name, "Key": key}
    return _client().generate_presigned_url("put_object", Params=parameters, ExpiresIn=seconds)


def reachable() -> None:
    """Ask for the bucket: raises when it cannot be reached."""
    _client().head_bucket(Bucket=settings().bucket_name)
