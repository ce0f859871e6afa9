"""Builds the server's configuration, a job with the path of its model, and the plans of ``up`` and ``train``.

Invariant: a relative path in a file is relative to that file.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import yaml

from gateway.cli.output import import_from
from gateway.config.gateway import read_config, resolve_files
from gateway.launch.plan import ServerPlan, UpPlan
from gateway.launch.servers import TOKEN_VARIABLE
from gateway.launch.train import TrainFile, TrainPlan, train_plan
from gateway.launch.up import PRIVATE_TOKEN_VARIABLE
from reward_hooks import load_hooks
from swarm.errors import ConfigError, EngineError
from swarm.importer import load_attribute
from swarm.job import TrainJob, parse_job, read_mapping, validated

#: fields of ``ServerConfig`` that the environment gives where the file does not
_FROM_ENVIRONMENT = {
    "token": TOKEN_VARIABLE,
    "private_token": PRIVATE_TOKEN_VARIABLE,
    # for servers that have no file: SwarmClient(auto_start_swarm_server=True)
    "allow_code_sync": "SWARM_ALLOW_CODE_SYNC",
}
_BOOT_MARGIN = 30.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def parse_server(settings: dict[str, Any], where: str, folder: Path | None) -> Any:
    """The swarm server's ``ServerConfig``; relative paths start from ``folder`` where one is given.

    The token defaults to the environment's ``SWARM_TOKEN``, ``allow_code_sync`` to ``SWARM_ALLOW_CODE_SYNC``.

    Raises:
        ConfigError: a misspelt key or a value out of range; names each.
    """
    config_class = load_attribute("swarm.server.config:ServerConfig")
    if folder is not None:
        files = {name: settings[name] for name in ("run_dir", "job_defaults") if settings.get(name) is not None}
        settings = settings | {name: str((folder / str(path)).resolve()) for name, path in files.items()}
    given = {name: os.environ[variable] for name, variable in _FROM_ENVIRONMENT.items() if os.environ.get(variable)}
    return validated(config_class, {**given, **settings}, where)


def resolve_job(job: TrainJob, folder: Path) -> TrainJob:
    """``job`` with its model resolved to a path (or a hub name), keeping the name it is served under.

    Raises:
        ConfigError: the model is not there; says what to do.
    """
    resolve = load_attribute("adapters.models:resolve_model")
    path = resolve(job.model, folder)
    return job.model_copy(update={"model": path, "served_model_name": job.model_name})


def read_plan(path: Path) -> UpPlan:
    """What ``up`` runs, from its file, every section validated before anything starts.

    Raises:
        ConfigError: a missing section, a misspelt key (of verl, too), a model or a hooks folder that is not there.
    """
    data = read_mapping(path, "config")
    known = ("jobs",) if "jobs" in data else ("job", "swarm")
    unknown = [name for name in data if name not in (*known, "gateway")]
    if unknown or known[0] not in data or "gateway" not in data:
        wrong = f"unknown section {unknown[0]!r}" if unknown else "a section is missing"
        raise ConfigError(
            f"{path}: {wrong}; it has job (model, ...), gateway (hooks, ...) and, if needed, swarm; or jobs (by name, "
            "each with job and swarm) and gateway"
        )
    gateway = _section(path, data, "gateway")
    if "jobs" in data:
        plan = _several(path, data)
        gateway["routes"] = _with_all_routes(gateway.get("routes") or [], [server.name for server in plan.servers])
    else:
        plan = _server_plan(path, data)
    parsed = read_config(gateway, where=f"{path}, gateway", folder=path.parent.resolve())
    for section, settings in ((gateway, parsed), *zip(gateway.get("routes") or [], parsed.routes, strict=True)):
        section["hooks"] = settings.hooks
    # the gateway reads its section from another folder
    resolve_files(gateway, path.parent.resolve())
    for hooks in {settings.hooks for settings in (parsed, *parsed.routes) if settings.hooks}:
        load_hooks(hooks)
    return replace(plan, gateway_section=gateway, addresses=(*plan.addresses, (parsed.host, parsed.port)))


def _several(path: Path, data: dict[str, Any]) -> UpPlan:
    """The swarm servers and the engines of ``jobs``; ports count from the usual one, run folders are ``runs/NAME``.

    Raises:
        ConfigError: a part is not valid, a name is no name of a folder, or two have one run folder.
    """
    first: int = load_attribute("swarm.server.config:DEFAULT_PORT")
    plans: list[UpPlan] = []
    for place, (name, part) in enumerate(_section(path, data, "jobs").items()):
        if not _NAME.fullmatch(name) or not isinstance(part, dict):
            raise ConfigError(f"{path}: jobs has names (letters, digits, - and _), each with job and swarm: {name!r}")
        sections = cast("dict[str, Any]", part)
        if unknown := [one for one in sections if one not in ("job", "swarm")]:
            raise ConfigError(f"{path}, jobs.{name}: unknown section {unknown[0]!r}; it has job and, if needed, swarm")
        plans.append(_server_plan(path, sections, name, {"port": first + place, "run_dir": f"runs/{name}"}))
    if not plans:
        raise ConfigError(f"{path}: jobs is empty; it has names, each with job and swarm")
    servers = tuple(plan.servers[0] for plan in plans)
    if len({server.run_dir for server in servers}) < len(servers):
        raise ConfigError(f"{path}: two jobs have one run folder; set run_dir in their swarm sections")
    return replace(plans[0], servers=servers, addresses=tuple(one for plan in plans for one in plan.addresses))


def _with_all_routes(given: Any, jobs: list[str]) -> Any:
    """The ``given`` routes of a gateway, and one for each of the ``jobs`` that has none."""
    try:
        named = {route["name"] for route in given}
    except (TypeError, KeyError):
        return given  # the gateway's own check says what is wrong
    return [*given, *({"name": name} for name in jobs if name not in named)]


def read_train(path: Path) -> TrainPlan:
    """What ``train`` runs, from its file, with the workflow loaded and the first tasks read before anything starts.

    Raises:
        ConfigError: a misspelt key (of verl, too), a model that is not there, a workflow that does not load, tasks
            that cannot be read.
    """
    data = read_mapping(path, "config")
    file = validated(TrainFile, data, str(path))
    return train_plan(file, _server_plan(path, data), path.parent.resolve())


def _section(path: Path, data: dict[str, Any], name: str) -> dict[str, Any]:
    section = data.get(name) or {}
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: {name} must be a mapping, got {type(section).__name__}")
    return dict(cast("dict[str, Any]", section))


def _server_plan(
    path: Path, data: dict[str, Any], name: str = "", defaults: Mapping[str, Any] = MappingProxyType({})
) -> UpPlan:
    """The swarm server and the engine of the sections ``job`` and ``swarm``, without a gateway."""
    folder = path.parent.resolve()
    import_from(folder)
    where = f"{path}, jobs.{name}." if name else f"{path}, "
    job = resolve_job(parse_job(yaml.safe_dump(_section(path, data, "job")), where=f"{where}job"), folder)
    section = {**defaults, **_section(path, data, "swarm")}
    server = parse_server(section, f"{where}swarm", folder)
    run_dir = (folder / server.run_dir).resolve()
    if job.overrides or server.job_defaults is not None:
        check = load_attribute("swarm.server.engine.changes:check_overrides")
        # a machine too busy to tell lets the server decide, which checks the job again
        with suppress(EngineError):
            asyncio.run(check(server.model_copy(update={"run_dir": run_dir}), job))
    # the server reads its section from another folder
    section["run_dir"] = str(run_dir)
    if server.job_defaults is not None:
        section["job_defaults"] = str(server.job_defaults)
    plan = ServerPlan(
        job=job,
        swarm_section=section,
        run_dir=run_dir,
        name=name,
        token=server.token,
        # the server gives up first and knows why
        boot_timeout=server.boot_timeout + _BOOT_MARGIN,
    )
    return UpPlan(servers=(plan,), gateway_section=None, addresses=((server.host, server.port),), module_folder=folder)
