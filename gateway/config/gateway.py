"""``GatewayConfig``: one gateway, its door and its routes; and how it is read from YAML.

Invariant: a gateway that others can reach has API keys, and no two routes answer to one name. Every mistake is one line
that names the key; a route inherits the settings of the top level that it does not set itself.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Self, cast

from pydantic import Field, StringConstraints, model_validator

from gateway.config.route import RouteSettings, Secret
from swarm.data import located
from swarm.types import Model
from swarm.validation import path_in, validated

#: Of the request log.
MOST_FILES = 1000
#: Marks an API key that is given as its SHA-256 digest.
DIGEST_PREFIX = "sha256:"
#: The name of the only route of a gateway whose configuration lists none.
ONLY_ROUTE = "default"
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")

ModelName = Annotated[str, Field(min_length=1)]
Origin = Annotated[str, StringConstraints(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/]+)$", to_lower=True)]


def is_pattern(name: str) -> bool:
    """Whether a model name of the configuration stands for all that match it, as in a shell: ``claude-*``."""
    return "*" in name or "?" in name


class TracingConfig(Model):
    """OpenTelemetry traces; needs ``pip install '.[otel]'`` in a clone."""

    endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://",
        description="of an OTLP collector over HTTP, without /v1/traces; default: OTEL_EXPORTER_OTLP_ENDPOINT",
    )
    service_name: str = Field(default="swarm-gateway", min_length=1, description="in the traces")
    sampled: float = Field(
        default=1.0, ge=0, le=1, description="share of requests; one that comes with a trace follows that one's choice"
    )


class LogRetention(Model):
    """What is kept of the lines of one route."""

    keep_seconds: float | None = Field(default=None, gt=0, description="after which a line is taken out")
    keep_bytes: int | None = Field(default=None, ge=1, description="above which the oldest lines are taken out")


class RequestLogConfig(Model):
    """Every request and its response as one line of JSON; it holds what users said."""

    path: Path = Field(description="mode 0600")
    max_bytes: int = Field(default=100 * 1024 * 1024, ge=1024, description="of one file, then it is rotated")
    files: int = Field(default=5, ge=1, le=MOST_FILES, description="that are kept, the current one included")
    keep_seconds: float | None = Field(
        default=None, gt=0, description="after which a line is taken out; null: with its file"
    )
    keep_routes: dict[str, LogRetention] = Field(
        default={}, description="what is kept of the lines of single routes, by their names"
    )
    max_text_bytes: int = Field(
        default=256 * 1024, ge=1024, description="of each request and each answer; the rest is cut"
    )


class PageConfig(Model):
    """The page at ``/ui``, where people look at groups and judge them; ``ui: {}`` takes the defaults."""

    judgements: Path | None = Field(
        default=None,
        description="file of what was judged, by whom and when, a line of JSON each; default: memory alone",
    )
    max_bytes: int = Field(
        default=64 * 1024 * 1024, ge=1024, description="of the groups that the page shows; the oldest leave"
    )


class TLSConfig(Model):
    """Files in PEM form."""

    certificate: Path = Field(description="its chain in the same file")
    key: Path = Field(description="not encrypted")


class RouteConfig(RouteSettings):
    """One route: the model names that lead to it, and its own settings where they differ from the gateway's."""

    name: str = Field(min_length=1, description="names the route in keys, metrics and logs")
    models: list[ModelName] = Field(
        default=[],
        description="names that applications ask for, or patterns such as claude-*; without a whole name also the "
        "route's name and what its swarm serves",
    )


class GatewayConfig(RouteSettings):
    """One gateway. Times are seconds, sizes bytes.

    Route settings at the top are the defaults of each of ``routes``; without ``routes`` they are the only route. The
    defaults of ``host``, ``api_keys`` and ``keys_file`` go together: without keys only this machine can connect.
    """

    host: str = Field(default="127.0.0.1", description="beyond loopback only with keys")
    port: int = Field(default=8000, ge=0, le=65535, description="0: any free port")
    tls: TLSConfig | None = Field(default=None, description="speak HTTPS")
    api_keys: list[Secret] = Field(
        default=[], description="keys applications may use, in clear or as 'sha256:<hex digest>'; empty: no key needed"
    )
    keys_file: Path | None = Field(default=None, description="virtual keys, as `swarm-gateway keys` keeps them")
    max_body_bytes: int = Field(default=16 * 1024 * 1024, ge=1024, description="a longer request is a 413")
    keepalive_seconds: float = Field(
        default=3.0, gt=0, le=60, description="longest silence of a stream whose answer is on its way"
    )

    max_sessions: int = Field(default=10_000, ge=1, description="conversations remembered; the longest silent leave")
    session_memory_bytes: int = Field(default=64 * 1024 * 1024, ge=1024, description="of requests and answers in them")

    response_store_bytes: int = Field(
        default=64 * 1024 * 1024, ge=0, description="of responses kept for `previous_response_id`; the oldest leave"
    )
    response_store_seconds: float = Field(default=24 * 3600.0, gt=0, description="after which a response is forgotten")

    cors_origins: list[Origin] = Field(
        default=[],
        description="origins of web pages whose scripts may use the gateway, such as https://app.example; with keys "
        "also '*', any page; default: none",
    )

    access_log: bool = Field(default=False, description="one log line per request, without its texts")
    request_log: RequestLogConfig | None = Field(default=None, description="whole requests and answers in a file")
    tracing: TracingConfig | None = Field(default=None, description="OpenTelemetry")
    ui: PageConfig | None = Field(default=None, description="serve the page at /ui; default: there is none")

    model_aliases: list[ModelName] = Field(
        default=[],
        description="further names of the default route, such as the model name of an application, or patterns such as "
        "claude-*",
    )
    routes: list[RouteConfig] = Field(default=[], description="where model names lead; none: one route for all")
    default_route: str | None = Field(
        default=None,
        description="name of the route for requests that name no model or an unknown one (without routes: 'default'); "
        "default: refuse",
    )

    @property
    def route_names(self) -> list[str]:
        """The routes' names; without ``routes`` there is one, named :data:`ONLY_ROUTE`."""
        return [route.name for route in self.routes] or [ONLY_ROUTE]

    def names_of(self, route: RouteConfig) -> list[str]:
        """The names and patterns that lead to one of ``routes``; its own name where it has no whole one."""
        own = [] if any(not is_pattern(name) for name in route.models) else [route.name]
        aliases = self.model_aliases if route.name == self.default_route else []
        return list(dict.fromkeys([*route.models, *own, *aliases]))

    def check_answers(self) -> None:
        """As for one route; what stands above ``routes`` need not be complete."""
        if not self.routes:
            super().check_answers()

    @model_validator(mode="after")
    def _reachable_needs_keys(self) -> Self:
        if self.host not in LOOPBACK_HOSTS and not self.api_keys and self.keys_file is None:
            raise ValueError(
                f"host {self.host!r} is reachable from other machines: set api_keys or keys_file, or use 127.0.0.1"
            )
        if "*" in self.cors_origins and not self.api_keys and self.keys_file is None:
            raise ValueError(
                "cors_origins: '*' would open a gateway without keys to any web page: name the pages' origins"
            )
        keys = [key.get_secret_value() for key in self.api_keys]
        if not all(keys):
            raise ValueError("api_keys must not hold an empty key")
        digests = [key.removeprefix(DIGEST_PREFIX) for key in keys if key.startswith(DIGEST_PREFIX)]
        if not all(_SHA256.fullmatch(digest) for digest in digests):
            raise ValueError(
                f"a key of api_keys that begins with '{DIGEST_PREFIX}' must have 64 hexadecimal digits after it"
            )
        return self

    @model_validator(mode="after")
    def _names_lead_to_one_route(self) -> Self:
        routes = self.routes
        twice = [name for name, count in Counter(route.name for route in routes).items() if count > 1]
        twice += [name for name, count in Counter(m for route in routes for m in route.models).items() if count > 1]
        asked = Counter(name for route in routes for name in self.names_of(route))
        twice += [name for name, count in asked.items() if count > 1 and name not in twice]
        if twice:
            raise ValueError(f"routes: {', '.join(map(repr, twice))} is given more than once")
        if routes and self.model_aliases and self.default_route is None:
            raise ValueError(
                "model_aliases are names of the default route: set default_route, or name them in the models of a route"
            )
        if self.default_route is not None and self.default_route not in self.route_names:
            names = ", ".join(map(repr, self.route_names))
            raise ValueError(f"default_route: there is no route named {self.default_route!r}; there is {names}")
        return self


def read_config(settings: dict[str, Any], where: str = "gateway config", folder: Path | None = None) -> GatewayConfig:
    """Validate the settings of a gateway.

    Args:
        settings: fields of ``GatewayConfig``; ``swarm_token`` defaults to the environment's ``SWARM_TOKEN``.
        where: name of the settings in errors.
        folder: relative paths (hooks, keys, certificates) start here; default: the working directory.

    Raises:
        ConfigError: a misspelt key or a value out of range; names each.
    """
    data = deepcopy(settings)
    if "SWARM_TOKEN" in os.environ:
        data.setdefault("swarm_token", os.environ["SWARM_TOKEN"])
    _inherit(data)
    if folder is not None:
        resolve_files(data, folder)
    return validated(GatewayConfig, data, where)


def _mapping(value: Any) -> dict[str, Any]:
    """``value``, or an empty mapping in place of what its validation refuses."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _routes(data: dict[str, Any]) -> list[dict[str, Any]]:
    routes = data.get("routes")
    return list(map(_mapping, cast("list[Any]", routes))) if isinstance(routes, list) else []


def _inherit(data: dict[str, Any]) -> None:
    """Give each route the settings of the top level that it does not set itself."""
    common = {name: data[name] for name in RouteSettings.model_fields if name in data}
    for route in _routes(data):
        for name, value in common.items():
            route.setdefault(name, value)


def resolve_files(data: dict[str, Any], folder: Path) -> None:
    """Make the paths in ``data`` absolute, from ``folder`` on: of hooks, suites, keys, certificates and logs."""
    for route in (data, *_routes(data)):
        gate = _mapping(_mapping(route.get("serve")).get("gate"))
        for settings, name in ((route, "hooks"), (gate, "hook")):
            hook = settings.get(name)
            if isinstance(hook, str) and (path := path_in(folder, hook)).exists():
                settings[name] = str(path.resolve())
        suites = _mapping(gate.get("suites"))
        suites |= {name: str(located(source, folder)) for name, source in suites.items() if isinstance(source, str)}
    if isinstance(data.get("keys_file"), str):
        # a link is followed at each look: it may lead elsewhere later
        data["keys_file"] = str(path_in(folder, data["keys_file"]).absolute())
    for section, names in (("tls", ("certificate", "key")), ("request_log", ("path",)), ("ui", ("judgements",))):
        files = _mapping(data.get(section))
        paths = {name: path_in(folder, files[name]) for name in names if isinstance(files.get(name), str)}
        files |= {name: str(path.resolve()) for name, path in paths.items()}
