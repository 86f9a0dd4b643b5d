"""One conversation as tokens: which of them the model generated, and how likely it found them.

Generated tokens are taken as the rollout recorded them. Writing them out as text and tokenising that again
would train on tokens that the model never produced, and would lose tool calls; so the template writes only
what stands between them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tuneyard import trajectories
from tuneyard.errors import TrainingError
from tuneyard.trajectories import is_choice
from tuneyard_host.training.packing import History
from tuneyard_host.training.templates import Message, Template, template_message, template_tools

UNKNOWN = math.nan
LEAST_LOGPROB = -9000.0
"""Servers write -9999 for minus infinity; a sampled token cannot have had that."""


@dataclass
class Turn:
    """An assistant's turn whose tokens are known: where it stands, its tokens, and whether they train."""

    at: int
    ids: list[int]
    logprobs: list[float]
    trained: bool


def tokenize(history: trajectories.History, template: Template, *, without_logprobs: bool) -> History | None:
    """The tokens of a conversation up to the end of its last trainable turn; None when there is no such turn."""
    items = history.messages_and_choices
    tools = template_tools(history.tools)
    messages = [
        template_message(item["message"] | {"role": "assistant"} if is_choice(item) else item)
        for item in items
    ]
    turns = _turns(items, messages, tools, template, without_logprobs=without_logprobs)
    while turns and not turns[-1].trained:
        turns.pop()
    if not turns:
        return None
    made = History(ids=[], trained=[], logprobs=[])
    before: Turn | None = None
    for turn in turns:
        thinking = template.tokenizer.decode(turn.ids[:8]).lstrip().startswith("<think>")
        if before is None:
            written = template.encode(
                template.render(messages[: turn.at], tools, prompt=True, thinking=thinking)
            )
        else:
            text = template.between(messages, tools, after=before.at, upto=turn.at, thinking=thinking)
            written = template.encode(text)
            written = template.without_end(written) if before.ids[-1] in template.ends else written
        made.ids += written + turn.ids
        made.trained += [False] * len(written) + [turn.trained] * len(turn.ids)
        made.logprobs += [UNKNOWN] * len(written) + turn.logprobs
        before = turn
    made.trained[0] = False
    return made if any(made.trained) else None


def _turns(
    items: list[dict[str, Any]],
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    template: Template,
    *,
    without_logprobs: bool,
) -> list[Turn]:
    """The turns whose tokens matter: choices as they were sampled, and messages that are to be trained on."""
    turns = []
    for at, item in enumerate(items):
        if is_choice(item):
            ids, logprobs = choice_tokens(item, template, at=at)
            if ids:
                trained = without_logprobs or bool(_entries(item))
                turns.append(Turn(at, ids, logprobs, trained))
                continue
        elif item["role"] != "assistant":
            continue
        if without_logprobs:
            ids = template.through_end(template.encode(template.answer(messages, tools, at)))
            if ids:
                turns.append(Turn(at, ids, [UNKNOWN] * len(ids), trained=True))
    return turns


def choice_tokens(choice: dict[str, Any], template: Template, *, at: int) -> tuple[list[int], list[float]]:
    """The tokens of a choice and their log-probabilities, both empty where the rollout did not record tokens."""
    entries = _entries(choice)
    logprobs = [_logprob(entry.get("logprob")) for entry in entries]
    recorded = choice.get("token_ids") or (choice.get("model_extra") or {}).get("token_ids")
    ids = list(recorded) if recorded else [_token_id(entry, template, at=at) for entry in entries]
    size = template.base.model.config.get_text_config().vocab_size
    if not all(isinstance(token, int) and 0 <= token < size for token in ids):
        raise TrainingError(
            f"the choice at position {at} has tokens outside the vocabulary of {template.base.spec.id} ({size}): "
            "was it sampled from another base model?"
        )
    if not logprobs or (len(logprobs) == len(ids) - 1 and ids[-1] in template.ends):
        logprobs += [UNKNOWN] * (len(ids) - len(logprobs))
    if len(logprobs) != len(ids):
        raise TrainingError(
            f"the choice at position {at} has {len(ids)} token_ids and {len(logprobs)} logprobs: "
            "they must be of one rollout"
        )
    return ids, logprobs


def _entries(choice: dict[str, Any]) -> list[dict[str, Any]]:
    logprobs = choice.get("logprobs") or {}
    return logprobs.get("content") or logprobs.get("refusal") or []


def _logprob(value: Any) -> float:
    known = isinstance(value, int | float) and math.isfinite(value) and value > LEAST_LOGPROB
    return float(value) if known else UNKNOWN


def _token_id(entry: dict[str, Any], template: Template, *, at: int) -> int:
    """The id of a token from its ``token_id:<n>`` name, else from its bytes, else from its text."""
    token = str(entry.get("token", ""))
    if token.startswith("token_id:") and token[9:].isdigit():
        return int(token[9:])
    written = entry.get("bytes")
    spellings = [bytes(written)] if written else []
    for spelling in [*spellings, token.encode()]:
        if spelling in template.vocabulary:
            return template.vocabulary[spelling]
    if token in (ids := template.tokenizer.get_vocab()):
        return int(ids[token])
    if not token and template.tokenizer.eos_token_id is not None:
        return int(template.tokenizer.eos_token_id)
    raise TrainingError(
        f"the choice at position {at} has a token {token!r} that {template.base.spec.id} does not know: "
        "sample with logprobs and return_token_ids, or return_tokens_as_token_ids"
    )


def tokenize_example(
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    template: Template,
    *,
    last_only: bool = False,
) -> History:
    """A whole conversation as its template writes it; what follows an assistant's header trains, end included."""
    text = template.render(messages, tools)
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    spans = [template.span(messages, tools, at, text) for at in (turns[-1:] if last_only else turns)]
    encoding = template.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoding["input_ids"], encoding["offset_mapping"]
    trained = [False] * len(ids)
    for start, stop in spans:
        inside = [place for place, (begins, _) in enumerate(offsets) if start <= begins < stop and place]
        ended = max(
            (place for place in inside if ids[place] in template.ends), default=max(inside, default=0)
        )
        for place in inside:
            trained[place] = place <= ended
    return History(ids=ids, trained=trained, logprobs=[UNKNOWN] * len(ids))
