"""What ``tuneyard up`` shows to a person."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuneyard_host.local.up import Running

_READY = """\
  base URL        {base_url}
  inference URL   {inference_url}
  API key         {api_key}
  team            {team}
  state, logs     {state}

  ART      from art.serverless.backend import ServerlessBackend
           backend = ServerlessBackend(api_key="{api_key}", base_url="{base_url}/v1")

  openai   from openai import OpenAI
           client = OpenAI(api_key="{api_key}", base_url="{inference_url}")

  curl     curl {inference_url}/chat/completions -H "Authorization: Bearer {api_key}" \\
             -H "Content-Type: application/json" \\
             -d '{{"model": "tuneyard/tiny", "messages": [{{"role": "user", "content": "What is 2 + 2?"}}]}}'
"""


def say(sentence: str) -> None:
    """Tell a person something, on stderr."""
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()


def show(running: Running, state: Path) -> None:
    """The screen of a service that is ready: addresses, key, and lines to paste."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    console.print(Text("\nTuneyard is ready.", style="bold green"), Text("Ctrl-C ends it.\n", style="dim"))
    text = Text(_READY.format(**running._asdict(), state=state))
    text.highlight_regex(rf"{running.base_url}(/v1)?\b", style="cyan")
    text.highlight_words([running.api_key], style="yellow")
    text.highlight_regex(
        r"(?m)^  (base URL|inference URL|API key|team|state, logs|ART|openai|curl) ", style="bold"
    )
    console.print(text)
