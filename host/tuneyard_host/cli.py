"""The ``tuneyard`` command. What takes long to import is imported by the command that needs it."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from tuneyard_host.local.up import Running

app = typer.Typer(
    name="tuneyard", no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False,
    help="A serverless training API that you own: RL and SFT of LoRA adapters, and chat on every checkpoint.",
)  # fmt: skip
keys = typer.Typer(no_args_is_help=True, help="Teams' API keys.")
app.add_typer(keys, name="keys")

State = Annotated[Path, typer.Option(help="The folder that keeps everything.")]
Port = Annotated[
    int, typer.Option(help="The port of the API on 127.0.0.1; 0 takes a free one.", min=0, max=65535)
]
Fd = Annotated[int, typer.Option(help="The listening socket, opened by the process that starts this one.")]
DEFAULT_STATE = Path(".tuneyard")


@app.command()
def up(
    state: State = DEFAULT_STATE,
    port: Port = 8000,
    team: Annotated[str, typer.Option(help="The team that the first key belongs to.")] = "local",
    user: Annotated[str, typer.Option(help="The user that the first key belongs to.")] = "local",
    base_model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID=SOURCE[,OPTION=VALUE...]",
            help="One more base model on offer: a folder or Hugging Face id of a causal language model; with "
            "engine_url a vLLM server answers for it. Repeatable.",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one line of JSON when all is ready, and nothing else, on stdout."),
    ] = False,
) -> None:
    """Run the whole service on this machine, until Ctrl-C."""
    from tuneyard_host.local import screen
    from tuneyard_host.local.up import Options, up

    def announce(running: Running) -> None:
        if as_json:
            typer.echo(json.dumps(running._asdict()))
            sys.stdout.flush()
        else:
            screen.show(running, state)

    with _told_in_a_sentence():
        models = tuple(_base_model(text) for text in base_model or ())
        up(Options(state, port, team, user, models), announce=announce, say=screen.say)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the picture and its own stack are kept.")] = Path(
        "demo-out"
    ),
    base_url: Annotated[
        str | None, typer.Option(help="Use this running stack instead of one of its own.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="The key to that stack.")] = None,
) -> None:
    """Train by RL and by SFT through the public API, chat with the result, and end."""
    with _told_in_a_sentence():
        from tuneyard_host.demo import story

        story.run(out, base_url=base_url, api_key=api_key)


@app.command()
def trainer(
    name: Annotated[str | None, typer.Option(help="The worker's name; a fresh one by default.")] = None,
    lock: Annotated[
        Path | None, typer.Option(help="A file that only one worker of that name may hold.", dir_okay=False)
    ] = None,
    nproc: Annotated[
        int, typer.Option(help="Processes that train each job together, one for each GPU.", min=1)
    ] = 1,
    shard: Annotated[
        bool, typer.Option("--shard", help="Spread the base model over the processes (FSDP2).")
    ] = False,
) -> None:
    """Work on training jobs, one after the other, until SIGTERM.

    A worker that comes back under its old name takes up at once the job that it left; so a name must not be
    used by two at a time, and --lock makes sure of that on one machine.
    """
    with _told_in_a_sentence():
        from tuneyard_host.local import workers

        if nproc > 1:
            given = [("--name", name), ("--lock", lock)]
            options = [str(part) for pair in given if pair[1] is not None for part in pair]
            workers.train_together(nproc, options + ["--shard"] * shard)
        workers.train(name, lock, shard=shard)


@app.command()
def replay(
    job_id: Annotated[str, typer.Argument(help="The job's id.")], state: State = DEFAULT_STATE
) -> None:
    """Train a job again from its stored input, and say whether the same adapter comes out, bit for bit."""
    with _told_in_a_sentence():
        _enter(state)
        from tuneyard import table
        from tuneyard.errors import NotFound
        from tuneyard.records import Job
        from tuneyard_host.training import work

        job = table.get(Job, job_id)
        if job is None:
            raise NotFound(f"No training job {job_id!r}.")
        then, now = work.replay(job)
        same = then == now
        typer.echo(f"then {then}\nnow  {now}\n{'The same adapter.' if same else 'Another adapter.'}")
        raise typer.Exit(0 if same else 2)


@app.command()
def inference(
    port: Annotated[int, typer.Option(help="The port to serve on.")] = 8100,
    host: Annotated[str, typer.Option(help="The address to serve on.")] = "127.0.0.1",
    fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve chat on the base models and on every adapter, until SIGTERM."""
    from tuneyard_host.local import workers

    workers.infer(host, port, fd)


@app.command(hidden=True)
def emulator(fd: Fd, folder: Annotated[Path, typer.Option()]) -> None:
    """Serve the emulated AWS."""
    from tuneyard_host.local.emulator import serve

    serve(socket.socket(fileno=fd), folder)


@app.command(hidden=True)
def door(fd: Fd, access_log: Annotated[Path, typer.Option()]) -> None:
    """Serve the routes of every function."""
    from tuneyard_host.local.door import serve

    serve(socket.socket(fileno=fd), access_log=access_log)


@app.command(hidden=True)
def sender() -> None:
    """Match events with automations and send what is due."""
    from tuneyard_host.local.sender import serve

    serve()


@keys.command()
def create(
    team: Annotated[str, typer.Option(help="The team; it is made when there is none of that name.")],
    user: Annotated[str, typer.Option(help="Who will use the key.")],
    role: Annotated[Literal["admin", "member"], typer.Option(help="What the key may do.")] = "member",
    state: State = DEFAULT_STATE,
) -> None:
    """Make an API key and print it, the only time that it is shown.

    On a machine whose environment names a deployed stack (TUNEYARD_TABLE_NAME), the key is made there.
    """
    with _told_in_a_sentence():
        _enter(state)
        from tuneyard import teams
        from tuneyard.errors import Conflict
        from tuneyard.records import Role

        with suppress(Conflict):
            teams.create_team(team)
        typer.echo(teams.create_key(team=team, user=user, role=Role(role))[1])


@keys.command("list")
def list_(team: Annotated[str, typer.Option(help="The team.")], state: State = DEFAULT_STATE) -> None:
    """The keys of a team: id, user, role, and whether it was revoked."""
    with _told_in_a_sentence():
        _enter(state)
        from tuneyard import clock, table
        from tuneyard.records import ApiKey

        for key in table.listed(ApiKey, "by_team", team, limit=10_000):
            ended = f"revoked {clock.iso(key.revoked_at)}" if key.revoked_at else "valid"
            typer.echo(f"{key.id}  {key.user}  {key.role}  made {clock.iso(key.created_at)}  {ended}")


@keys.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="The key's id, as `keys list` shows it.")],
    team: Annotated[str, typer.Option(help="The team.")],
    state: State = DEFAULT_STATE,
) -> None:
    """End a key; requests with it are refused within a minute."""
    with _told_in_a_sentence():
        _enter(state)
        from tuneyard import teams

        teams.revoke_key(team, key_id)


def _enter(state: Path) -> None:
    from tuneyard_host.local import environment

    environment.enter_running(state)


def _base_model(text: str) -> dict[str, Any]:
    """``id=source[,option=value...]`` as a base model's settings."""
    from pydantic import ValidationError

    from tuneyard.settings import BaseModelSpec
    from tuneyard_host.local.folder import LocalError

    first, *rest = text.split(",")
    name, _, source = first.partition("=")
    options = dict(part.partition("=")[::2] for part in rest)
    try:
        if not name or not source or set(options) - set(BaseModelSpec.model_fields):
            raise ValueError
        folder = Path(source).expanduser()
        spec = BaseModelSpec(id=name, source=str(folder.absolute()) if folder.is_dir() else source, **options)
    except (ValidationError, ValueError) as error:
        raise LocalError(
            f"{text!r} does not name a base model: write --base-model ID=SOURCE[,OPTION=VALUE...]; the options are "
            f"{', '.join(sorted(set(BaseModelSpec.model_fields) - {'id', 'source'}))}."
        ) from error
    return spec.model_dump(exclude_none=True)


@contextmanager
def _told_in_a_sentence() -> Iterator[None]:
    """Turn what the person at the keyboard can put right into its sentence and exit code 1."""
    from tuneyard.errors import ApiError, TrainingError
    from tuneyard_host.local.folder import LocalError

    try:
        yield
    except (LocalError, ApiError, TrainingError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    app()
