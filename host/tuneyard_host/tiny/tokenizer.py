"""The tokenizer of `tuneyard/tiny`: byte-level BPE in which a word is the same tokens wherever it stands.

Spaces, newlines, digits and punctuation are cut apart before merging (but for the joints of JSON). That costs
more tokens than the usual leading-space words, and it lets so small a model copy words from its prompt.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCABULARY_SIZE = 2048
CONTEXT = 2048
END_OF_TURN = "<|im_end|>"
PADDING = "<|endoftext|>"
SPECIAL_TOKENS = [PADDING, "<|im_start|>", END_OF_TURN]
TOOL_TAGS = ["<tool_call>", "</tool_call>"]
PIECES = r"\": \"|\", \"|\p{L}+|\p{N}|\n| +|[^\S\n ]+|[^\s\p{L}\p{N}]+"
TEMPLATE = Path(__file__).with_name("template.jinja")


def train(texts: Iterable[str]) -> Tokenizer:
    """Learn the merges from the texts; every byte has a token, so any text can be written and read back."""
    tokenizer = Tokenizer(models.BPE())
    markers = re.compile("|".join(map(re.escape, [*SPECIAL_TOKENS, *TOOL_TAGS])))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE - len(TOOL_TAGS),
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((part for text in texts for part in markers.split(text)), trainer)
    # Not special, so that they survive decoding with skip_special_tokens and a server can parse the calls.
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TOOL_TAGS])
    return tokenizer


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
