"""The same on a Qwen3 of 100 million random weights, where arithmetic outweighs everything else."""

from __future__ import annotations

import tempfile
from pathlib import Path

from inference import TINY, measured
from measuring import Result


def measure() -> list[Result]:
    """About six minutes on two cores."""
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder))
        return measured(Path(folder), tokens=16, rounds=3, budget=1024, serve=False)


def save(folder: Path) -> None:
    """The model's files, with the tokenizer of the tiny one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    config = Qwen3Config(
        hidden_size=768, num_hidden_layers=12, intermediate_size=2304, num_attention_heads=12, num_key_value_heads=4,
        head_dim=64, vocab_size=len(tokenizer), max_position_embeddings=1024, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
