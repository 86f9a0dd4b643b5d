"""Log-probabilities of chosen tokens, without ever holding the logits of a whole row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tuneyard.errors import TrainingError
from tuneyard_host.bases import Base
from tuneyard_host.training.attention import own_attention
from tuneyard_host.training.memory import sparing
from tuneyard_host.training.packing import History, Row, build_row


class _TokenLogprobs(torch.autograd.Function):
    """log softmax(h W^T)[target] for M targets over U <= M hidden states, a few hidden states at a time.

    The projection W is frozen, so d log p(v) / dh = W_v - softmax(h W^T) W is known as soon as the
    probabilities are: the forward pass keeps this (U, H) product and the backward pass touches the
    vocabulary no more.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, predictors: Tensor, targets: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        needed = ctx.needs_input_grad[0]
        logprobs = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        means = torch.empty_like(hidden) if needed else None
        bounds = torch.arange(0, len(hidden) + chunk, chunk, device=hidden.device)
        cuts = torch.searchsorted(predictors, bounds).tolist()
        for number, start in enumerate(range(0, len(hidden), chunk)):
            part = slice(start, start + chunk)
            terms = slice(cuts[number], cuts[number + 1])
            logits = (hidden[part] @ weight.T).float()
            normaliser = logits.logsumexp(-1)
            logprobs[terms] = (
                logits[predictors[terms] - start, targets[terms]] - normaliser[predictors[terms] - start]
            )
            probabilities = logits.sub(normaliser[:, None]).exp_()
            entropies[part] = normaliser - torch.linalg.vecdot(probabilities, logits)
            if means is not None:
                torch.mm(probabilities.to(weight.dtype), weight, out=means[part])
        ctx.save_for_backward(weight, predictors, targets, *([] if means is None else [means]))
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        weight, predictors, targets, means = ctx.saved_tensors
        sums = grad.new_zeros(len(means)).index_add_(0, predictors, grad)
        gradient = means * -sums[:, None].to(means.dtype)
        gradient.index_add_(0, predictors, weight[targets] * grad[:, None].to(weight.dtype))
        return gradient, None, None, None, None


_token_logprobs: Callable[..., tuple[Tensor, Tensor]] = _TokenLogprobs.apply


def of_tokens(
    hidden: Tensor, weight: Tensor, predictors: Tensor, targets: Tensor, *, chunk: int
) -> tuple[Tensor, Tensor]:
    """log p (M,) of each target, and the entropy (M,) of the distribution it was drawn from.

    ``hidden`` is (T, H), ``weight`` (V, H); target m is predicted from ``hidden[predictors[m]]``, and
    ``predictors`` ascend. Hidden states that predict nothing never meet the vocabulary; several targets of
    one state (branches of a conversation) share its distribution.
    """
    used, inverse = predictors.unique_consecutive(return_inverse=True)
    logprobs, entropies = _token_logprobs(hidden[used], weight, inverse, targets, chunk)
    return logprobs, entropies[inverse]


def of_row(model: Any, row: Row, *, chunk: int) -> tuple[Tensor, Tensor]:
    """log p (M,) and entropy (M,) of the trained tokens of one row, under the model with whatever adapter is active."""
    with own_attention(model), sparing(model, len(row.ids)):
        output = model.get_decoder()(
            input_ids=row.ids[None],
            position_ids=row.positions[None],
            attention_mask=None,
            use_cache=False,
            forest=row.forest,
        )
    head = model.get_output_embeddings().weight
    return of_tokens(output.last_hidden_state[0], head, row.predictors, row.targets, chunk=chunk)


def refuse_unknown(base: Base) -> None:
    """Fail on a base model that a packed row does not compute as each of its conversations computes alone.

    Attention of another kind, capped or scaled logits: whatever this trainer does not know shows here at once.
    """
    conversations = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 8, 9], [9, 8, 7, 6, 5]]
    histories = [History(ids, [False] + [True] * (len(ids) - 1), [0.0] * len(ids)) for ids in conversations]
    row = build_row(histories, [0, 4, 0]).to(base.model.device)
    with torch.no_grad():
        found, _ = of_row(base.model, row, chunk=4)
        for number, ids in enumerate(conversations):
            tokens = torch.tensor([ids], device=base.model.device)
            alone = base.model(input_ids=tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1)
            wanted = alone.gather(-1, tokens[0, 1:, None])[:, 0]
            wrong = (found[row.history == number] - wanted).abs().mean()
            if float(wrong) > _TOLERANCE[base.model.dtype]:
                raise TrainingError(
                    f"{base.spec.id} is a {type(base.model).__name__}: its attention or its vocabulary projection "
                    "is of a kind that cannot be trained here. Qwen and Llama models can."
                )


_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.1}
