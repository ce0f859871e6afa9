"""The command tree. Invariant: building it imports nothing but typer, so that ``--help`` is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.code import app as code_app
from gateway.cli.credentials import keys
from gateway.cli.data import app as data_app
from gateway.cli.groups import app as groups_app
from gateway.cli.hooks import app as hooks_app
from gateway.cli.job_config import app as config_app
from gateway.cli.models import app as models_app
from gateway.cli.policies import app as policies_app
from gateway.cli.serve import serve
from gateway.cli.swarm import app as swarm_app
from gateway.cli.up import train, up
from swarm.packs import load_optional

# rich is slow to import, so help is plain text; a traceback is for defects only and stays Python's own
app = typer.Typer(
    name="swarm-gateway",
    help="Point an LLM app's base_url here: it is served like by vLLM, and its model learns from every request.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(up)
app.command()(train)
app.command()(serve)
for _spec in ("gateway.cli.replay:replay", "gateway.cli.monitor:monitor"):
    if (_command := load_optional(_spec)) is not None:
        app.command()(_command)
if (_evaluate := load_optional("gateway.cli.evaluate:evaluate")) is not None:
    policies_app.command("eval")(_evaluate)
app.add_typer(code_app, name="code")
app.add_typer(config_app, name="config")
app.add_typer(keys, name="keys")
app.add_typer(swarm_app, name="swarm")
app.add_typer(models_app, name="models")
app.add_typer(hooks_app, name="hooks")
app.add_typer(groups_app, name="groups")
app.add_typer(policies_app, name="policies")
app.add_typer(data_app, name="data")
if (_research := load_optional("gateway.cli.research:app")) is not None:
    app.add_typer(_research, name="research")


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="name of the agent, e.g. polite_agent")],
    into: Annotated[Path, typer.Option(help="folder in which opencode_build_NAME is made")] = Path(),
) -> None:
    """Make a folder with the two hook files, mock users, data and a configuration; all of it runs as it is."""
    from gateway.scaffold import scaffold

    made = scaffold(name, into)
    typer.echo(f"{made}: edit on_compute_relative_reward.py, then")
    typer.echo(f"  swarm-gateway hooks test {made} --data {made / 'groups.jsonl'}")
    typer.echo(f"  swarm-gateway up {made / 'config.yaml'}")


@app.command()
def skill(
    out: Annotated[
        Path | None, typer.Option(help="write build-agent/SKILL.md into this folder of skills, e.g. .claude/skills")
    ] = None,
) -> None:
    """Print the skill with which a coding agent makes such a folder from a user's wish."""
    from gateway.scaffold import skill as text
    from gateway.scaffold import write_skill

    typer.echo(text() if out is None else f"{write_skill(out)}: the skill build-agent", nl=out is not None)


def _version(asked: bool) -> None:
    if asked:
        from swarm import __version__

        typer.echo(f"swarm-gateway {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """The options before the command."""
