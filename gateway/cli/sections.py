"""Builds the server's configuration, a job with the path of its model, and the plans of ``up`` and ``train``.

Invariant: a relative path in a file is relative to that file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gateway.cli.here import plain_address
from gateway.cli.output import import_from
from gateway.cli.parts import is_sectioned, jobs_in, part_of
from gateway.config.gateway import GatewayConfig, read_config, resolve_files
from gateway.config.route import RouteSettings
from gateway.config.takeover import OF_THE_JOB
from gateway.launch.plan import BesidePlan, IncumbentPlan, ServerPlan, SuccessionPlan, UpPlan
from gateway.launch.servers import TOKEN_VARIABLE, with_servers
from gateway.launch.succession import read_successors, with_successors
from gateway.launch.train import TrainFile, TrainPlan, train_plan
from gateway.launch.up import PRIVATE_TOKEN_VARIABLE
from swarm.checkpoints import checkpoint_folder
from swarm.errors import ConfigError
from swarm.http.serve import url_of
from swarm.importer import load_attribute
from swarm.job import TrainJob, layered, plain_fields
from swarm.kept_adapters import BASE, MOST_KEPT, adapter_folder, has_adapter, serves_kept
from swarm.validation import path_in, read_mapping, validated

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
        named = {name: settings[name] for name in ("run_dir", "job_defaults") if settings.get(name) is not None}
        settings = settings | {name: str(path_in(folder, str(path)).resolve()) for name, path in named.items()}
    variables = {name: os.environ[variable] for name, variable in _FROM_ENVIRONMENT.items() if os.environ.get(variable)}
    return validated(config_class, {**variables, **settings}, where)


def read_server(path: Path | None, flags: Mapping[str, Any]) -> Any:
    """The ``ServerConfig`` of a file, of one for ``up`` too; ``flags`` win over it.

    Raises:
        ConfigError: as for :func:`parse_server`, or the file cannot be read.
    """
    if path is None:
        return parse_server(dict(flags), "flags", None)
    part = part_of(path, "swarm")
    settings = {**part.settings, **flags}
    if "run_dir" in flags:
        # relative to here, not to the file
        settings["run_dir"] = str(Path(flags["run_dir"]).absolute())
    return parse_server(settings, part.where, path.parent)


def read_plan(path: Path) -> UpPlan:
    """What ``up`` runs, from its file, every section validated before anything starts.

    Raises:
        ConfigError: a missing section, a misspelt key, a model, a hooks folder or a suite that is not there.
    """
    data = read_mapping(path, "config")
    _check_sections(path, data)
    plan = _plan_of_servers(path, data)
    part, folder = part_of(path, "gateway"), path.parent.resolve()
    section = part.settings
    urls = {server.name: server.url for server in plan.servers}
    gateway = read_config(with_servers(section, urls, ""), where=part.where, folder=folder)
    # readable from any folder
    resolve_files(section, folder)
    # what it would refuse itself, once the servers run
    load_attribute("gateway.app:check")(gateway)
    plan = replace(plan, gateway_section=section, gateway_address=(gateway.host, gateway.port))
    return _with_incumbents(plan, gateway, folder)


def _with_incumbents(plan: UpPlan, gateway: GatewayConfig, folder: Path) -> UpPlan:
    """``plan`` with the incumbents that are models, of which routes with the same one share it; the routes that follow
    promotions; those whose incumbent is answered by the engine of their job; and the engines that these spare."""
    settings_of = dict(zip(gateway.route_names, gateway.routes or [gateway], strict=True))
    spared = {plan.server_of(name).name for name, settings in settings_of.items() if _is_answered(settings)}
    servers = tuple(replace(server, is_spared=server.name in spared) for server in plan.servers)
    plan = replace(plan, servers=servers)
    urls = {plain_address(server.url) for server in servers}
    routes, successions, beside = dict[IncumbentPlan, list[str]](), list[SuccessionPlan](), list[BesidePlan]()
    for name, settings in settings_of.items():
        if (serve := settings.serve) is None:
            continue
        server, incumbent = plan.server_of(name), serve.incumbent
        job = server.job
        served = IncumbentPlan("", "", incumbent.port, job.max_model_len, job.max_response_length, incumbent.vllm)
        if incumbent.is_beside:
            _check_beside(server, name, incumbent.version)
            kept = adapter_folder(server.run_dir, incumbent.version)
            beside.append(BesidePlan(name, serve.incumbent_name, kept))
        if incumbent.policy == "promoted":
            if plain_address(settings.swarm_url or "") not in urls:
                raise ConfigError(
                    f"the incumbent of the route {name} has policy: promoted, and its swarm_url is a server that `up` "
                    "does not run: no version of it can become the incumbent. Leave out policy, or swarm_url"
                )
            called = OF_THE_JOB if serves_kept(job) else job.model_name
            lingers = settings.sample_timeout_seconds
            successions.append(SuccessionPlan(name, server, called, serve.incumbent_name, served, lingers))
        if incumbent.model is not None:
            resolved = load_attribute("adapters.models:resolve_model")(incumbent.model, folder)
            routes.setdefault(replace(served, model=resolved, name=incumbent.model), []).append(name)
    for server in servers:
        folders = {kept.folder for kept in beside} - {adapter_folder(server.run_dir, BASE)}
        follow = sum(succession.server is server and succession.beside for succession in successions)
        # one more while a version succeeds another
        if sum(folder.is_relative_to(server.run_dir) for folder in folders) + follow + bool(follow) > MOST_KEPT:
            of = f" of the job {server.name}" if server.name else ""
            raise ConfigError(
                f"more incumbents are versions{of} than its engine holds: {MOST_KEPT}, one of them free where a route "
                "follows promotions; give some of them an upstream or a model, or one version"
            )
    incumbents = tuple(replace(served, routes=tuple(names)) for served, names in routes.items())
    return replace(plan, incumbents=incumbents, successions=tuple(successions), beside=tuple(beside))


def _is_answered(settings: RouteSettings) -> bool:
    """Whether a route's users are answered without an engine."""
    serve = settings.serve
    return settings.upstream is not None or (serve is not None and not serve.incumbent.is_beside)


def _check_beside(server: ServerPlan, route: str, version: int) -> None:
    if not serves_kept(server.job):
        raise ConfigError(
            f"the incumbent of the route {route} is a version of the job alone (`policy`), which only an engine can "
            "answer that trains an adapter (job.lora) and always serves (job.serving: always): else give an upstream "
            "or a model as well"
        )
    if not has_adapter(server.run_dir, version):
        folder = adapter_folder(server.run_dir, version)
        raise ConfigError(
            f"the incumbent of the route {route} is version {version}, which is not in {folder}: write it with "
            f"`swarm-gateway models export --step {version} --out {folder} --run-dir {server.run_dir}`"
        )


def _check_sections(path: Path, data: dict[str, Any]) -> None:
    expected = ("jobs",) if "jobs" in data else ("job", "swarm")
    unknown = [name for name in data if name not in (*expected, "gateway")]
    if not unknown and expected[0] in data and "gateway" in data:
        return
    if "workflow" in data:
        raise ConfigError(f"{path} is a file for `train`: swarm-gateway train {path}")
    if data and not is_sectioned(data):
        wrong = "none of its keys is a section"
    elif unknown:
        meant = get_close_matches(str(unknown[0]), (*expected, "gateway"), n=1)
        wrong = f"unknown section {unknown[0]!r}" + (f" (did you mean {meant[0]!r}?)" if meant else "")
    else:
        wrong = "a section is missing"
    raise ConfigError(
        f"{path}: {wrong}; a file for `up` has job (model, ...), gateway (hooks, ...) and, if needed, swarm; or jobs "
        "(by name, each with job and swarm) and gateway"
    )


def read_gateway(
    path: Path,
    flags: Mapping[str, Any] = MappingProxyType({}),
    incumbents: Path | None = None,
    servers: dict[str, str] | None = None,
) -> GatewayConfig:
    """The gateway of its own file, or of one for ``up``: then its swarm servers are those of the file.

    Args:
        path: of the file.
        flags: settings that win over what the file says above its routes.
        incumbents: file that names successors of the incumbents.
        servers: addresses of the servers that ``up`` started, by their jobs; they take its private token.

    Raises:
        ConfigError: the file cannot be read, has no such section, or a key or value is wrong; or each route has a value
            of its own in place of a flag's.
    """
    part, folder = part_of(path, "gateway"), path.parent
    settings = part.settings
    if servers is not None:
        # as `up` read it
        folder = folder.resolve()
        settings = with_servers(settings, servers, os.environ.get(PRIVATE_TOKEN_VARIABLE, ""))
    elif part.section:
        config = load_attribute("swarm.server.config:ServerConfig").model_fields
        jobs = {name: sections["swarm"] for name, sections in jobs_in(path, part.file).items()}
        urls = {
            name: url_of(server.get("host", config["host"].default), server.get("port", config["port"].default))
            for name, server in jobs.items()
        }
        own = next(iter(jobs.values()), {}).get("token") or os.environ.get(TOKEN_VARIABLE, "")
        settings = with_servers(settings, urls, own)
    if incumbents is not None:
        settings = with_successors(settings, read_successors(incumbents))
    config = read_config({**settings, **flags}, where=part.where, folder=folder)
    for name in RouteSettings.model_fields.keys() & flags:
        if config.routes and all(getattr(route, name) != getattr(config, name) for route in config.routes):
            option = name.replace("_", "-")
            raise ConfigError(
                f"{part.where}: --{option} changes nothing: {', '.join(config.route_names)} have a {name} of their own"
            )
    return config


def _plan_of_servers(path: Path, data: dict[str, Any]) -> UpPlan:
    """The swarm server and the engine of ``job``, or those of ``jobs``, without a gateway."""
    jobs = jobs_in(path, data)
    for name, sections in jobs.items():
        if "jobs" in data and not _NAME.fullmatch(name):
            raise ConfigError(f"{path}: jobs has names (letters, digits, - and _), each with job and swarm: {name!r}")
        if unknown := [section for section in sections if section not in ("job", "swarm")]:
            raise ConfigError(f"{path}, jobs.{name}: unknown section {unknown[0]!r}; it has job and, if needed, swarm")
    if not jobs:
        raise ConfigError(f"{path}: jobs is empty; it has names, each with job and swarm")
    import_from(path.parent)
    servers = tuple(_server_plan(path, sections, name) for name, sections in jobs.items())
    if len({server.run_dir for server in servers}) < len(servers):
        raise ConfigError(f"{path}: two jobs have one run folder; set run_dir in their swarm sections")
    if len({checkpoint_folder(server.job, server.run_dir).resolve() for server in servers}) < len(servers):
        raise ConfigError(f"{path}: two jobs have one checkpoint_dir, where each would go on from weights of the other")
    # not what the file may be a link to: paths in it start from where it is named
    return UpPlan(servers=servers, gateway_section=None, file=path.absolute())


def read_train(path: Path) -> TrainPlan:
    """What ``train`` runs, from its file, with the workflow loaded and the first tasks read before anything starts.

    Raises:
        ConfigError: a misspelt key, a model that is not there, a workflow that does not load, tasks that cannot be
            read.
    """
    data = read_mapping(path, "config")
    if "workflow" not in data and ("gateway" in data or "jobs" in data):
        raise ConfigError(f"{path} is a file for `up`: swarm-gateway up {path}")
    file = validated(TrainFile, data, str(path))
    return train_plan(file, _plan_of_servers(path, data), path.parent.resolve())


def _server_plan(path: Path, sections: dict[str, Any], name: str) -> ServerPlan:
    """The swarm server and the engine of the ``sections`` job and swarm."""
    folder = path.parent.resolve()
    where = f"{path}, jobs.{name}." if name else f"{path}, "
    job = validated(TrainJob, sections["job"], f"{where}job")
    section = dict(sections["swarm"])
    if "private_token" in section:
        raise ConfigError(
            f"{where}swarm: private_token is of the processes that `up` and `train` start, which make it themselves: "
            "leave it out (`swarm-gateway swarm tokens create` makes further tokens)"
        )
    server = parse_server(section, f"{where}swarm", folder)
    if server.job_defaults is not None:
        # we go by the job as well: where it keeps checkpoints, when it is done
        defaults = read_mapping(server.job_defaults, "server's job_defaults")
        job = layered(plain_fields(job, only_set=True), server=defaults, where=f"{where}job").job
        # the server reads its section from another folder
        section["job_defaults"] = str(server.job_defaults)
    # a path, or a hub's name, served under the name that it has in the file
    model = load_attribute("adapters.models:resolve_model")(job.model, folder)
    changes = {"model": model, "served_model_name": job.model_name}
    if job.checkpoint_dir:
        changes["checkpoint_dir"] = str(path_in(folder, job.checkpoint_dir))
    run_dir = (folder / server.run_dir).resolve()
    section["run_dir"] = str(run_dir)
    return ServerPlan(
        job=job.model_copy(update=changes),
        swarm_section=section,
        run_dir=run_dir,
        name=name,
        address=(server.host, server.port),
        token=server.token,
        # the server gives up first and knows why
        boot_timeout=server.boot_timeout + _BOOT_MARGIN,
    )
