"""Builds the server's configuration, a job with the path of its model, and the plans of ``up`` and ``train``.

Invariant: a relative path in a file is relative to that file.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError

from gateway.cli.output import import_from
from gateway.config.gateway import read_config
from gateway.train import TrainFile, TrainPlan, train_plan
from gateway.up import PRIVATE_TOKEN_VARIABLE, TOKEN_VARIABLE, UpPlan
from swarm.errors import ConfigError
from swarm.importer import load_attribute
from swarm.job import TrainJob, describe_validation, parse_job, read_mapping

#: fields of ``ServerConfig`` that the environment gives where the file does not
_FROM_ENVIRONMENT = {
    "token": TOKEN_VARIABLE,
    "private_token": PRIVATE_TOKEN_VARIABLE,
    # for servers that have no file: SwarmClient(auto_start_swarm_server=True)
    "allow_code_sync": "SWARM_ALLOW_CODE_SYNC",
}
_BOOT_MARGIN = 30.0


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
    settings = {**given, **settings}
    try:
        return config_class.model_validate(settings)
    except ValidationError as exc:
        raise describe_validation(exc, where, config_class) from exc


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
        ConfigError: a missing section, a misspelt key, a model or a hooks folder that is not there.
    """
    data = read_mapping(path, "config")
    unknown = [name for name in data if name not in ("job", "swarm", "gateway")]
    if unknown or "job" not in data or "gateway" not in data:
        wrong = f"unknown section {unknown[0]!r}" if unknown else "a section is missing"
        raise ConfigError(f"{path}: {wrong}; it has job (model, ...), gateway (hooks, ...) and, if needed, swarm")
    plan = _server_plan(path, data)
    gateway = _section(path, data, "gateway")
    parsed = read_config(gateway, where=f"{path}, gateway", folder=path.parent.resolve())
    gateway["hooks"] = parsed.hooks
    load_attribute("reward_hooks.loader:load_hooks")(parsed.hooks)
    return replace(plan, gateway_section=gateway, addresses=(*plan.addresses, (parsed.host, parsed.port)))


def read_train(path: Path) -> TrainPlan:
    """What ``train`` runs, from its file, with the workflow loaded and the first tasks read before anything starts.

    Raises:
        ConfigError: a misspelt key, a model that is not there, a workflow that does not load, tasks that cannot be
            read.
    """
    data = read_mapping(path, "config")
    try:
        file = TrainFile.model_validate(data)
    except ValidationError as exc:
        raise describe_validation(exc, str(path), TrainFile) from exc
    return train_plan(file, _server_plan(path, data), path.parent.resolve())


def _section(path: Path, data: dict[str, Any], name: str) -> dict[str, Any]:
    section = data.get(name) or {}
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: {name} must be a mapping, got {type(section).__name__}")
    return dict(cast("dict[str, Any]", section))


def _server_plan(path: Path, data: dict[str, Any]) -> UpPlan:
    """The swarm server and the engine of the sections ``job`` and ``swarm``, without a gateway."""
    folder = path.parent.resolve()
    import_from(folder)
    job = resolve_job(parse_job(yaml.safe_dump(_section(path, data, "job")), where=f"{path}, job"), folder)
    section = _section(path, data, "swarm")
    server = parse_server(section, f"{path}, swarm", folder)
    run_dir = (folder / server.run_dir).resolve()
    return UpPlan(
        job=job,
        swarm_section={**section, "run_dir": str(run_dir)},
        gateway_section=None,
        run_dir=run_dir,
        addresses=((server.host, server.port),),
        module_folder=folder,
        token=server.token,
        # the server gives up first and knows why
        boot_timeout=server.boot_timeout + _BOOT_MARGIN,
    )
