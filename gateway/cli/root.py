"""The command tree. Invariant: building it imports nothing but typer, so that ``--help`` is instant."""

from __future__ import annotations

import typer

from gateway.cli.code import app as code_app
from gateway.cli.credentials import keys
from gateway.cli.data import app as data_app
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
for _spec in (
    "gateway.cli.replay:replay",
    "gateway.cli.monitor:monitor",
    "gateway.scaffold:new",
    "gateway.scaffold:skill",
):
    if (_command := load_optional(_spec)) is not None:
        app.command()(_command)
if (_evaluate := load_optional("gateway.cli.evaluate:evaluate")) is not None:
    policies_app.command("eval")(_evaluate)
if (_export := load_optional("gateway.cli.swarm_export:export")) is not None:
    swarm_app.command()(_export)
app.add_typer(code_app, name="code")
app.add_typer(config_app, name="config")
app.add_typer(keys, name="keys")
app.add_typer(swarm_app, name="swarm")
app.add_typer(models_app, name="models")
app.add_typer(policies_app, name="policies")
app.add_typer(data_app, name="data")
for _name in ("hooks", "groups", "research"):
    if (_group := load_optional(f"gateway.cli.{_name}:app")) is not None:
        app.add_typer(_group, name=_name)


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
