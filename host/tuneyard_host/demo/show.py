"""What the demo shows: progress bars fed by events, tables, and the picture of the reward."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

console = Console(highlight=False)


def follow(title: str, events: Iterable[dict[str, Any]]) -> list[dict[str, float]]:
    """Show a job's progress until it ends; the metrics of its gradient steps."""
    steps: list[dict[str, float]] = []
    columns = [
        TextColumn("  {task.description}"), BarColumn(bar_width=28, complete_style="cyan", finished_style="green"),
        MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[said]}", style="dim"),
    ]  # fmt: skip
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=None, said="queued")
        for event in events:
            data = event["data"]
            match event["type"]:
                case "training_started":
                    progress.update(task, total=max(data["num_sequences"], 1), said="training")
                case "gradient_step":
                    steps.append(data)
                    progress.update(task, advance=1, said=f"loss {data['loss']:.3f}")
                case "training_ended":
                    progress.update(task, completed=max(len(steps), 1))
    return steps


def before_and_after(rows: list[tuple[str, str, str, str]]) -> None:
    """A table of questions with the answers before and after, and what was taught."""
    table = Table("question", "before", "after", box=None, padding=(0, 0, 0, 2), header_style="bold")
    for question, before, after, taught in rows:
        mark = "[green]✓[/]" if after == taught else "[red]✗[/]"
        table.add_row(question, f"[dim]{before}[/]", f"{mark} {after}")
    console.print(table)


def draw(rewards: list[float], spread: list[list[float]], target: float, file: Path) -> None:
    """Write the picture: the mean reward of each checkpoint's rollouts, and the share of each answer."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    mpl.rcParams |= {"font.family": "DejaVu Sans", "axes.spines.top": False, "axes.spines.right": False}
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 4), dpi=150, width_ratios=[3, 2], layout="constrained"
    )
    steps = range(len(rewards))
    left.axhline(target, color="#9aa5b1", linestyle=(0, (4, 4)), linewidth=1)
    left.annotate(
        f"goal {target:g}", (0, target), (0, 4), textcoords="offset points", color="#697586", fontsize=9
    )
    left.plot(
        steps, rewards, color="#0b7285", linewidth=2.4, marker="o", markersize=6, markerfacecolor="white"
    )
    left.set(xlabel="checkpoint (one RL job each)", ylabel="mean reward of 64 rollouts", ylim=(None, 1.02))
    left.xaxis.get_major_locator().set_params(integer=True)
    left.grid(axis="y", color="#e4e7eb", linewidth=0.8)
    left.set_title("Mean reward", loc="left", fontweight="bold")
    names, colours = (
        ("maybe · 1", "no · 0.75", "yes · 0.5", "else · 0"),
        ("#0b7285", "#66a5ad", "#c4dfe6", "#e4e7eb"),
    )
    right.stackplot(steps, list(zip(*spread, strict=True)), labels=names, colors=colours)
    right.set(xlabel="checkpoint", ylim=(0, 1), xlim=(0, max(len(rewards) - 1, 1)))
    right.xaxis.get_major_locator().set_params(integer=True)
    right.yaxis.set_major_formatter("{x:.0%}")
    right.legend(
        frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4, handlelength=1
    )
    right.set_title("What it answers", loc="left", fontweight="bold")
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.12, wspace=0.04)
    figure.suptitle("Reinforcement learning: “answer yes, no or maybe”", x=0.016, ha="left", fontsize=13)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file)
    plt.close(figure)
