"""``swarm-gateway serve``: the gateway alone; and what every server process needs: logs, an end with its parent."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gateway.cli.output import announce, import_from, tell, told_as_json
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from gateway.config.gateway import GatewayConfig


logger = logging.getLogger(__name__)

_OURS = ("gateway", "swarm", "reward_hooks", "adapters")
LogFormat = Annotated[
    Literal["text", "json"], typer.Option(help="json: one object a line, with the request it is about")
]


def serve(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            help="YAML file of the gateway, or one for `up`; flags win over it, not over its routes",
        ),
    ] = None,
    hooks: Annotated[str | None, typer.Option(help="folder with the hook files, or module:attribute")] = None,
    host: Annotated[str | None, typer.Option(help="address to listen on")] = None,
    port: Annotated[int | None, typer.Option(help="port to listen on, 0: any free one")] = None,
    swarm_url: Annotated[str | None, typer.Option(help="address of the swarm server")] = None,
    num_repeat: Annotated[int | None, typer.Option(help="episodes per request; default: the job's")] = None,
    control: Annotated[
        Literal["none", "shuffle"] | None, typer.Option(help="shuffle: a control run that must not learn")
    ] = None,
    log_format: LogFormat = "text",
    log_texts: Annotated[
        bool, typer.Option("--log-texts", help="log messages of errors, which may quote a prompt")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="only say whether the configuration is right")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="with --check: print one line of JSON")] = False,
    stop_on_eof: Annotated[bool, typer.Option("--stop-on-eof", hidden=True)] = False,
    reload_from: Annotated[Path | None, typer.Option(hidden=True)] = None,
    server: Annotated[list[str] | None, typer.Option(hidden=True)] = None,
    incumbents: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve applications, answered by the swarm, every request an occasion to learn. SIGHUP reads the file again."""
    from gateway.cli.sections import read_gateway

    flags = {
        # relative to here, not to the file
        "hooks": str(Path(hooks).resolve()) if hooks and Path(hooks).exists() else hooks,
        "host": host,
        "port": port,
        "swarm_url": swarm_url,
        "num_repeat": num_repeat,
        "control": control,
    }
    overrides = {name: value for name, value in flags.items() if value is not None}
    if config:
        import_from(config.parent)
    if check:
        _check(config, overrides, as_json)
        return
    parsed = _read(config, overrides, incumbents)
    if (config or reload_from) and hasattr(signal, "SIGHUP"):
        # one that comes while it starts waits for the gateway, which lets it through; no thread may have begun
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    if stop_on_eof:
        stop_with_parent()
    log_to_stderr(log_format, texts=log_texts)
    source = (lambda: _read(config, overrides)) if config else None
    if reload_from is not None:
        servers = dict(pair.split("=", 1) for pair in server or [])
        source = lambda: _served(  # noqa: E731
            read_gateway(reload_from, incumbents=incumbents, servers=servers), _read(config, overrides, incumbents)
        )
        try:
            # one that is started again has the address that it had
            parsed = source().model_copy(update={"port": parsed.port})
        except ConfigError as exc:
            logger.error("%s; the gateway starts with what it read before", exc.message)
    from gateway.app import serve as serve_app

    serve_app(parsed, on_bound=announce("gateway"), source=source)


def _read(config: Path | None, flags: dict[str, Any], incumbents: Path | None = None) -> GatewayConfig:
    from gateway.cli.sections import read_gateway
    from gateway.config.gateway import read_config

    return read_gateway(config, flags, incumbents) if config else read_config(flags, where="flags")


def _served(wanted: GatewayConfig, started: GatewayConfig) -> GatewayConfig:
    """``wanted``, under an ``up`` that serves the incumbents of ``started``, which it began with."""
    for model, port, _ in _models(wanted) - _models(started):
        raise ConfigError(f"`up` serves no incumbent {model!r} on port {port} with these arguments: start it again")
    return wanted


def _models(config: GatewayConfig) -> set[tuple[str | None, int, tuple[str, ...]]]:
    """The incumbents that are models, each with its port and its arguments."""
    incumbents = (settings.serve.incumbent for settings in config.routes or [config] if settings.serve is not None)
    return {(it.model, it.port, it.vllm) for it in incumbents if it.model is not None}


def _check(config: Path | None, flags: dict[str, Any], as_json: bool) -> None:
    from gateway.app import check

    with told_as_json(as_json):
        routes = check(_read(config, flags))
    tell(as_json, {"ok": True, "routes": routes}, f"{config or 'the flags'}: right, routes {', '.join(routes)}")


def log_to_stderr(form: Literal["text", "json"] = "text", *, texts: bool = False) -> None:
    """Log this process to stderr, ours from INFO on, libraries from WARNING on; called once, before serving.

    Args:
        form: lines of text, or one JSON object a line.
        texts: whether messages of errors are logged, which may quote a prompt.
    """
    from uvicorn.config import LOGGING_CONFIG

    from gateway.observability.logs import JsonFormatter, TextFormatter

    kind = JsonFormatter if form == "json" else TextFormatter
    handler = logging.StreamHandler()
    handler.setFormatter(kind(texts=texts))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    for name in _OURS:
        logging.getLogger(name).setLevel(logging.INFO)
    # uvicorn installs handlers of its own, from this, in every server it runs
    LOGGING_CONFIG["formatters"]["default"] = {"()": kind, "texts": texts}


def stop_with_parent() -> None:
    """Send this process SIGTERM when its parent ends, even by SIGKILL: stdin is a pipe that the parent holds open."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="stop-with-parent", daemon=True).start()
