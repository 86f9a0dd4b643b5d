"""Make `tuneyard/tiny` from nothing: corpus, tokenizer, pretraining, files and their digests.

``python -m tuneyard_host.tiny.make --out DIR --seed 0 --tokens 6500000``

The same seed and thread count on the same processor give the same bytes. A run that is cut off goes on from
``DIR/checkpoint.pt``; the finished folder is ready for ``from_pretrained``.
"""

import argparse
import hashlib
import logging
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.logging import RichHandler
from transformers import GenerationConfig, PreTrainedTokenizerFast

from tuneyard_host.tiny import corpus, evaluate, pretrain, tokenizer

DIGESTS = "SHA256SUMS"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def make_tokenizer(folder: Path, *, seed: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer on the first conversations of the corpus, or load the one that is there already."""
    if not (folder / "tokenizer.json").exists():
        blank = tokenizer.renderer()
        texts = (
            blank.apply_chat_template(one.messages, tools=one.tools, tokenize=False)
            for one in islice(corpus.conversations(seed, lessons=0), 15_000)
        )
        tokenizer.save(tokenizer.train(texts), folder)
    return tokenizer.load(folder)


def save_model(model: Any, folder: Path, tok: PreTrainedTokenizerFast) -> None:
    """Write weights in bf16, half the size; they load in any type."""
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, eos_token_id=tok.eos_token_id, pad_token_id=tok.pad_token_id
    )
    model.to(torch.bfloat16).save_pretrained(folder)


def digests(folder: Path) -> str:
    """The digests of the model's files in the format that ``sha256sum --check`` reads."""
    return "".join(f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in FILES)


def main() -> None:
    """Make the model and print its score table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=6_500_000)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[RichHandler(show_path=False)])
    torch.set_num_threads(options.threads)
    torch.use_deterministic_algorithms(True)

    tok = make_tokenizer(options.out, seed=options.seed)
    checkpoint = options.out / "checkpoint.pt"
    model = pretrain.run(tok, seed=options.seed, tokens=options.tokens, checkpoint=checkpoint)
    save_model(model, options.out, tok)
    (options.out / DIGESTS).write_text(digests(options.out))
    checkpoint.unlink(missing_ok=True)
    Console().print(evaluate.table(options.out))


if __name__ == "__main__":
    main()
