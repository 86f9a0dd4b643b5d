"""Base models in memory: loaded once, frozen, shared by everything in the process."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from tuneyard.errors import TrainingError
from tuneyard.settings import BaseModelSpec

BUILT_IN = {"builtin:tiny": Path(__file__).parent / "tiny" / "model"}


@dataclass(frozen=True)
class Base:
    """A frozen causal language model with its tokenizer."""

    spec: BaseModelSpec
    model: Any
    tokenizer: Any
    context_length: int
    digest: str
    """SHA-256 over the names and contents of its weight files; the commit for a hub model."""


def folder(spec: BaseModelSpec) -> str:
    """What ``from_pretrained`` takes: the folder of a built-in model, else the folder or hub id as configured."""
    return str(BUILT_IN.get(spec.source, spec.source))


@lru_cache(maxsize=8)
def load(spec: BaseModelSpec) -> Base:
    """Load a base model: bf16 on a GPU, fp32 on a CPU, every parameter frozen, in eval mode.

    Raises TrainingError when its files are missing, unreadable, or not those of the shipped digest.
    """
    source = folder(spec)
    digest = _digest(source)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, revision=spec.revision)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_pretrained(
            source, revision=spec.revision, dtype=dtype, **_quantized(spec, dtype, device)
        )
    except ImportError as error:
        raise TrainingError(
            f"The base model {spec.id!r} is in nf4: pip install 'tuneyard[qlora]'."
        ) from error
    except (OSError, ValueError) as error:
        raise TrainingError(
            f"The base model {spec.id!r} cannot be loaded from {spec.source!r}: {error}"
        ) from error
    model.requires_grad_(False).eval()
    if spec.quantization is None:
        model.to(device)
    context = spec.context_length or model.config.max_position_embeddings
    return Base(spec, model, tokenizer, context, digest or str(getattr(model.config, "_commit_hash", "")))


def load_to_serve(spec: BaseModelSpec) -> Base:
    """The same base, its four-bit weights written out: what it computes is what the trainer computes with."""
    base = load(spec)
    if spec.quantization is not None and getattr(base.model, "is_quantized", False):
        base.model.dequantize()
        base.model.requires_grad_(False)
    return base


def _quantized(spec: BaseModelSpec, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """What ``from_pretrained`` needs to keep the weights in four bits (QLoRA, arXiv 2305.14314, section 3)."""
    if spec.quantization is None:
        return {}
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=spec.quantization,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": config, "device_map": {"": device}}


def _digest(source: str) -> str:
    """The digest of a folder's weights, checked against its SHA256SUMS where it ships one; "" for a hub id."""
    path = Path(source)
    if not path.is_dir():
        return ""
    whole = hashlib.sha256()
    sums = {file.name: _sha256(file) for file in sorted(path.glob("*.safetensors"))}
    listed = path / "SHA256SUMS"
    if listed.exists():
        for line in listed.read_text().splitlines():
            expected, name = line.split(maxsplit=1)
            if (path / name).is_file() and _sha256(path / name) != expected:
                raise TrainingError(
                    f"The base model's file {name} is damaged: its SHA-256 is not the shipped one."
                )
    for name, value in sums.items():
        whole.update(f"{name}:{value}\n".encode())
    return whole.hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
