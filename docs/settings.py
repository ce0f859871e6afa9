"""``python -m docs.settings``: writes ``settings.md`` and ``commands.md`` from the models of the settings and from the
command line, so that both can be read on a code host.

Invariant: each sentence in a table stands where the setting or the option is defined, and nowhere else.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from re import Pattern
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
import typer.main
import yaml
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from gateway.cli.root import app
from gateway.config.gateway import GatewayConfig, PageConfig, RequestLogConfig, RouteConfig, TLSConfig, TracingConfig
from gateway.config.route import DataConfig, PassRule, RouteSettings, UpstreamConfig
from gateway.config.takeover import GateConfig, Incumbent, IncumbentUpstream, ServeConfig
from gateway.launch.train import EvalConfig, TaskSources, TrainFile
from reward_hooks.compose import BlendConfig, PartConfig
from reward_hooks.contract import Candidate, Feedback, HookContext, Reward, Session, Turn, UserRequest
from swarm.evidence.alarms import Watched, WatchRules
from swarm.job import EvalSampling, LoraSettings, TrainJob
from swarm.server.config import ServerConfig
from swarm.types import Task, WorkflowOutput

FOLDER = Path(__file__).parent

_FILES = """\
- The file of `swarm-gateway up` has the sections `job` ([a job](#a-job)), `swarm` ([a swarm server](#a-swarm-server))
  and `gateway` ([a gateway](#a-gateway)). In place of `job` and `swarm` there may be `jobs`: under each name a
  `job` and a `swarm`.
- The file of `swarm-gateway train` is [a table of its own](#training-on-tasks).
- `serve --config` takes a gateway's settings alone, `swarm start --config` a swarm server's.
"""

#: Options that stand in the page's head instead.
_COMMON = {"--json", "--swarm-url", "--gateway-url", "--token", "--api-key", "--route"}
_COMMANDS = """\
Each stands behind `swarm-gateway`; with `--help` it says what its options mean. The exit code is 0, 2 for wrong input
or where nothing answers, and another where what was asked for failed.

- Options that many have are not repeated: `--json`, `--swarm-url`, `--token`, `--gateway-url`, `--api-key`, `--route`.
- In the folder of a running `up` no address is needed: commands find its server and use the run's own token. Another
  folder's swarm server is never taken for yours.
- Every command that takes a file takes that of `up`, and reads its part: `serve` and `hooks test` the section
  `gateway`, `keys` its `keys_file`, `swarm start` the section `swarm`, `config` and `swarm engine start` the `job`.
"""

#: Heading, model, what stands above its table.
_TABLES: list[tuple[str, type[BaseModel], str]] = [
    ("A job", TrainJob, "The section `job`. Lengths are in tokens. A misspelt name is an error."),
    ("Sampling of eval episodes", EvalSampling, "The job's `eval_sampling`; what is not said is vLLM's default."),
    ("LoRA", LoraSettings, "The job's `lora`: [an adapter](models.md#an-adapter-lora)."),
    ("A swarm server", ServerConfig, "The section `swarm`. Times are seconds, sizes bytes."),
    ("The watch", WatchRules, "Its `watch`: what raises [an alarm of the training](learning.md#what-the-watch-says)."),
    ("A watched thing", Watched, "An entry of `watch`; what it does not say is as there."),
    ("A gateway", GatewayConfig, "The section `gateway`. It also takes every setting of [a route](#a-route)."),
    (
        "A route",
        RouteSettings,
        "These stand in `gateway`, in one of its `routes`, or both: a route inherits what it does not set. Times are "
        "seconds.",
    ),
    ("One of several routes", RouteConfig, "What an entry of `routes` has beside the settings of [a route](#a-route)."),
    ("An upstream", UpstreamConfig, "A server that answers without training anything: a route's `upstream`."),
    (
        "Serve",
        ServeConfig,
        "A route's `serve`: who answers while a challenger learns ([takeover](takeover.md)).",
    ),
    ("An incumbent", Incumbent, "Its `incumbent`."),
    ("An incumbent upstream", IncumbentUpstream, "Its `upstream`."),
    ("The gate", GateConfig, "The `gate` of `serve`: how incumbent and challenger are compared."),
    ("Consent and redaction", DataConfig, "The block `data` of a gateway or of a route; see [privacy](privacy.md)."),
    ("A rule of requests that pass through", PassRule, "An entry of a route's `pass_through`."),
    ("TLS", TLSConfig, "The gateway's `tls`: files in PEM form."),
    ("The request log", RequestLogConfig, "The gateway's `request_log`; it holds what users said."),
    ("The page", PageConfig, "The gateway's `ui`; see [the page](page.md)."),
    ("Traces", TracingConfig, "The gateway's `tracing`; needs `pip install '.[otel]'` in a clone."),
    ("Training on tasks", TrainFile, "The file of `swarm-gateway train`. Paths start from its folder."),
    ("Sources of tasks", TaskSources, "Its `tasks`."),
    ("Evaluations", EvalConfig, "Its `eval`."),
    ("A blend of hooks", BlendConfig, "The YAML file that a gateway's `hooks` may name."),
    ("A part of a blend", PartConfig, "An entry of its `parts`."),
]

#: The same of what hooks and workflows get and return.
_OBJECTS: list[tuple[str, type[BaseModel], str]] = [
    ("Task", Task, ""),
    ("Candidate", Candidate, ""),
    ("HookContext", HookContext, ""),
    ("UserRequest", UserRequest, ""),
    ("Reward", Reward, ""),
    ("Session", Session, ""),
    ("Turn", Turn, ""),
    ("Feedback", Feedback, ""),
    ("WorkflowOutput", WorkflowOutput, ""),
]

_HEAD = "<!-- written by `make reference`: change the descriptions in the code, then run it -->\n"


def settings() -> str:
    """The text of ``settings.md``."""
    parts = [_HEAD, "# Settings\n", _FILES]
    for heading, model, text in _TABLES:
        parts += [f"## {heading}\n", f"{text}\n", _table(model, "setting")]
    parts += [
        "## What hooks and workflows get\n",
        "[Reward hooks](hooks.md) and [workflows](train.md) get and return these objects.\n",
    ]
    for heading, model, _ in _OBJECTS:
        parts += [f"### {heading}\n", f"{_words(model)}\n", _table(model, "field")]
    return "\n".join(parts)


def _words(model: type[BaseModel]) -> str:
    """Its docstring, in Markdown."""
    return (inspect.getdoc(model) or "").replace("``", "`").replace(":attr:", "")


def _table(model: type[BaseModel], what: str) -> str:
    inherited = RouteSettings.model_fields if model in (GatewayConfig, RouteConfig) else {}
    fields = {name: info for name, info in model.model_fields.items() if name not in inherited}
    columns = {
        what: [f"`{name}`" for name in fields],
        "default": [_default(info) for info in fields.values()] if what == "setting" else [],
        "values": [_values(info.annotation, info.metadata) for info in fields.values()],
        "": [info.description or "" for info in fields.values()],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    lines = [list(shown), ["---"] * len(shown), *zip(*shown.values(), strict=True)]
    return "\n".join(["| " + " | ".join(map(_cell, line)) + " |" for line in lines] + [""])


def _cell(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True, validated_data={})
    return _value(value)


def _value(value: Any) -> str:
    match value:
        case None | "":
            return ""
        case bool():
            return f"`{str(value).lower()}`"
        case SecretStr():
            return ""
        case Watched():
            return f"`{{limit: {value.limit:g}, action: {value.action}}}`"
        case [PassRule(), *_]:
            return "`[agents]`"
        case [Pattern(), *_]:
            return f"`[{', '.join(one.pattern for one in value)}]`"
        case BaseModel() | [] | {} | ():
            return "" if isinstance(value, BaseModel) else "none"
        case list() | tuple():
            return f"`{yaml.safe_dump(list(value), default_flow_style=True).strip()}`"
        case Path() | str() | int() | float():
            return f"`{value}`"
        case _:
            return ""


def _values(annotation: Any, metadata: list[Any] | None = None) -> str:
    limits = _limits(metadata or [])
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{one}`" for one in arguments)
    if origin in (Union, types.UnionType):
        return ", ".join(dict.fromkeys(_values(one, metadata) for one in arguments if one is not type(None)))
    if hasattr(annotation, "__metadata__"):  # Annotated
        return _values(annotation.__origin__, list(annotation.__metadata__))
    if origin in (list, tuple):
        kinds = [one for one in arguments if one is not ...]
        return "list of " + (_values(kinds[0]) if len(kinds) == 1 else "pairs")
    if origin is dict or annotation is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return ", ".join(f"`{one.value}`" for one in annotation)
    words = {bool: "`true`, `false`", int: "integer", float: "number", str: "text", Path: "path", SecretStr: "text"}
    if annotation in words:
        return words[annotation] + limits
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        known = {model: heading for heading, model, _ in (*_TABLES, *_OBJECTS)}
        heading = known.get(annotation)
        return f"[{heading}](#{heading.lower().replace(' ', '-')})" if heading else "mapping"
    if annotation is Pattern or origin is Pattern:
        return "pattern"
    return "any"


def _limits(metadata: list[Any]) -> str:
    found: list[str] = []
    for one in metadata:
        match one:
            case annotated_types.Ge(ge=limit):
                found.append(f"≥ {limit}")
            case annotated_types.Gt(gt=limit):
                found.append(f"> {limit}")
            case annotated_types.Le(le=limit):
                found.append(f"≤ {limit}")
            case annotated_types.Lt(lt=limit):
                found.append(f"< {limit}")
            case _:
                pass
    return " " + ", ".join(found) if found else ""


def commands() -> str:
    """The text of ``commands.md``."""
    rows = ["| command | what it does | options |", "|---|---|---|"]
    for names, command in _leaves((), typer.main.get_command(app)):
        shown = [one for one in command.params if not getattr(one, "hidden", False)]
        words = [str(one.name).upper() for one in shown if one.param_type_name == "argument"]
        options = [one.opts[0] for one in shown if one.param_type_name == "option" and one.help]
        options = [one for one in options if one not in _COMMON]
        called = " ".join((*names, *words))
        rows.append(f"| `{called}` | {_cell(command.help or '')} | {_cell(', '.join(f'`{one}`' for one in options))} |")
    return "\n".join([_HEAD, "# Commands\n", _COMMANDS, *rows])


def _leaves(names: tuple[str, ...], command: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        yield names, command
        return
    for name, inner in command.commands.items():
        yield from _leaves((*names, name), inner)


#: Each file that is written, and its text.
PAGES = {"settings.md": settings, "commands.md": commands}


def main() -> None:
    """Write the pages."""
    for name, text in PAGES.items():
        (FOLDER / name).write_text(text().rstrip("\n") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
