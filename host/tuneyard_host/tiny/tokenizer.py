"""The tokenizer of `tuneyard/tiny`: byte-level BPE in which a word is cut the same way wherever it stands.

Words are learned without the space before them. Then the commonest get a twin with the space, by merges that come
after all others: so a rare name is the same pieces after a space, a quote or a newline, which is what lets so small
a model copy it from its prompt, and a common word is still one token.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tuneyard_host.tiny import words

VOCABULARY_SIZE = 2048
TWINS = 600
CONTEXT = 2048
END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"
SPECIAL_TOKENS = [PADDING, "<|im_start|>", END_OF_TURN]
TOOL_TAGS = ["<tool_call>", "</tool_call>"]
JOINTS = r"\": \"|\": |\", \"| [-+*/=] |, \"|, (?=\p{N})"
REST = r"\p{N}|\n| +|[^\S\n ]+|[^\s\p{L}\p{N}]+"
WORDS_ALONE, WORDS_WITH_SPACE = rf"{JOINTS}|\p{{L}}+|{REST}", rf"{JOINTS}| ?\p{{L}}+|{REST}"
SPACE = "Ġ"
TEMPLATE = Path(__file__).with_name("template.jinja")


def train(texts: Iterable[str]) -> Tokenizer:
    """Learn the merges from the texts; every byte has a token, so any text can be written and read back."""
    markers = re.compile("|".join(map(re.escape, [*SPECIAL_TOKENS, *TOOL_TAGS])))
    parts = [part for text in texts for part in markers.split(text)]
    # Counted a hundred times over, so that the words of the closed lists become tokens before invented syllables.
    parts += [" ".join(["", *words.CLOSED])] * 100
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _cut(WORDS_ALONE)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - TWINS - len(TOOL_TAGS),
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(parts, trainer)
    tokenizer = _with_twins(
        tokenizer, Counter(chain.from_iterable(re.findall(r" ([A-Za-z]+)", one) for one in parts))
    )
    tokenizer.pre_tokenizer = _cut(WORDS_WITH_SPACE)
    # Not special, so that they survive decoding with skip_special_tokens and a server can parse the calls.
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TOOL_TAGS])
    return tokenizer


def _cut(pieces: str) -> Any:
    """Cut text into pieces that no merge may cross."""
    split = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _with_twins(tokenizer: Tokenizer, seen: Counter[str]) -> Tokenizer:
    """The tokenizer with one more token for each of the commonest whole words: the word after a space."""
    whole = json.loads(tokenizer.to_str())
    vocabulary, merges = whole["model"]["vocab"], whole["model"]["merges"]
    common = [word for word, _ in seen.most_common() if word in vocabulary][:TWINS]
    for word in common:
        vocabulary[SPACE + word] = len(vocabulary)
        merges.append([SPACE, word])
    return Tokenizer.from_str(json.dumps(whole))


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the three files that `AutoTokenizer.from_pretrained` reads, in every version of transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "pad_token": PADDING,
        "additional_special_tokens": ["<|im_start|>"],
        "model_max_length": CONTEXT,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())


def renderer() -> PreTrainedTokenizerFast:
    """A tokenizer that knows no words yet: enough to render the chat template for training the real one."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), chat_template=TEMPLATE.read_text()
    )


def load(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in a folder, with its chat template."""
    return PreTrainedTokenizerFast.from_pretrained(folder)
