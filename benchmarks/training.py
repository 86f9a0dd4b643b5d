"""Training in one process, the same tokens and LoRA settings for all: SFT against TRL, RL against HF + PEFT.

Where there is a GPU, in bf16 on it, by the clock; else on one CPU thread in fp32, by CPU second, so that a busy machine
slows nobody.

SFT: conversations of 200 tokens on the average and at most 1,024, in batches of eight. RL: eight answers to a prompt
four times their length. All models but the tiny one are Qwen3 with random weights. Each run is a process of its own,
taken in turns, and the better of two counts (tiny). TRL's best is packing with gradient checkpointing off; it lets
packed conversations see each other, which ours never does. The share of the peak counts 4 N FLOPs a token (forward, and
the gradient of activations: frozen weights have none), attention, and the vocabulary at trained tokens, against a
measured matmul.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measuring import Result

ROUNDS, RATE, PROMPT, ANSWER, ANSWERS = 2, 1e-4, 400, 100, 8
SIZES = {"tiny": (48, 12), "100M": (8, 2), "0.6B": (192, 12), "8B": (48, 4)}
"""Conversations of the SFT job, and gradient steps of the RL job, after those that warm up."""
SHAPES = {
    "100M": (32_000, 640, 16, 1920, 10, 5, 64),
    "0.6B": (151_936, 1024, 28, 3072, 16, 8, 128),
    "8B": (151_936, 4096, 36, 12288, 32, 8, 128),
}
"""Vocabulary, hidden size, layers, intermediate size, heads, key heads, head size; the last two are Qwen3's own."""
ON_CPU, ON_GPU = ("tiny", "100M"), ("0.6B", "8B")
SFT = ("ours", "trl default", "trl best")
RL = ("ours", "loop")


def measure() -> list[Result]:
    """Tokens a CPU second, and the peak of memory, of each way on each model."""
    import torch

    rows = []
    second = "second" if torch.cuda.is_available() else "CPU second"
    for model in ON_GPU if torch.cuda.is_available() else ON_CPU:
        for kind, ways in (("SFT", SFT), ("RL", RL)):
            found: dict[str, dict[str, float]] = {}
            for _ in range(ROUNDS if model == "tiny" else 1):
                for way in ways:
                    one = _run(model, kind, way)
                    if way not in found or one["speed"] > found[way]["speed"]:
                        found[way] = one
            ours = found["ours"]
            for way in ways[1:]:
                goal = ">= 2" if way == "trl best" else ">= 4" if way == "loop" else ""
                rows.append(
                    Result.of(
                        f"{kind}, {model}: tokens per {second}, {way}",
                        ours["speed"],
                        found[way]["speed"],
                        "",
                        goal,
                    )
                )
                rows.append(
                    Result.of(
                        f"{kind}, {model}: peak memory, {way}", ours["memory"], found[way]["memory"], "MB"
                    )
                )
                if kind == "SFT":
                    rows.append(
                        Result.of(
                            f"{kind}, {model}: loss of the first step, {way}",
                            ours["loss"],
                            found[way]["loss"],
                            "",
                        )
                    )
            share = f"{ours['flops'] / ours['peak']:.0%}"
            rows.append(Result(f"{kind}, {model}: share of the matmul peak", share, goal=">= 60%"))
    return rows


def _run(model: str, kind: str, way: str) -> dict[str, float]:
    command = [sys.executable, __file__, model, kind, way]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{model}, {kind}, {way}: {done.stderr[-2000:]}")
    told: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    sys.stderr.write(f"{model}, {kind}, {way}: {told}\n")
    return told


def lengths(count: int) -> list[int]:
    """Lengths of conversations: most are short, the longest has 1,024 tokens, the mean is about 200."""
    rng = random.Random(0)
    return [1024, *(min(1024, max(32, round(rng.lognormvariate(4.9, 0.7)))) for _ in range(count - 1))]


def conversations(count: int, vocabulary: int) -> list[tuple[list[int], int]]:
    """Token ids, and how many of them are the prompt: half."""
    rng = random.Random(1)
    return [([rng.randrange(4, vocabulary) for _ in range(size)], size // 2) for size in lengths(count)]


def load(model: str) -> Any:
    """A base model as the trainer loads it."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from tuneyard.settings import BaseModelSpec
    from tuneyard_host import bases

    if model == "tiny":
        return bases.load(BaseModelSpec(id="tuneyard/tiny", source="builtin:tiny"))
    vocabulary, hidden, layers, intermediate, heads, key_heads, size = SHAPES[model]
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=hidden, num_hidden_layers=layers, intermediate_size=intermediate,
        num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=size, tie_word_embeddings=model != "8B",
        dtype=torch.bfloat16 if torch.cuda.is_available() else torch.float32,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        made = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    tokenizer = bases.load(BaseModelSpec(id="tuneyard/tiny", source="builtin:tiny")).tokenizer
    return bases.Base(BaseModelSpec(id=model, source="."), made, tokenizer, 40_960, "")


def now() -> float:
    """Seconds: of the CPU, or by the clock when a GPU has done what it was told."""
    import torch

    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def ours(base: Any, kind: str, size: int) -> Iterator[tuple[int, float]]:
    """Tokens and loss of each step."""
    from tuneyard.configs import LoraSettings, RLConfig, SFTConfig
    from tuneyard_host.training import memory, rl, sft
    from tuneyard_host.training.adapters import learner_for
    from tuneyard_host.training.packing import History, pack
    from tuneyard_host.training.plans import Plan

    memory.keep_freed()  # as the trainer does when it starts
    learner = learner_for(base, LoraSettings())
    if kind == "SFT":
        rows = []
        made = [
            History(ids, [at >= prompt for at in range(len(ids))], [float("nan")] * len(ids))
            for ids, prompt in conversations(size + 8, base.model.config.vocab_size)
        ]
        for start in range(0, len(made), 8):
            rows.append(pack(made[start : start + 8], length=sft.MOST_ROW))
        tokens = [sum(len(h.ids) for h in made[start : start + 8]) for start in range(0, len(made), 8)]
        plan = Plan(len(rows), {}, 0, [{"trained_tokens": 1} for _ in made], [], rows)
        for count, told in zip(tokens, sft.steps(plan, learner, SFTConfig(), RATE), strict=True):
            yield count, told["loss"]
        return
    rows = []
    for ids, answers in rollouts(size + 1, base.model.config.vocab_size):
        histories = [
            History(
                ids + answer,
                [False] * PROMPT + [True] * ANSWER,
                [-5.0] * (PROMPT + ANSWER),
                (-1.0) ** at,
                1.0,
                0,
            )
            for at, answer in enumerate(answers)
        ]
        rows.append(pack(histories, length=8192))
    plan = Plan(len(rows), {}, 0, [{"trained_tokens": ANSWERS * ANSWER, "ratio": None}], [], rows)
    for told in rl.steps(plan, learner, RLConfig(), RATE):
        yield ANSWERS * (PROMPT + ANSWER), told["loss"]


def rollouts(count: int, vocabulary: int) -> list[tuple[list[int], list[list[int]]]]:
    """Prompts, each with its answers."""
    rng = random.Random(2)

    def drawn(size: int) -> list[int]:
        return [rng.randrange(4, vocabulary) for _ in range(size)]

    return [(drawn(PROMPT), [drawn(ANSWER) for _ in range(ANSWERS)]) for _ in range(count)]


def loop(base: Any, _kind: str, size: int) -> Iterator[tuple[int, float]]:
    """The usual loop: a padded batch through transformers and PEFT, and log-probabilities from whole logits."""
    import torch

    model = peft_model(base)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=RATE, betas=(0.9, 0.99), weight_decay=0.1)
    for ids, answers in rollouts(size + 1, base.model.config.vocab_size):
        batch = torch.tensor([ids + answer for answer in answers], device=base.model.device)
        logits = model(input_ids=batch, use_cache=False).logits[:, PROMPT - 1 : -1]
        new = logits.float().log_softmax(-1).gather(-1, batch[:, PROMPT:, None])[..., 0]
        advantage = torch.tensor([(-1.0) ** at for at in range(ANSWERS)], device=batch.device)[:, None]
        ratio = (new.detach() + 5.0).exp().clamp(0, 5)
        loss = -(ratio * advantage * new).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        yield ANSWERS * (PROMPT + ANSWER), float(loss.detach())


def peft_model(base: Any) -> Any:
    """The base model with PEFT's own LoRA."""
    import peft

    from tuneyard.configs import LORA_TARGETS

    return peft.get_peft_model(
        base.model, peft.LoraConfig(r=8, lora_alpha=16, target_modules=[*LORA_TARGETS], task_type="CAUSAL_LM")
    )


def trl(base: Any, way: str, size: int) -> Iterator[tuple[int, float]]:
    """TRL's SFTTrainer on the same tokens in the same order; it tells of its steps when all are done."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    made = conversations(size + 8, base.model.config.vocab_size)
    best = way == "trl best"
    data = Dataset.from_dict(
        {
            "input_ids": [ids for ids, _ in made],
            "completion_mask": [[int(at >= prompt) for at in range(len(ids))] for ids, prompt in made],
        }
    )

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.marks: list[float] = []
            self.losses: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.marks.append(now())

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self.marks.append(now())

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            self.losses += [float(logs["loss"])] if "loss" in logs else []

    clock, on_gpu = Clock(), torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        options = SFTConfig(
            output_dir=folder, per_device_train_batch_size=2 if best else 8, learning_rate=RATE, num_train_epochs=1,
            lr_scheduler_type="constant", adam_beta2=0.99, max_grad_norm=1.0, logging_steps=1, save_strategy="no",
            report_to="none", use_cpu=not on_gpu, bf16=on_gpu, max_length=1024, packing=best, completion_only_loss=True,
            gradient_checkpointing=not best, dataloader_pin_memory=False, disable_tqdm=True,
        )  # fmt: skip
        trainer = InOrder(
            model=peft_model(base),
            args=options,
            train_dataset=data,
            processing_class=base.tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    took = clock.marks[-1] - clock.marks[1]
    total = sum(len(ids) for ids, _ in made)
    first = sum(len(ids) for ids, _ in made[:8])
    warm = total / (len(clock.marks) - 1) if best else first
    yield round(warm), clock.losses[0]
    yield -round((total - warm) / took), clock.losses[-1]


def flops_per_second(base: Any, kind: str, speed: float) -> float:
    """What the model's own arithmetic of so many tokens a second comes to, shared prompts counted once."""
    config = base.model.config
    inner = sum(weight.numel() for weight in base.model.model.layers.parameters() if weight.ndim == 2)
    head = config.vocab_size * config.hidden_size
    heads = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    if kind == "RL":
        computed, trained = PROMPT + ANSWERS * ANSWER, ANSWERS * ANSWER
        seen = PROMPT * PROMPT / 2 + ANSWERS * ANSWER * (PROMPT + ANSWER / 2)
        given = ANSWERS * (PROMPT + ANSWER)
    else:
        sizes = lengths(SIZES["tiny"][0])
        computed = given = sum(sizes)
        trained, seen = computed / 2, sum(size * size / 2 for size in sizes)
    work = 4 * inner * computed + 4 * head * trained + 12 * heads * seen
    return float(work / given * speed)


def matmul_peak(model: Any) -> float:
    """FLOPs a second of a square matmul in the model's precision, the best of several."""
    import torch

    size = 2048 if model.device.type == "cpu" else 8192
    a, best = torch.randn(size, size, device=model.device, dtype=model.dtype), 0.0
    for _ in range(6):
        began = now()
        a @ a
        best = max(best, 2 * size**3 / (now() - began))
    return best


def child(model: str, kind: str, way: str) -> None:
    """One run: prints tokens a second after the first step, the first loss, and the peak of memory in MB."""
    import resource

    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    base = load(model)
    size = SIZES[model][kind == "RL"]
    if way.startswith("trl"):
        (_, loss), (negative, _) = trl(base, way, size)
        speed = float(-negative)
    else:
        began, tokens, loss = 0.0, 0, 0.0
        for number, (count, told) in enumerate((ours if way == "ours" else loop)(base, kind, size)):
            if number:
                tokens += count
            else:
                began, loss = now(), told
        speed = tokens / (now() - began)
    on_gpu = torch.cuda.is_available()
    told = {
        "speed": speed,
        "loss": loss,
        "memory": torch.cuda.max_memory_allocated() / 2**20
        if on_gpu
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "flops": flops_per_second(base, kind, speed),
        "peak": matmul_peak(base.model),
    }
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    child(*sys.argv[1:])
