"""What would stop ``up`` and ``train`` later, found before they start anything.

Invariant: nothing is written and nothing stays behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gateway.cli.here import runs_of
from gateway.cli.sections import parse_server
from gateway.config.gateway import ONLY_ROUTE
from gateway.config.takeover import ServeConfig
from gateway.launch.plan import ServerPlan, UpPlan
from gateway.launch.run_folder import check_free
from gateway.launch.servers import check_earlier
from gateway.launch.up import check_ports
from swarm.checkpoints import check_kept, checkpoint_folder, saved_step
from swarm.errors import ConfigError, EngineError
from swarm.importer import load_attribute


def check_plan(plan: UpPlan, *, only: bool = False) -> list[str]:
    """Whether this machine can run ``plan``: its packages, devices, lengths, keys of verl, ports and run folders.

    Args:
        plan: what is to run.
        only: nothing is started after this. Else ports are checked by ``up`` itself, once what an earlier one has left
            there is gone.

    Returns:
        Warnings: what does not stop it.

    Raises:
        ConfigError: what would stop it, and what to do.
    """
    for server in plan.servers:
        _check_job(server)
    # this file's own run has its ports and its folder
    if plan.file is None or plan.file.resolve() not in {run.file and run.file.resolve() for run in runs_of(plan.file)}:
        if only:
            check_ports(plan)
        for server in plan.servers:
            _check_run_folder(server, plan)
    return [*_not_downloaded(plan), *_lacking_space(plan), *_unsaved(plan), *_unknown_routes(plan)]


def _check_job(server: ServerPlan) -> None:
    config = parse_server(server.swarm_section, "swarm", None)
    load_attribute("swarm.server.auth:check_exposure")(config)
    check = load_attribute("swarm.server.engine.changes:check_job")
    try:
        # a machine too busy to tell lets the server decide, which checks the job again
        with suppress(EngineError):
            asyncio.run(check(config, server.job))
    except ConfigError as exc:
        raise ConfigError(f"{server.of('the job')}: {exc.message}", param=exc.param) from exc


def _check_run_folder(server: ServerPlan, plan: UpPlan) -> None:
    check_free(server.run_dir)
    fresh = plan.earlier_run == "fresh"
    if fresh and plan.file is not None and plan.file.parent.resolve().is_relative_to(server.run_dir):
        raise ConfigError(
            f"--fresh would rename {server.run_dir}, which holds {plan.file.name}: set swarm.run_dir to a folder of "
            "its own"
        )
    if fresh or plan.earlier_run == "replace":
        return
    if plan.from_step is not None:
        check_kept(checkpoint_folder(server.job, server.run_dir), plan.from_step)
    ran, saved = None, plan.from_step or saved_step(server.job, server.run_dir)
    done = saved
    try:
        ran, steps = load_attribute("swarm.server.journal.browse:last_run")(server.run_dir / "journal.db")
        done = max(done, steps)
    except ConfigError as exc:
        if exc.code != "no_journal":
            raise
    if done:
        check_earlier(server, ran, done, saved, changes_allowed=plan.earlier_run == "resume")


def _not_downloaded(plan: UpPlan) -> Iterator[str]:
    """Each model of a hub that is not on this machine."""
    models = [server.job.model for server in plan.servers] + [incumbent.model for incumbent in plan.incumbents]
    weight_bytes = load_attribute("adapters.models:weight_bytes")
    for model in dict.fromkeys(models):
        if not Path(model).is_dir() and not weight_bytes(model):
            yield f"{model} is not on this machine: the boot downloads it, unless `hf download {model}` did so before"


def _lacking_space(plan: UpPlan) -> Iterator[str]:
    for job, run_dir in ((server.job, server.run_dir) for server in plan.servers if server.job.checkpoint_every):
        folder, of_run = checkpoint_folder(job, run_dir), load_attribute("adapters.verl.checkpoints:Checkpoints")
        kept = of_run(folder, job.keep_checkpoints, Path(job.model), with_adapter=job.lora is not None)
        if lacking := kept.lacking():
            yield f"there is no room for a checkpoint: {lacking}; free some, or set job.checkpoint_dir"


def _unknown_routes(plan: UpPlan) -> Iterator[str]:
    """Each route of which less is to be kept, and that the gateway does not have: a misspelt name keeps everything."""
    if (section := plan.gateway_section) is None:
        return
    names = [route["name"] for route in section.get("routes") or ()] or [ONLY_ROUTE]
    parts = {server.of("swarm"): server.swarm_section for server in plan.servers}
    for where, part in (parts | {"gateway.request_log": section.get("request_log") or {}}).items():
        for name in part.get("keep_routes") or ():
            if name not in names:
                yield f"{where}.keep_routes: there is no route {name!r}; there is {', '.join(map(repr, names))}"


def _unsaved(plan: UpPlan) -> Iterator[str]:
    """Each route on which a version may be promoted that no checkpoint keeps."""
    section = plan.gateway_section or {}
    for route in section.get("routes") or [section]:
        settings = section | route
        if not settings.get("serve") or "swarm_url" in settings:
            continue
        name, gate = settings.get("name", "default"), ServeConfig.model_validate(settings["serve"]).gate
        job, trial = plan.server_of(name).job, gate.trial_every
        if trial is None or gate.mode == "never" or (job.checkpoint_every and trial % job.checkpoint_every == 0):
            continue
        override = job.flat_overrides.get("trainer.save_freq")
        # the override wins over the field
        saves, setting = f"job.save_freq is {job.save_freq}", "job.save_freq"
        if override is not None:
            saves, setting = f"job.overrides has trainer.save_freq {override}", "that"
        yield (
            f"route {name}: gate.trial_every is {trial} and {saves}, so a version that is promoted may have no "
            f"checkpoint to keep: set {setting} to {trial}, or to a number that divides {trial}"
        )
