"""Pretraining of `tuneyard/tiny`: a small Qwen3 taught the answers of the corpus, on a laptop's processor.

Every token carries loss, prompts too: the many targets of a step keep Muon's updates from being noise. Each
conversation is its own row, so nothing has to hide one from the next; a step takes conversations as they come, long
and short, and computes those of about equal length together.
"""

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config
from transformers.models.qwen3 import modeling_qwen3

from tuneyard_host.tiny import corpus
from tuneyard_host.tiny.tokenizer import CONTEXT, VOCABULARY_SIZE

logger = logging.getLogger(__name__)

STEP_TOKENS, BATCH_TOKENS = 2048, 2048
WARMUP_TOKENS = 40_000
DECAY = 0.6
PROMPT_WEIGHT = 0.3
MUON_RATE, ADAM_RATE = 0.02, 4e-3
SHARED_DIRECTION = 0.04
SAVE_EVERY = 60.0


@dataclass(frozen=True)
class Batch:
    """Conversations of about equal length, padded on the right, and where their answers are."""

    ids: Tensor  # (B, T)
    trained: Tensor  # (B, T), true on the answers' tokens
    real: Tensor  # (B, T), false on padding
    tokens: int


def untrained(tokenizer: PreTrainedTokenizerFast) -> Any:
    """The architecture before training: 3.3 million parameters."""
    config = Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        num_hidden_layers=4,
        intermediate_size=640,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Branches that start at zero leave each token's own embedding in the stream, which is what copying needs.
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    # Attending by place alone, as copying must, takes a direction that every token shares: without one it comes late.
    with torch.no_grad():
        model.model.embed_tokens.weight += SHARED_DIRECTION * torch.randn(config.hidden_size)
    return model


def steps(tokenizer: PreTrainedTokenizerFast, *, seed: int, tokens: int) -> Iterator[list[Batch]]:
    """The batches of each step, until so many tokens of the corpus have been given out; the same for the same seed."""
    given, rows, size = 0, [], 0
    for one in corpus.conversations(seed):
        rows.append(_row(tokenizer, one))
        size += len(rows[-1][0])
        if size >= STEP_TOKENS:
            rows.sort(key=lambda row: len(row[0]))
            yield [_padded(group, tokenizer.pad_token_id) for group in _groups(rows)]
            given += size
            rows, size = [], 0
            if given >= tokens:
                return


def _row(tokenizer: PreTrainedTokenizerFast, one: corpus.Conversation) -> tuple[list[int], list[int]]:
    encoded = tokenizer.apply_chat_template(
        one.messages, tools=one.tools, return_dict=True, return_assistant_tokens_mask=True
    )
    return encoded["input_ids"][:CONTEXT], encoded["assistant_masks"][:CONTEXT]


def _groups(rows: list[tuple[list[int], list[int]]]) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Neighbours in length, as many as fit a batch."""
    group: list[tuple[list[int], list[int]]] = []
    for row in rows:
        if group and (len(group) + 1) * len(row[0]) > BATCH_TOKENS:
            yield group
            group = []
        group.append(row)
    yield group


def _padded(group: list[tuple[list[int], list[int]]], pad: int) -> Batch:
    length = len(group[-1][0])
    ids = torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in group])
    trained = torch.tensor([mask + [0] * (length - len(mask)) for _, mask in group]).bool()
    real = torch.arange(length) < torch.tensor([[len(ids)] for ids, _ in group])
    return Batch(ids, trained, real, int(real.sum()))


def weight_of(batch: Batch) -> float:
    """How much the targets of a batch weigh in all: those of answers 1, those of prompts ``PROMPT_WEIGHT``."""
    answers, real = int(batch.trained[:, 1:].sum()), int(batch.real[:, 1:].sum())
    return answers + PROMPT_WEIGHT * (real - answers)


def losses(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """The summed loss to train on, prompts weighing less than answers, and the summed loss of the answers alone.

    Padding sits on the right, where causal attention never looks, so no mask is needed.
    """
    hidden = model.model(batch.ids[:, :-1], use_cache=False).last_hidden_state  # (B, T-1, H)
    real = batch.real[:, 1:]
    each = functional.cross_entropy(model.lm_head(hidden[real]), batch.ids[:, 1:][real], reduction="none")
    answer = batch.trained[:, 1:][real].float()
    return (each * (answer + PROMPT_WEIGHT * (1 - answer))).sum(), (each * answer).sum().detach()


class Muon(torch.optim.Optimizer):
    """Momentum whose update of a matrix is made orthogonal; unlike torch's own it works in fp32."""

    def __init__(self, params: list[nn.Parameter], *, lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update every matrix once."""
        for group in self.param_groups:
            for weight in group["params"]:
                velocity = self.state[weight].setdefault("velocity", torch.zeros_like(weight))
                velocity.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonal(weight.grad.lerp(velocity, group["momentum"]))
                stretch = math.sqrt(max(1.0, weight.shape[0] / weight.shape[1]))
                weight.add_(update, alpha=-group["lr"] * stretch)


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix with singular values near one, by five Newton-Schulz steps."""
    x: Tensor = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def rate(given: float, tokens: int) -> float:
    """The share of the full learning rate after so many tokens: up, flat, then down to zero."""
    return min(1.0, given / WARMUP_TOKENS, (tokens + STEP_TOKENS - given) / tokens / DECAY)


def run(tokenizer: PreTrainedTokenizerFast, *, seed: int, tokens: int, checkpoint: Path) -> Any:
    """Pretrain on so many tokens; a run that was cut off goes on from its checkpoint to the same result."""
    # The fused kernel computes the same as transformers' own five operations, a third faster on a processor.
    modeling_qwen3.Qwen3RMSNorm.forward = _fused_norm
    torch.manual_seed(seed)
    model = untrained(tokenizer)
    matrices = [one for one in model.model.layers.parameters() if one.ndim == 2]
    others = [one for one in model.parameters() if all(one is not matrix for matrix in matrices)]
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices, lr=MUON_RATE),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    skip, given = _restore(checkpoint, model, optimizers)
    saved = time.monotonic()
    loss_seen = answers_seen = 0.0
    for step, parts in enumerate(steps(tokenizer, seed=seed, tokens=tokens)):
        if step < skip:
            continue
        size = sum(part.tokens for part in parts)
        for optimizer, full in zip(optimizers, (MUON_RATE, ADAM_RATE), strict=True):
            optimizer.param_groups[0]["lr"] = full * rate(given + size / 2, tokens)
        weight = sum(map(weight_of, parts))
        for part in parts:
            loss, answer_loss = losses(model, part)
            torch.autograd.backward(loss / weight)
            loss_seen += answer_loss.item()
            answers_seen += int(part.trained[:, 1:].sum())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        given += size
        if time.monotonic() - saved > SAVE_EVERY:
            _save(checkpoint, model, optimizers, step + 1, given)
            saved = time.monotonic()
        if step % 50 == 49:
            logger.info(
                "pretraining: %d of %d tokens, loss of answers %.4f",
                given,
                tokens,
                loss_seen / max(1, answers_seen),
            )
            loss_seen = answers_seen = 0.0
    return model


def _fused_norm(self: Any, hidden: Tensor) -> Tensor:
    return functional.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.variance_epsilon)


def _save(
    path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], step: int, given: int
) -> None:
    state = {"model": model.state_dict(), "optimizers": [one.state_dict() for one in optimizers]}
    torch.save(state | {"step": step, "given": given}, partial := path.with_suffix(".partial"))
    partial.replace(path)


def _restore(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> tuple[int, int]:
    """Where to go on: how many steps are done and how many tokens they took."""
    if not path.exists():
        return 0, 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["step"], state["given"]
