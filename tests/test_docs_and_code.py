"""The pages are held to the code: settings, commands and their options, examples of configurations, metrics, headers,
fields; and paragraphs are short."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from markdown_it.token import Token
from pydantic import BaseModel

from docs.settings import FOLDER
from docs.settings import PAGES as WRITTEN
from gateway.cli.root import app
from gateway.config.gateway import GatewayConfig, RequestLogConfig, RouteConfig, TracingConfig, read_config
from gateway.config.route import PassRule, UpstreamConfig
from gateway.data.consent import TRAIN_HEADER
from gateway.launch.train import EvalConfig, TrainFile
from gateway.observability.request import Metrics
from gateway.rollout.return_policy import POLICY_HEADER
from gateway.sessions.conversation import SESSION
from reward_hooks.compose import BlendConfig
from swarm.job import TrainJob
from swarm.research.study import Study
from swarm.server.config import ServerConfig
from tests import picture
from tests.test_docs import PAGES, ROOT, tokens

#: Pages of the product; tutorials and readmes of tests have tests of their own.
DOCS = [page for page in PAGES if page.parent in (ROOT, ROOT / "docs")]
_SOURCES = ("adapters", "gateway", "reward_hooks", "swarm")
_SHELLS = ("bash", "sh", "ini", "dockerfile")
#: Files and modules that look like a field: ``job.yaml``, ``swarm.agentjet``.
_FILES = {"yaml", *(one.stem for one in (ROOT / "swarm").iterdir())}
_MODELS = (GatewayConfig, RequestLogConfig, RouteConfig, TracingConfig, PassRule, UpstreamConfig, TrainJob)
_FIELDS = {name for model in (*_MODELS, ServerConfig, TrainFile, EvalConfig) for name in model.model_fields}

each_page = pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def sources() -> str:
    return "\n".join(file.read_text(encoding="utf-8") for top in _SOURCES for file in (ROOT / top).rglob("*.py"))


@cache
def metrics() -> frozenset[str]:
    """Names under which Prometheus gets them."""
    declared = re.findall(r'"((?:gateway|swarm)_[a-z_]+)"', sources())
    declared += [family.name for family in Metrics().registry.collect()]
    return frozenset(name + end for name in declared for end in ("", "_total", "_bucket", "_count", "_sum"))


def composed(name: str) -> bool:
    """Whether the code makes this name of a metric in two parts: ``f"swarm_step_{name}"`` and ``"reward_mean"``."""
    beginnings = re.findall(r'f"((?:gateway|swarm)_[a-z_]+_)\{', sources())
    return any(name.startswith(one) and f'"{name.removeprefix(one)}"' in sources() for one in beginnings)


def inline(page: Path) -> list[str]:
    """What stands between backticks."""
    return [one.content for token in tokens(page) for one in token.children or () if one.type == "code_inline"]


def fences(page: Path, *languages: str) -> list[str]:
    return [one.content for one in tokens(page) if one.type == "fence" and one.info.split(" ")[0] in languages]


@pytest.mark.parametrize("name", WRITTEN)
def test_settings_and_commands_are_those_of_the_code(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == WRITTEN[name]().rstrip("\n") + "\n", "run `make reference`"


def wrong_command(words: list[str]) -> str | None:
    """What the command line ``swarm-gateway *words`` would be refused for: a name or an option that is not there."""
    command: Any = typer.main.get_command(app)
    rest = list(words)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        if name not in command.commands:
            return None if name.isupper() else f"no command {name}"
        command = command.commands[name]
    known = {one for parameter in command.params for one in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"--help", "-h", "--version"}
    unknown = [word for word in rest if re.match(r"--?[a-z]", word) and word.split("=")[0] not in known]
    return f"{' '.join(words)}: no option {', '.join(unknown)}" if unknown else None


def command_lines(text: str) -> list[list[str]]:
    """The words behind each ``swarm-gateway`` in a shell's text."""
    found: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        for called in re.findall(r"(?:^|[\s/(`=\[\"])swarm-gateway[\"]?[, ]+([^#|;&)`]+)", f" {line}"):
            found.append([word.strip(",[]\"'") for word in shlex.split(called.replace("'", ""), comments=True)])
    return found


@each_page
def test_every_command_and_option_is_there(page: Path) -> None:
    texts = [*fences(page, *_SHELLS), *(one for one in inline(page) if one.startswith("swarm-gateway "))]
    wrong = [wrong_command(words) for text in texts for words in command_lines(text)]
    assert [one for one in wrong if one] == []


def test_a_command_that_would_be_refused_is_found() -> None:
    text = "swarm-gateway up my.yaml --json  # and so on\nX=1 swarm-gateway keys create shop \\\n  --rpms 3\n"
    first, second = command_lines(text)
    assert wrong_command(first) is None
    assert wrong_command(second) == "keys create shop --rpms 3: no option --rpms"
    assert wrong_command(["down"]) == "no command down"


def check_configuration(data: dict[str, Any]) -> None:
    """Raise unless ``data`` is what one of the product's files may hold."""
    keys = data.keys()
    if {"apiVersion", "tests", "scrape_configs"} & keys:
        return
    if "groups" in keys:
        assert all({"alert", "expr"} <= rule.keys() for group in data["groups"] for rule in group["rules"])
    elif "question" in keys:
        Study.model_validate(data)
    elif "parts" in keys:
        BlendConfig.model_validate(data)
    elif {"job", "jobs", "gateway", "swarm"} & keys:
        if "workflow" in keys:
            TrainFile.model_validate(data)
        for entry in (data, *data.get("jobs", {}).values()):
            if "job" in entry:
                TrainJob.model_validate({"model": "any", **entry["job"]})
            ServerConfig.model_validate(entry.get("swarm", {}))
        if "gateway" in data:
            read_config({"hooks": "any", **data["gateway"]})
    elif keys <= TrainJob.model_fields.keys():
        TrainJob.model_validate({"model": "any", **data})
    else:
        read_config({"hooks": "any", **data})


def test_nobody_is_sent_to_an_index_for_this_package() -> None:
    """It is on none, so whoever takes its name there would be installed."""
    texts = "\n".join([*(page.read_text(encoding="utf-8") for page in PAGES), sources()])
    assert re.findall(r"pip install (?:-\S+ )*'?swarm-gateway\S*", texts) == []


@each_page
def test_every_example_of_a_configuration_is_accepted(page: Path) -> None:
    for text in fences(page, "yaml"):
        for document in yaml.safe_load_all(text):
            check_configuration(document)


@each_page
def test_every_example_in_python_compiles(page: Path) -> None:
    for text in fences(page, "python"):
        compile(text, str(page), "exec")


@each_page
def test_every_metric_is_one_of_the_servers(page: Path) -> None:
    texts = [*inline(page), *fences(page, "yaml", "promql")]
    named = {name for text in texts for name in re.findall(r"(?<![\w./-])(?:gateway|swarm)_[a-z_]+(?![\w/])", text)}
    unknown = named - metrics() - _FIELDS - {"swarm_gateway"}
    assert [name for name in sorted(unknown) if not composed(name)] == []


def test_every_metric_of_the_servers_is_on_its_page() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    makers = "by|counter|gauge|lately|CounterMetric|Histogram"
    declared = re.findall(rf'\b(?:{makers})\(\s*"((?:gateway|swarm)_[a-z_]+)"', sources())
    assert len(declared) > 40 and [name for name in declared if name not in page] == []


@each_page
def test_every_header_is_one_of_the_codes(page: Path) -> None:
    named = {
        name for text in inline(page) for name in re.findall(r"(?<![\w-])x-(?:swarm|should|request)-[a-z-]+", text)
    }
    code = sources().lower() if named else ""
    assert [name for name in sorted(named) if name not in code] == []


@each_page
def test_every_setting_is_a_field(page: Path) -> None:
    sections: dict[str, type[BaseModel]] = {"job": TrainJob, "swarm": ServerConfig, "gateway": GatewayConfig}
    found = [match for text in inline(page) if (match := re.match(r"(job|swarm|gateway)\.([a-z_]+)(?![\w.(/])", text))]
    wrong = [match[0] for match in found if match[2] not in sections[match[1]].model_fields and match[2] not in _FILES]
    assert wrong == []


def test_every_header_of_a_request_is_explained() -> None:
    page = inline(ROOT / "docs" / "requests.md")
    assert {POLICY_HEADER, TRAIN_HEADER, SESSION} <= set(page)


def sentences(token: Token) -> int:
    """Of a paragraph; what stands between backticks is one word."""
    text = "".join("x" if one.type == "code_inline" else one.content or " " for one in token.children or ())
    return len(re.findall(r"[.!?:]?[.!?](?=[\s)]+[A-Z(x*]|\s*$)", text))


@each_page
def test_paragraphs_have_four_sentences_at_most(page: Path) -> None:
    if page.name in WRITTEN:
        return
    long = [token.content[:80] for token in tokens(page) if token.type == "inline" and sentences(token) > 4]
    assert long == []


def test_the_picture_of_core_and_packs_is_drawn_from_the_imports() -> None:
    page = picture.PAGE.read_text(encoding="utf-8")
    assert page == picture.drawn(page), "python -m tests.picture"
