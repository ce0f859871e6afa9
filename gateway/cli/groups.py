"""``swarm-gateway groups``: what the model learns from: the answers of a group side by side, and where rewards lie."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from gateway.cli.here import DEFAULT_RUN, only_server
from gateway.cli.output import print_json, tell
from gateway.cli.swarm import Token, connect
from gateway.cli.target import AsJson, SwarmUrl
from swarm.errors import ConfigError
from swarm.importer import load_attribute

if TYPE_CHECKING:
    from swarm.judged_groups import JudgedGroup, JudgedGroups, Wanted

app = typer.Typer(help="The groups that were trained on, dropped or wait, from a swarm server.", no_args_is_help=True)

#: Cells of a line of a table: of a narrow terminal, and where there is none.
_LEAST_WIDTH, _PIPE_WIDTH = 80, 120
#: ``decode(ids, special=...)``
Decode = Callable[..., str]

RunDir = Annotated[
    Path | None,
    typer.Option(
        help="read the journal in this run folder; default: ask the server that runs here, or read runs/default if "
        "none does"
    ),
]
Tokenizer = Annotated[
    str | None, typer.Option(help="model whose tokenizer reads the tokens; default: the run's own, where it is at hand")
]
RequestLog = Annotated[Path | None, typer.Option(help="a gateway's request log, for texts where there is no tokenizer")]


@app.command("list")
def list_groups(
    find: Annotated[str, typer.Option(help="words that must all be in its task, texts or reasons")] = "",
    route: Annotated[str, typer.Option(help="name of its route or client")] = "",
    reason: Annotated[str, typer.Option(help="part of a reason, or of why it was dropped")] = "",
    at_least: Annotated[float | None, typer.Option(help="some answer has this reward or more")] = None,
    at_most: Annotated[float | None, typer.Option(help="some answer has this reward or less")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200)] = 20,
    swarm_url: SwarmUrl = None,
    token: Token = None,
    run_dir: RunDir = None,
    tokenizer: Tokenizer = None,
    as_json: AsJson = False,
) -> None:
    """The latest groups, newest first, and a histogram of the rewards of each of the latest steps."""
    from gateway.views.format import text_lines
    from gateway.views.groups_view import groups_table, rewards_table
    from swarm.judged_groups import Wanted
    from swarm.judged_groups import as_json as plain

    wanted = Wanted(route=route, reason=reason, at_least=at_least, at_most=at_most, limit=limit)
    # looked for here, not by the server, so there may be more than it takes
    wanted = wanted.model_copy(update={"words": find})
    groups = _fitting(wanted, swarm_url, token, run_dir, tokenizer)
    table, histogram = groups_table(groups.groups, time.time()), rewards_table(groups.rewards)
    lines = text_lines(table, limit) if table.rows else [table.note]
    if histogram.rows:
        lines += ["", *text_lines(histogram, len(histogram.rows))]
    answer = {"groups": plain(groups.groups), "rewards": [band.model_dump() for band in groups.rewards]}
    tell(as_json, answer, *lines)


@app.command("show")
def show_group(
    group: Annotated[str, typer.Argument(help="its id, or the beginning of it")],
    swarm_url: SwarmUrl = None,
    token: Token = None,
    run_dir: RunDir = None,
    tokenizer: Tokenizer = None,
    request_log: RequestLog = None,
    as_json: AsJson = False,
) -> None:
    """The answers of one group, side by side with what became of each, and their texts where they can be read."""
    from gateway.views.format import printable, short, text_lines
    from gateway.views.groups_view import answers_table, facts
    from swarm.judged_groups import Wanted
    from swarm.judged_groups import as_json as plain

    judged = _read(swarm_url, token, run_dir, Wanted(group=group, limit=2, tokens=True))
    if len(judged.groups) != 1:
        many = "several groups begin" if judged.groups else "none of the latest groups begins"
        raise ConfigError(f"{many} with {group!r}; `swarm-gateway groups list` names them")
    [chosen] = judged.groups
    decode = _decoder(tokenizer, judged.model)
    texts = texts_of(chosen, decode) if decode is not None else logged_texts(chosen, request_log)
    if as_json:
        [fields] = plain([chosen])
        for answer, text in zip(fields["answers"], texts.answers, strict=True):
            del answer["timelines"]
            answer["text"] = text
        print_json(fields | {"prompt": texts.prompt})
        return
    width = max(_LEAST_WIDTH, shutil.get_terminal_size((_PIPE_WIDTH, 0)).columns)
    typer.echo("\n".join(facts(chosen)))
    for line in ["", *text_lines(answers_table(chosen), len(chosen.answers)), ""]:
        typer.echo(short(line, width))
    for name, text in [("asked", texts.prompt), *((f"answer {n}", text) for n, text in enumerate(texts.answers, 1))]:
        if text:
            typer.echo("\n    ".join([f"{name}:", *map(printable, text.splitlines())]))
    if not any(texts.answers):
        typer.echo(texts.note)


class Texts(NamedTuple):
    """The texts of one group: of its prompt, and of each answer; empty where they are not known."""

    prompt: str
    answers: list[str]
    note: str = ""


def texts_of(group: JudgedGroup, decode: Decode) -> Texts:
    """By the model's tokenizer, from the tokens that were sampled."""
    from swarm.judged_groups import sampled

    first = next((line for answer in group.answers for line in answer.timelines), None)
    prompt = decode(first.prompt_ids, special=True) if first is not None else ""
    texts = [[decode(sampled(line), special=False) for line in answer.timelines] for answer in group.answers]
    return Texts(prompt, [" … ".join(parts) for parts in texts], "its tokens are gone")


def logged_texts(group: JudgedGroup, log: Path | None) -> Texts:
    """Of the request and of the answer that was delivered, as a gateway's request log has them.

    Raises:
        ConfigError: the log cannot be read.
    """
    from swarm.validation import read_text

    unknown = [""] * len(group.answers)
    if log is None or not group.request_id:
        return Texts("", unknown, "no tokenizer is at hand: give --tokenizer, or --request-log")
    older = takewhile(Path.exists, (log.with_name(f"{log.name}.{number}") for number in count(1)))
    # the separators of Unicode stand within a line
    lines = (line for path in (log, *older) for line in read_text(path, "request log").split("\n"))
    for line in lines:
        entry: dict[str, Any] = {}
        # a kill or a full disk may have cut it off
        with suppress(ValueError):
            entry = json.loads(line) if group.request_id in line else {}
        if entry.get("request_id") == group.request_id:
            prompt, text = (json.dumps(entry.get(name), ensure_ascii=False) for name in ("request", "answer"))
            return Texts(prompt, [text if answer.delivered else "" for answer in group.answers])
    return Texts("", unknown, f"{log} has no line of {group.request_id}; --tokenizer reads the texts from their tokens")


def _fitting(
    wanted: Wanted, swarm_url: str | None, token: str | None, run_dir: Path | None, tokenizer: str | None
) -> JudgedGroups:
    if not wanted.words:
        return _read(swarm_url, token, run_dir, wanted)
    from swarm.judged_groups import MAX_GROUPS

    # words may be in the texts, which only a tokenizer can read
    more = wanted.model_copy(update={"words": "", "limit": MAX_GROUPS, "tokens": True})
    everything = _read(swarm_url, token, run_dir, more)
    decode = _decoder(tokenizer, everything.model)
    fitting: list[JudgedGroup] = []
    for group in everything.groups:
        texts = texts_of(group, decode) if decode is not None else None
        if wanted.fits(group, [texts.prompt, *texts.answers] if texts is not None else ()):
            fitting.append(group)
    without = [
        judged.model_copy(update={"answers": [a.model_copy(update={"timelines": []}) for a in judged.answers]})
        for judged in fitting[: wanted.limit]
    ]
    return everything.model_copy(update={"groups": without})


def _read(swarm_url: str | None, token: str | None, run_dir: Path | None, wanted: Wanted) -> JudgedGroups:
    if run_dir is not None and swarm_url is not None:
        raise ConfigError("name a run folder or the address of a server, not both")
    if run_dir is None and swarm_url is None and only_server() is None and (DEFAULT_RUN / "journal.db").is_file():
        run_dir = DEFAULT_RUN
    if run_dir is None:
        with connect(swarm_url, token) as client:
            return client.judged_groups(**wanted.model_dump(exclude_defaults=True))
    journal = run_dir / "journal.db"
    judged: JudgedGroups = load_attribute("swarm.server.journal.browse:judged_groups")(journal, wanted)
    try:
        model: str = load_attribute("swarm.server.journal.export:model_of")(journal)
    except ConfigError:  # of several runs
        model = ""
    return judged.model_copy(update={"model": model})


def _decoder(tokenizer: str | None, model: str) -> Decode | None:
    if not (tokenizer or model):
        return None
    try:
        return load_attribute("adapters.models:decoder")(tokenizer or model, local=not tokenizer)
    except ConfigError:
        if tokenizer:
            raise
        return None
