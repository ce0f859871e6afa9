"""``swarm-gateway hooks``: try a reward hook before a model learns from it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli.output import print_json, prints_to_stderr, stage_bars
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from reward_hooks.offline import GroupResult, HookReport, OfflineConfig
    from swarm.types import OnProgress

#: Cells of a text that stands in one line.
_WIDTH = 90
#: Kinds of equal rewards that are named.
_KINDS = 5

app = typer.Typer(help="Try reward hooks on recorded groups.", no_args_is_help=True)


@app.callback()
def hooks() -> None:
    """Keeps ``test`` a command of its own: a group with one command would take its place."""


@app.command("test")
def test_hooks(
    folder: Annotated[str, typer.Argument(help="hook folder, blend file, name, module:attribute, or a file for `up`")],
    data: Annotated[Path, typer.Option("--data", "-d", help="jsonl file of groups: prompt, candidates, perhaps rank")],
    against: Annotated[str | None, typer.Option(help="another hook to compare the orders with")] = None,
    shuffles: Annotated[
        int, typer.Option(min=0, max=20, help="further scorings per group in shuffled order, for the flip rate")
    ] = 1,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="groups at once")] = 8,
    timeout: Annotated[
        float | None,
        typer.Option(min=0.001, help="seconds one call of a hook may take; default: as in the file for `up`, or 60"),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="only the first groups of the file")] = None,
    show: Annotated[int, typer.Option(min=0, help="groups to print, of those whose rewards differ")] = 5,
    full: Annotated[
        bool, typer.Option("--full", help="print whole texts, not the beginning of each in a line")
    ] = False,
    seed: Annotated[int, typer.Option(help="of the shuffled orders")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON, no progress bar")] = False,
) -> None:
    """Rank recorded answers offline: ranking with reasons, Kendall's tau, order-flip rate, cost and time."""
    from reward_hooks.offline import OfflineConfig

    hooks, seconds = _hooks_of(folder)
    config = OfflineConfig(shuffles=shuffles, concurrency=concurrency, timeout=timeout or seconds, seed=seed)
    with stage_bars(visible=not as_json) as on_progress, prints_to_stderr():
        report = try_hooks(hooks, data, against, config, limit, on_progress)
    if as_json:
        print_json(report.model_dump(mode="json"))
    else:
        print_hook_report(report, show, full)
    if not report.scored:
        raise typer.Exit(1)


def _hooks_of(spec: str) -> tuple[str, float]:
    """``spec``, or if that is a file for ``up`` the hooks that its gateway names; and the seconds of a call there."""
    from gateway.cli.parts import is_sectioned
    from reward_hooks.offline import OfflineConfig
    from swarm.validation import read_mapping

    path = Path(spec)
    if path.suffix not in (".yaml", ".yml") or not path.is_file() or not is_sectioned(read_mapping(path, "config")):
        return spec, OfflineConfig.timeout
    from gateway.cli.sections import read_gateway

    config = read_gateway(path)
    sections = [section for section in (config.routes or [config]) if section.hooks]
    named = dict.fromkeys(section.hooks for section in sections if section.hooks)
    if len(named) != 1:
        raise ConfigError(f"{path} names {len(named)} hooks; give one of them: {', '.join(named)}")
    return next(iter(named)), min(section.hook_timeout_seconds for section in sections)


def try_hooks(
    spec: str, data: Path, against: str | None, config: OfflineConfig, limit: int | None, on_progress: OnProgress
) -> HookReport:
    """Load hooks and groups, and score the groups with the hooks.

    Raises:
        ConfigError: a hook does not load, the file holds no group, or a line of it is not a group.
    """
    import asyncio
    from itertools import islice

    from reward_hooks import load_hooks
    from reward_hooks.offline import run_offline
    from reward_hooks.recorded import read_groups

    hooks = load_hooks(spec)
    other = load_hooks(against) if against is not None else None
    groups = list(islice(read_groups(data), limit))
    if not groups:
        raise ConfigError(f"{data} holds no group")
    return asyncio.run(run_offline(hooks, groups, other, config, on_progress))


def print_hook_report(report: HookReport, show: int, full: bool) -> None:
    """The numbers over all groups, then the first ``show`` groups whose rewards differ, their texts ``full`` or in a
    line each."""
    from rich.console import Console

    console = Console(highlight=False)
    rows = summary(report)
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        console.print(f"{name:<{width}}  {value}", markup=False, soft_wrap=True)
    telling = [group for group in report.groups if group.informative or group.error]
    for group in telling[:show]:
        console.print("\n".join(["", *_ranking(group, full)]), markup=False, soft_wrap=True)
    if len(telling) > show:
        console.print(f"... {len(telling) - show} more groups; --show says how many to print")


def summary(report: HookReport) -> list[tuple[str, str]]:
    """The lines of the summary: name and value."""
    from swarm.progress import reward

    rows = [("hook", report.hooks), ("groups", f"{report.scored} of {len(report.groups)} scored")]
    rows += [("  failed", f"{count} x {code}") for code, count in report.failed.items()]
    if report.uninformative:
        equal = Counter(group.rewards[0].value for group in report.groups if group.rewards and not group.informative)
        which = ", ".join(f"{count} x {reward(value)}" for value, count in equal.most_common(_KINDS))
        alike = f"{report.uninformative} with equal rewards ({which}): they teach nothing"
        rows.append(("  uninformative", alike))
    if report.tau_rank is not None:
        rows.append(("tau with the rank", f"{report.tau_rank:+.3f} over {report.ranked} groups"))
    if report.against is not None:
        tau = "none could be compared" if report.tau_against is None else f"{report.tau_against:+.3f}"
        rows.append((f"tau with {report.against}", f"{tau} over {report.compared} groups"))
        rows += [("  failed there", f"{count} x {code}") for code, count in report.failed_against.items()]
    if report.flip_rate is not None:
        rows.append(("order flips", f"{report.flip_rate:.1%} of pairs change when the answers are shuffled"))
    if report.spent["calls"] or report.spent["cache_hits"]:
        spent = report.spent
        tokens = f"{spent['input_tokens']:.0f} + {spent['output_tokens']:.0f} tokens"
        kept = f"{spent['cache_hits']:.0f} answers from the cache, {spent['retries']:.0f} retries"
        rows.append(("judges", f"{spent['calls']:.0f} calls, {tokens}, cost {spent['cost']:.6g}; {kept}"))
    if report.seconds_median is not None and report.seconds_most is not None:
        each = f"median {report.seconds_median * 1e3:.1f} ms, most {report.seconds_most * 1e3:.1f} ms"
        rows.append(("time", f"{report.seconds:.1f} s in all; one call: {each}"))
    return rows


def _ranking(group: GroupResult, full: bool) -> list[str]:
    """A group as lines: of each answer its reward and why, and its text below."""
    from gateway.views.format import printable, short
    from swarm.progress import reward

    lines = [short(group.prompt, _WIDTH) or group.task_id]
    if group.error:
        return [*lines, f"  no reward: {printable(group.error)}"]
    for rank, index in enumerate(group.order, 1):
        score = group.rewards[index]
        parts = ", ".join(f"{name} {value:.3g}" for name, value in score.components.items())
        why = [short(score.reason, _WIDTH), f"({parts})" if parts else ""]
        lines.append("  ".join([f"  {rank}. answer {index + 1}", f"reward {reward(score.value)}", *filter(None, why)]))
        text = group.answers[index]
        lines += [f"     {line}" for line in (map(printable, text.splitlines()) if full else [short(text, _WIDTH)])]
    return lines
