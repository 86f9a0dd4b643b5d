"""A step in parts: as many processes, or as small pieces, as the machine asks for, and always the same training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from test_training_rl import groups, train  # noqa: F401  a fixture
from test_training_sft import LINES
from test_training_sft import train as train_sft
from training_fixtures import base, files, histories, learner, one_thread  # noqa: F401  fixtures
from tuneyard.errors import TrainingError
from tuneyard.trajectories import TrajectoryGroup
from tuneyard_host.training import parts as training_parts
from tuneyard_host.training import rl, sft
from tuneyard_host.training.adapters import ADAPTER, Learner
from tuneyard_host.training.packing import Row, build_row, pack
from tuneyard_host.training.parts import Room, split, whole

ROOT = Path(__file__).parent.parent


def a_row(seed: int) -> Row:
    """Eight histories on two prompts, in one row."""
    (row,) = pack(histories([(0, 9), (1, 9)] * 4, prompts=[24, 24], seed=seed), length=10_000)
    return row


@pytest.mark.parametrize("ways", [1, 2, 3, 5, 20])
@pytest.mark.parametrize("seed", range(3))
def test_the_parts_of_a_row_are_its_histories_once_each_and_in_order(seed: int, ways: int):
    row = a_row(seed)
    parts = split(whole(row), ways)

    assert [h.ids for part in parts for h in part.row.histories] == [h.ids for h in row.histories]
    assert len(parts) == min(ways, len(parts)) and all(part.row.histories for part in parts)
    assert torch.equal(sum(part.where.int() for part in parts), torch.ones(row.num_trained, dtype=torch.int))
    for part in parts:
        for name in ("targets", "logprobs", "advantages", "weights"):
            assert torch.equal(getattr(part.row, name), getattr(row, name)[part.where]), name


def test_a_part_of_a_part_knows_its_place_in_the_whole():
    row = a_row(0)
    second = split(whole(row), 2)[1]
    for part in split(second, 2):
        assert torch.equal(part.row.targets, row.targets[part.where])
        assert not (part.where & ~second.where).any()


def short_of_memory(monkeypatch: pytest.MonkeyPatch, *, most: int, where: Any) -> list[int]:
    """Rows of more than so many tokens find no memory; the sizes of those that were computed."""
    computed: list[int] = []
    right = where.of_row

    def of_row(model: Any, row: Row, *, chunk: int) -> tuple[Tensor, Tensor]:
        if len(row.ids) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        computed.append(len(row.ids))
        return right(model, row, chunk=chunk)

    monkeypatch.setattr(where, "of_row", of_row)
    return computed


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kl_penalty_coef": 0.2},
        {"precalculate_logprobs": True},
        {"importance_sampling_level": "sequence"},
    ],
    ids=str,
)
def test_where_memory_runs_out_halves_train_the_same(
    learner: Learner,
    files: dict[str, bytes],
    groups: list[TrajectoryGroup],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
):
    (usual,) = train(learner, groups, rate=0.0, **options)
    wanted = {name: value.clone() for name, value in learner.gradients().items()}
    learner.load(files, with_optimizer=False)
    computed = short_of_memory(monkeypatch, most=usual_longest(groups, learner), where=rl)
    (halved,) = train(learner, groups, rate=0.0, **options)

    assert len(computed) > 2
    for name in ("loss", "grad_norm", "entropy", "num_trainable_tokens", "x/ratio_mean"):
        assert halved[name] == pytest.approx(usual[name], rel=1e-5), name
    for name, value in learner.gradients().items():
        assert float((value - wanted[name]).norm()) <= 2e-5 * float(wanted[name].norm()), name


def usual_longest(groups: list[TrajectoryGroup], learner: Learner) -> int:
    """Tokens of half the row that these groups make."""
    from tuneyard.configs import RLConfig

    ((row,),) = rl.plan(groups, learner.base, RLConfig(), seed=0).rows
    return len(row.ids) // 2


def test_a_batch_that_does_not_fit_is_halved_too(
    learner: Learner, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
):
    (usual,) = train_sft(learner, LINES, batch_size=5)
    after = learner.files()
    learner.load(files, with_optimizer=False)
    computed = short_of_memory(monkeypatch, most=60, where=sft)
    (halved,) = train_sft(learner, LINES, batch_size=5)

    assert len(computed) > 2
    assert halved["loss"] == pytest.approx(usual["loss"], rel=1e-5)
    assert halved["grad_norm"] == pytest.approx(usual["grad_norm"], rel=1e-5)
    assert learner.files()[ADAPTER] != files[ADAPTER] and len(learner.files()) == len(after)


def test_one_conversation_that_does_not_fit_ends_the_job_with_the_number_to_set(
    learner: Learner,
    groups: list[TrajectoryGroup],
    monkeypatch: pytest.MonkeyPatch,
):
    short_of_memory(monkeypatch, most=4, where=rl)
    with pytest.raises(TrainingError, match=r"A conversation of \d+ tokens .* packed_sequence_length to \d+"):
        train(learner, groups)


def test_a_bug_is_not_taken_for_a_lack_of_memory():
    with pytest.raises(RuntimeError, match="shapes"):
        Room().attempt([a_row(0)], lambda _: (_ for _ in ()).throw(RuntimeError("shapes do not match")))


def test_what_was_learnt_about_memory_is_kept_for_the_next_row():
    row, room, tried = a_row(0), Room(), []

    def compute(parts: list[list[training_parts.Part]]) -> None:
        sizes = [len(part.row.ids) for part in parts[0]]
        tried.append(sizes)
        if max(sizes) > len(row.ids) * 0.6:
            raise MemoryError

    room.attempt([row], compute)
    room.attempt([row], compute)

    assert len(tried[0]) == 1
    assert tried[-1] == tried[-2] and len(tried[-1]) > 1


JOB = """
import json, sys, torch
sys.path[:0] = {paths!r}
from pathlib import Path
torch.set_num_threads(1)
from tuneyard.configs import RLConfig, SFTConfig
from tuneyard.trajectories import TrajectoryGroup
from tuneyard.settings import BaseModelSpec
from tuneyard_host import bases
from tuneyard_host.training import rl, sft, world
from tuneyard_host.training.adapters import learner_for
from training_fixtures import LORA

out, sharded = Path(sys.argv[1]), sys.argv[2] == "sharded"
world.join()
base = bases.load(BaseModelSpec(id="tuneyard/tiny", source="builtin:tiny"))
groups = [TrajectoryGroup(**one) for one in json.loads((out / "groups.json").read_text())]
files = {{name: (out / name).read_bytes() for name in ("adapter_model.safetensors", "adapter_config.json")}}
learner = learner_for(base, LORA)
if sharded:
    world.shard(base.model)
told = []
learner.load(files, with_optimizer=False)
for options in ({{"packed_sequence_length": 90}}, {{"kl_penalty_coef": 0.1, "precalculate_logprobs": True}}):
    config = RLConfig(**options)
    told += rl.steps(rl.plan(groups, base, config, seed=1), learner, config, 1e-4)
config = SFTConfig(learning_rate=1e-4, batch_size=3)
plan = sft.plan(sft.read_examples((out / "lines.jsonl").read_bytes().splitlines()), base, config, seed=1)
told += sft.steps(plan, learner, config)
made = learner.files()
if world.rank() == 0:
    (out / "told.json").write_text(json.dumps(told))
    for name, body in made.items():
        (out / f"made-{{name}}").write_bytes(body)
world.leave()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "how"), [(2, "whole"), (2, "sharded"), (3, "whole")])
def test_several_processes_train_what_one_trains(
    tmp_path: Path,
    groups: list[TrajectoryGroup],
    files: dict[str, bytes],
    processes: int,
    how: str,
):
    from safetensors.torch import load

    script = tmp_path / "job.py"
    paths = [str(ROOT / part) for part in ("layers/core", "host", "tests")]
    script.write_text(JOB.format(paths=paths))
    found = {}
    for number in (1, processes):
        out = tmp_path / str(number)
        out.mkdir()
        (out / "groups.json").write_text(json.dumps([one.model_dump(mode="json") for one in groups]))
        (out / "lines.jsonl").write_bytes(b"\n".join(LINES))
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            (out / name).write_bytes(files[name])
        run = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
        run += [f"--nproc-per-node={number}", str(script), str(out), how]
        done = subprocess.run(
            run, capture_output=True, text=True, timeout=200, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found[number] = (
            json.loads((out / "told.json").read_text()),
            load((out / "made-adapter_model.safetensors").read_bytes()),
        )

    (alone, adapter), (together, theirs) = found[1], found[processes]
    assert len(alone) == len(together) > 4
    for one, other in zip(alone, together, strict=True):
        assert other["num_trainable_tokens"] == one["num_trainable_tokens"]
        for name in ("loss", "grad_norm", "entropy"):
            assert other[name] == pytest.approx(one[name], rel=1e-5, abs=1e-7), name
    assert adapter.keys() == theirs.keys()
    started = load(files["adapter_model.safetensors"])
    moved = sum(float((adapter[name] - started[name]).norm() ** 2) for name in adapter) ** 0.5
    apart = sum(float((adapter[name] - theirs[name]).norm() ** 2) for name in adapter) ** 0.5
    assert apart < 1e-3 * moved


def test_a_process_without_a_share_computes_nothing_that_counts(monkeypatch: pytest.MonkeyPatch):
    row = build_row([a_row(0).histories[0]], [0])
    monkeypatch.setattr(training_parts.world, "size", lambda: 2)
    monkeypatch.setattr(training_parts.world, "rank", lambda: 1)

    (part,) = Room().parts(row)

    assert part.row.num_trained == 0 and not part.where.any()
