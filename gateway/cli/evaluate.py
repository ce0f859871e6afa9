"""``swarm-gateway policies eval``: held-out prompts on two versions of a run, and which of them is better."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.here import run_folder
from gateway.cli.kept import Version
from gateway.cli.output import print_json, prints_to_stderr
from gateway.cli.target import AsJson, RunDir
from swarm.errors import ConfigError
from swarm.importer import load_attribute

if TYPE_CHECKING:
    from gateway.reports.report import Report


def evaluate(
    version: Version,
    data: Annotated[str, typer.Option("--data", "-d", help="held-out prompts, as `replay` reads them")],
    hooks: Annotated[
        str,
        typer.Option(
            help="hook folder, blend file, name, or module:attribute that judges both versions' answers to a prompt in "
            "one call, shuffled"
        ),
    ],
    against: Annotated[
        int, typer.Option(min=0, help="the step to compare with; 0: the model that the run began with")
    ] = 0,
    answers: Annotated[int, typer.Option(min=1, help="of each version to each prompt")] = 1,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="of an answer; default: as in training")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="requests at once")] = 4,
    vllm: Annotated[
        list[str] | None,
        typer.Option(
            help="one more argument for vLLM, such as --vllm=--gpu-memory-utilization=0.3 beside a run; may be repeated"
        ),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="folder for report.json; the answers of each version are below it")
    ] = None,
    run_dir: RunDir = None,
    as_json: AsJson = False,
) -> None:
    """Answer held-out prompts with a kept version and with another one, and say which is better, prompt by prompt.

    Each is served on this machine by a vLLM of its own, one after the other; a run may go on meanwhile. What is found
    stays with the version: `policies show` and the model card of an export say it.
    """
    import asyncio

    from gateway.launch.versions import label_of, served, written
    from gateway.replay.bar import replay_bar
    from gateway.replay.compare import scored
    from gateway.replay.run import ALL_SENT, make_config, replay
    from gateway.replay.senders import HttpSender
    from gateway.reports.printing import make_folder, print_report, write_report
    from gateway.views.format import printable
    from reward_hooks import load_hooks
    from swarm.checkpoints import check_kept, checkpoint, checkpoint_folder, score_of
    from swarm.concurrency import ends_by_signals
    from swarm.data import epochs_of

    if version == against:
        raise ConfigError(f"step {version} is compared with itself: name another one by --against")
    if report is not None:
        make_folder(report)
    run_dir = run_folder(run_dir)
    job, _ = load_attribute("swarm.server.journal.lineage:latest_job")(run_dir / "journal.db")
    checkpoints = checkpoint_folder(job, run_dir)
    for step in filter(None, (version, against)):
        check_kept(checkpoints, step)
    batch = str(score_of(checkpoint(checkpoints, version)).get("batch_id") or "")
    with prints_to_stderr():
        judge = load_hooks(hooks)
    # before a model is served for them
    next(epochs_of(data, 0))

    def replayed(step: int, model: str) -> Report:
        name = label_of(step)
        config = make_config(
            data=data,
            target=f"{name} of {run_dir}",
            model=name,
            label=name,
            concurrency=concurrency,
            epochs=answers,
            no_train=True,
        )

        async def send_all(base_url: str) -> Report:
            body = {"model": name} | ({} if max_tokens is None else {"max_tokens": max_tokens})
            async with HttpSender(base_url, "", body) as sender:
                with replay_bar(visible=not as_json) as bar:
                    return await replay(config, sender, None, bar)

        if not as_json:
            typer.echo(f"{name}: is served, which takes a while", err=True)
        with served(model, run_dir, job, step, vllm or ()) as base_url:
            replay_report = asyncio.run(send_all(base_url))
        if report is not None:
            # before it is judged: a hook that fails loses no answers
            write_report(replay_report, report / name.replace(" ", "-"))
        if replay_report.interrupted:
            raise typer.Exit(130)
        failures = "; ".join(
            f"{failure.count} of {replay_report.requests} requests failed: {kind}: {failure.example}"
            for kind, failure in replay_report.failures.items()
        )
        if not replay_report.answered or replay_report.stopped_because != ALL_SENT:
            raise ConfigError(f"{name} did not answer: {failures or replay_report.stopped_because}")
        if failures:
            typer.echo(printable(f"{name}: {failures}"), err=True)
        return replay_report

    with ends_by_signals(), ExitStack() as models:
        # both are written first: a run that goes on may remove a version
        of_step = {step: models.enter_context(written(run_dir, job, step)) for step in (version, against)}
        earlier, later = replayed(against, of_step[against]), replayed(version, of_step[version])
    with prints_to_stderr():
        result = asyncio.run(scored(later, earlier, judge))
    if report is not None:
        write_report(result, report)
    if as_json:
        print_json(result.model_dump(mode="json"))
    else:
        print_report(result)
    if result.comparison is not None and result.comparison.prompts:
        load_attribute("swarm.server.journal.lineage:keep_comparison")(
            run_dir,
            version,
            batch=batch,
            earlier=earlier.label,
            data=result.data,
            hook=f"{Path(hooks).name} ({judge.code[:12]})" if judge.code else hooks,
            verdict=result.comparison.verdict,
        )
