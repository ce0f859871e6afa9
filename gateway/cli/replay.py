"""``swarm-gateway replay``: a dataset through an application, with a progress bar and a report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from gateway.cli.here import gateway_run, token_for, token_of
from gateway.cli.output import print_json, prints_to_stderr
from gateway.cli.swarm import Token
from swarm.errors import ConfigError

_DEFAULT_URL = "http://127.0.0.1:8000/v1"


def replay(
    data: Annotated[
        str,
        typer.Option(
            "--data", "-d", help="prompts, streamed: a jsonl or parquet file, hf:NAME[:split], module:function"
        ),
    ],
    base_url: Annotated[
        str | None,
        typer.Option(
            envvar="OPENAI_BASE_URL",
            help="OpenAI-compatible address to send to, ends with /v1; default: the gateway that `up` started in this "
            f"folder, or {_DEFAULT_URL}",
        ),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(help='run this application per prompt instead, e.g. "python app.py --question {question}"'),
    ] = None,
    model: Annotated[str, typer.Option(help="model to ask for; default: the first of /v1/models")] = "",
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="key of the address")] = "none",
    concurrency: Annotated[int, typer.Option(min=1, help="requests at once")] = 4,
    epochs: Annotated[int, typer.Option(min=1, help="times through the data (not with --steps or --requests)")] = 1,
    requests: Annotated[int | None, typer.Option(min=1, help="send so many, through the data again and again")] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="go on until the swarm server has done this many more training steps")
    ] = None,
    time_limit: Annotated[float | None, typer.Option(help="stop after this many seconds")] = None,
    request_timeout: Annotated[float, typer.Option(help="seconds one request may take")] = 300.0,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="sent with each request")] = None,
    swarm_url: Annotated[
        str | None, typer.Option(help="swarm server to read the steps from; default: that of the same `up`")
    ] = None,
    token: Token = None,
    seed: Annotated[int, typer.Option(help="of the order of the prompts")] = 0,
    report: Annotated[Path | None, typer.Option(help="folder for report.json and report.png")] = None,
    no_train: Annotated[
        bool,
        typer.Option(
            "--no-train",
            help="score the prompts by --hooks, and train nothing",
        ),
    ] = False,
    hooks: Annotated[
        str | None,
        typer.Option(
            help="with --no-train: hook folder, blend file, name, or module:attribute that judges the answers, with "
            "--compare those of both versions in one call; the address may be a plain vLLM. --epochs says how many "
            "answers to each prompt"
        ),
    ] = None,
    compare: Annotated[
        list[Path] | None,
        typer.Option(
            help="earlier report (folder or file) to draw beside this one; with --no-train: of the version to compare "
            "with, prompt by prompt: is this one better?"
        ),
    ] = None,
    label: Annotated[str, typer.Option(help="name of this run in the table and the plot")] = "run",
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON, no progress bar")] = False,
) -> None:
    """Send a dataset through an application and report reward by step, latency and failures; or score held-out prompts
    on two versions of the model and say which is better."""
    import asyncio
    from contextlib import nullcontext
    from urllib.parse import urlsplit

    from gateway.replay.bar import replay_bar
    from gateway.replay.compare import scored
    from gateway.replay.run import ReplayProgress, make_config
    from gateway.replay.run import replay as send
    from gateway.replay.senders import CommandSender, HttpSender
    from gateway.reports.plot import check_plots
    from gateway.reports.printing import make_folder, print_report, write_report
    from gateway.reports.report import Report, read_report
    from reward_hooks import load_hooks
    from swarm.client import AsyncSwarmClient, RetryPolicy

    if no_train != (hooks is not None):
        raise ConfigError("--hooks and --no-train go together: what is trained is judged by the gateway's hook")
    if no_train and (command is not None or steps is not None):
        raise ConfigError("--no-train sends the prompts itself and trains nothing: leave out --command and --steps")
    if command is not None and max_tokens is not None:
        raise ConfigError("--command asks by itself: leave out --max-tokens")
    if no_train and compare and len(compare) > 1:
        raise ConfigError("--no-train compares with one earlier report: give --compare once")
    run = gateway_run(base_url)
    base_url = base_url or (f"{run.gateway}/v1" if run else _DEFAULT_URL)
    if swarm_url is not None:
        token = token_of(swarm_url, token)
    elif run is not None and len(run.servers) == 1 and not no_train:
        swarm_url, token = run.servers[0].url, token_for(run, token)
    if steps is not None and swarm_url is None:
        why = "no `up` of this folder has that gateway"
        if run is not None:
            why = f"its `up` has several: {', '.join(f'{server.url} ({server.job})' for server in run.servers)}"
        raise ConfigError(f"--steps needs --swarm-url to see the steps: {why}")
    if report is not None and not no_train:
        check_plots()
    others = [read_report(path) for path in compare or []]
    earlier = others[0] if no_train and others else None
    if earlier is not None and not (isinstance(earlier, Report) and earlier.scores):
        raise ConfigError(
            f"{earlier.label} is no report of `replay --no-train`: it has no scored prompts to compare with"
        )
    with prints_to_stderr():
        judge = load_hooks(hooks) if hooks is not None else None
    config = make_config(
        data=data,
        target=command or base_url,
        model=model,
        label=label,
        concurrency=concurrency,
        epochs=None if steps is not None or requests is not None else epochs,
        max_requests=requests,
        steps=steps,
        time_limit=time_limit,
        seed=seed,
        no_train=no_train,
    )
    try:
        url = urlsplit(base_url)
        is_address = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError(f"--base-url {base_url!r} must look like http://127.0.0.1:8000/v1")
    if report is not None:
        make_folder(report)

    async def send_all(on_progress: Callable[[ReplayProgress], None]) -> Report:
        # the next poll is the retry
        client = AsyncSwarmClient(swarm_url, token=token, policy=RetryPolicy(attempts=1)) if swarm_url else None
        async with client or nullcontext():
            if command is not None:
                env = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
                return await send(config, CommandSender(command, env, request_timeout), client, on_progress)
            body = {} if max_tokens is None else {"max_tokens": max_tokens}
            headers = {} if judge is None else {"x-swarm-train": "false"}
            async with HttpSender(base_url, api_key, body, request_timeout, headers) as sender:
                sender.body["model"] = model or await sender.first_model()
                with_model = config.model_copy(update={"model": sender.body["model"]})
                return await send(with_model, sender, client, on_progress)

    with replay_bar(visible=not as_json) as bar:
        result = asyncio.run(send_all(bar))
    shown = () if no_train else others
    if report is not None:
        # before it is judged: a comparison that fails loses no answers
        write_report(result, report, shown)
    if judge is not None and result.scores:
        with prints_to_stderr():
            result = asyncio.run(scored(result, earlier, judge))
        if report is not None:
            write_report(result, report)
    if as_json:
        print_json(result.model_dump(mode="json"))
    else:
        print_report(result, shown)
        if report is not None:
            typer.echo(f"report: {report}")
    if result.exit_code:
        raise typer.Exit(result.exit_code)
