"""Run the benchmarks and write RESULTS.md: each measures us against a peer in the same run; what counts is the ratio.

    python benchmarks/run.py [name ...]

A benchmark is a module with ``measure() -> list[Result]``; to add one, add its name to ``ALL``, or to ``NAMED`` when it
takes long and shall run only when it is named.
"""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from measuring import Result

HERE = Path(__file__).parent
ALL = ["imports", "handlers", "pages", "jobs", "training", "inference", "webhooks"]
NAMED = ["inference_100m", "vllm_door"]


def main(names: list[str]) -> None:
    """Measure, and replace the sections of RESULTS.md that were measured."""
    sections = _sections()
    for name in names or ALL:
        began, load = time.monotonic(), os.getloadavg()[0]
        module = importlib.import_module(name)
        results: list[Result] = module.measure()
        sections[name] = _section(name, module.__doc__ or "", results, time.monotonic() - began, load)
        sys.stdout.write(sections[name] + "\n")
        body = "\n".join(sections[name] for name in ALL + NAMED if name in sections)
        (HERE / "RESULTS.md").write_text(f"# Results\n\nWritten by `make bench`.\n\n{body}")


def _section(name: str, about: str, results: list[Result], seconds: float, load: float) -> str:
    commit = _output("git", "rev-parse", "--short", "HEAD")
    changed = (
        " with changes"
        if _output(
            "git", "status", "--porcelain", "--untracked-files=no", ":(top,exclude)benchmarks/RESULTS.md"
        )
        else ""
    )
    busy = ": other work was going on, so only ratios mean something" if load > 0.5 else ""
    lines = [
        f"## {name}",
        "",
        about.strip(),
        "",
        f"`python benchmarks/run.py {name}`, commit {commit}{changed}, {_machine()}, {seconds:.0f} s.",
        f"Load average when it began {load:.1f}{busy}.",
        "",
        "| | ours | peer | ratio | goal |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {r.what} | {r.ours} | {r.peer} | {r.ratio} | {r.goal} |" for r in results]
    return "\n".join(lines) + "\n"


def _sections() -> dict[str, str]:
    """The sections that are there already, so that one benchmark can be run alone."""
    path = HERE / "RESULTS.md"
    found: dict[str, str] = {}
    for part in (path.read_text() if path.exists() else "").split("\n## ")[1:]:
        found[part.split("\n", 1)[0]] = f"## {part.rstrip()}\n"
    return found


def _machine() -> str:
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return f"{_output('nproc')} x {cpu}, Python {platform.python_version()}"


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE).stdout.strip()


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main(sys.argv[1:])
