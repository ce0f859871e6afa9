"""Which degraded policies the gate lets pass, and which healthy ones it holds back, with the real vLLM and verl.

``python -m benchmarks policies``: ``swarm-gateway up`` on a CPU, with an incumbent in a vLLM of its own and
``gate.mode: auto``; users ask without a pause. What is known of each policy (:mod:`benchmarks.graded`) is known before
the gate sees it; policy K comes with the weight sync of step K (:mod:`benchmarks.injected`), in a drawn order. Each has
one trial in the shadow. One that the verdict promotes is noted, and then rolled back. The last one is degraded too, and
promoted by hand, so that the verdict has to take it back in the canary.

Stopped is what is proven worse, and what is not proven in ``trial_requests``: for a degraded policy that is right, a
healthy one is then held back. The outcome is what the pairs in the journal prove first; it has to be what the server
did. What ``policies list`` shows a moment later may be weaker, for further pairs count too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sqlite3
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress

from benchmarks.graded import DIGITS, FOLDER, TOKENS, Graded, Models
from benchmarks.overhead import progress
from benchmarks.processes import up
from swarm.client import AsyncSwarmClient
from swarm.evidence.pairs import Pair
from swarm.evidence.stages import VERDICT
from swarm.evidence.verdict import PairedEvidence, Verdict
from swarm.http.serve import free_port
from swarm.protocol import PoliciesResponse, PolicyStatus, PromotePolicyRequest, RollBackPolicyRequest

#: the outcome and the verdict of a version in a stage, once there is a proof
Proof = Callable[[int, str], tuple[str, Verdict] | None]

ANSWERS, USERS, SHARE = 4, 6, 0.5
VERSION_SECONDS, ANSWER_SECONDS = 900.0, 120.0
HOOK = """\
from benchmarks.graded import {name} as reward


def on_compute_relative_reward(task, candidates, context):
    return [reward(task.main_query, candidate.text) for candidate in candidates]
"""


@dataclass
class Trial:
    """What became of one policy. ``gain`` and ``trained`` are its gains over the incumbent by the gate's and by the
    training hook, as graded before; ``difference`` is the gain that the gate saw."""

    version: int
    kind: str
    degraded: bool
    by_hand: bool
    gain: float
    trained: float
    outcome: str = "not seen"
    sentence: str = ""
    difference: float | None = None
    requests: int | None = None
    seconds: float | None = None


@dataclass
class Report:
    """The trials of one run, and the answers that users got, by who answered and with which version."""

    trials: list[Trial]
    settings: dict[str, Any]
    sources: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    failed: list[str] = field(default_factory=list[str])
    began: float = field(default_factory=time.monotonic)

    def figures(self) -> dict[str, Any]:
        """All of it, so far."""
        done = [trial for trial in self.trials if trial.outcome != "not seen"]
        degraded = [trial for trial in done if trial.degraded and not trial.by_hand]
        answers = {("challenger", str(trial.version)) for trial in degraded}
        return {
            **self.settings,
            "seconds": round(time.monotonic() - self.began),
            "load": os.getloadavg()[0],
            "degraded": counted(degraded),
            "healthy": counted([trial for trial in done if not trial.degraded]),
            "by_hand": [trial.outcome for trial in done if trial.by_hand],
            "answers": sum(self.sources.values()),
            "answers_of_degraded": sum(count for key, count in self.sources.items() if key in answers),
            "failed": len(self.failed),
            "failed_quoted": self.failed[:10],
            "trials": [asdict(trial) for trial in self.trials],
        }


def counted(trials: list[Trial]) -> dict[str, Any]:
    """Of one label: how many had which outcome, and the median of the requests until each."""
    rows: dict[str, Any] = {"policies": len(trials)}
    for outcome in ("promoted", "worse", "undecided"):
        requests = [trial.requests for trial in trials if trial.outcome == outcome and trial.requests is not None]
        rows[outcome] = sum(trial.outcome == outcome for trial in trials)
        rows[f"{outcome}_requests"] = statistics.median(requests) if requests else None
    return rows


async def ask(http: httpx.AsyncClient, report: Report, draw: random.Random) -> None:
    """One user, who asks until cancelled."""
    while True:
        message = {"role": "user", "content": draw.choice(DIGITS)}
        body = {"model": "policy", "messages": [message], "max_tokens": TOKENS, "temperature": 1.0}
        try:
            answer = await http.post("/v1/chat/completions", json=body)
            answer.raise_for_status()
        except httpx.HTTPError as exc:
            report.failed.append(repr(exc)[:200])
            await asyncio.sleep(1.0)
            continue
        headers = answer.headers
        report.sources[headers.get("x-swarm-source", ""), headers.get("x-swarm-policy-version", "")] += 1


async def try_one(client: AsyncSwarmClient, trial: Trial, proof: Proof) -> None:
    """Follow one policy from the time that it is served until it is decided."""
    deadline = time.monotonic() + VERSION_SECONDS
    while (status := _only(await client.policies())).stage.challenger != trial.version:
        _in_time(deadline, f"version {trial.version} is not served: {status.stage}")
        await asyncio.sleep(0.1)
    served = time.monotonic()
    if trial.by_hand:
        await client.promote_policy(PromotePolicyRequest(reason="the benchmark", share=SHARE))
    while not (moved := await _moved(client, trial)):
        _in_time(deadline, f"version {trial.version} is not decided: {trial}")
        await asyncio.sleep(0.1)
    trial.seconds = round(time.monotonic() - served, 1)
    stage = f"canary {SHARE:g}" if trial.by_hand else "shadow"
    # the last pair reaches the journal a moment after the stage
    while (proven := proof(trial.version, stage)) is None:
        _in_time(deadline, f"the journal has no proof of version {trial.version}, which is {moved}")
        await asyncio.sleep(0.1)
    trial.outcome, verdict = proven
    trial.difference, trial.requests, trial.sentence = verdict.difference, verdict.requests, verdict.sentence
    if (trial.outcome == "promoted") != (moved == "promoted"):
        raise RuntimeError(f"the journal proves {trial.outcome} of version {trial.version}, which is {moved}")
    if trial.by_hand:
        trial.outcome = "rolled back"


async def _moved(client: AsyncSwarmClient, trial: Trial) -> str:
    """What the server did with it; empty: nothing yet."""
    stage = _only(await client.policies()).stage
    if stage.challenger != trial.version:
        raise RuntimeError(f"version {trial.version} went before it was decided: {stage}")
    if trial.by_hand:
        return "rolled back" if stage.share == 0 and stage.by == VERDICT else ""
    if stage.share > 0:
        await client.roll_back_policy(RollBackPolicyRequest(reason="the benchmark has seen enough"))
        return "promoted"
    return "" if stage.trial else "stopped"


def proof_of(journal: Path, trial_requests: int) -> Proof:
    """What the pairs of a version in a stage prove first, by the rows of ``journal``."""

    def proof(version: int, stage: str) -> tuple[str, Verdict] | None:
        query = "SELECT pair FROM pairs WHERE json_extract(pair, '$.terms.challenger') = ? ORDER BY rowid"
        with contextlib.closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as rows:
            pairs = [Pair.model_validate_json(pair) for (pair,) in rows.execute(query, (version,))]
        evidence: PairedEvidence | None = None
        for pair in pairs:
            if pair.terms.stage != stage:
                continue
            evidence = evidence or PairedEvidence(pair.terms)
            evidence.add(pair)
            if evidence.alarm():
                return "worse", evidence.verdict()
            if evidence.promotable():
                return "promoted", evidence.verdict()
            if evidence.tried >= trial_requests:
                return "undecided", evidence.verdict()
        return None

    return proof


def _only(policies: PoliciesResponse) -> PolicyStatus:
    [status] = policies.policies
    return status


def _in_time(deadline: float, why: str) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(why)


async def judge(urls: dict[str, str], report: Report, proof: Proof, write: Callable[[], None], bar: Progress) -> None:
    """Let each policy have its trial while users ask."""
    async with (
        httpx.AsyncClient(base_url=urls["gateway"], trust_env=False, timeout=ANSWER_SECONDS) as http,
        AsyncSwarmClient(urls["swarm server"]) as client,
        asyncio.TaskGroup() as tasks,
    ):
        users = [tasks.create_task(ask(http, report, random.Random(number))) for number in range(USERS)]
        task = bar.add_task("policies", total=len(report.trials))
        try:
            for trial in report.trials:
                await try_one(client, trial, proof)
                write()
                shown = f"{trial.version} {trial.kind} ({trial.gain:+.3f}): {trial.outcome}, {trial.sentence}"
                bar.console.print(shown, markup=False)
                bar.advance(task)
        finally:
            for user in users:
                user.cancel()


def chosen(place: Path, options: argparse.Namespace) -> tuple[Graded, list[Graded]]:
    """The incumbent and all policies, in the order of their versions; the last is promoted by hand."""
    models, draw = Models(place / "models", options.seed), random.Random(options.seed)
    degraded = models.degraded(options.degraded, draw)
    policies = degraded + list(models.healthy(options.healthy))
    draw.shuffle(policies)
    return models.incumbent, [*policies, draw.choice(degraded)]


def settings(place: Path, incumbent: Graded, options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sections ``job`` and ``gateway``."""
    worker = "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls"
    job = {
        "model": str(incumbent.folder),
        "batch_size": 1,
        "num_repeat": ANSWERS,
        "max_parallel_episodes": 2 * USERS * ANSWERS,
        "max_prompt_length": 64,
        "max_response_length": TOKENS,
        "lr": 1e-12,
        "seed": options.seed,
        "overrides": {worker: "benchmarks.injected.Injected"},
    }
    judge = place / "judge"
    judge.mkdir()
    (judge / "on_compute_relative_reward.py").write_text(HOOK.format(name="gate_reward"))
    gate = {
        "mode": "auto",
        "hook": str(judge),
        "margin": options.margin,
        "trial_every": 1,
        "trial_requests": options.trial_requests,
    }
    serve = {
        "incumbent": {"model": str(incumbent.folder), "port": free_port()},
        "canary": {"shares": [SHARE]},
        "watch_share": 1.0,
        "max_shadows": USERS,
        "gate": gate,
    }
    return job, {"serve": serve}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--degraded", type=int, default=20, choices=range(1, 21), metavar="1..20")
    parser.add_argument("--healthy", type=int, default=40)
    parser.add_argument("--margin", type=float, default=0.05)
    parser.add_argument("--trial-requests", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the report there, after each policy")


def run(options: argparse.Namespace) -> None:
    import torch

    # so small a network computes on one core as fast as on several
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, progress(Console(stderr=True)) as bar:
        place = Path(folder)
        incumbent, policies = chosen(place, options)
        (place / "policies").mkdir()
        trials: list[Trial] = []
        for version, policy in enumerate(policies, 1):
            (place / "policies" / str(version)).symlink_to(policy.folder)
            gains = round(policy.reward - incumbent.reward, 4), round(policy.trained - incumbent.trained, 4)
            trials.append(Trial(version, policy.kind, policy.degraded, version == len(policies), *gains))
        known = {"margin": options.margin, "trial_requests": options.trial_requests, "incumbent": incumbent.reward}
        report = Report(trials, known)

        def write() -> None:
            if options.json is not None:
                options.json.write_text(json.dumps(report.figures(), indent=2) + "\n")

        job, gateway = settings(place, incumbent, options)
        environment = {FOLDER: str(place / "policies")}
        with up(place / "up", job, gateway, HOOK.format(name="training_reward"), **environment) as urls:
            proof = proof_of(place / "up" / "run" / "journal.db", options.trial_requests)
            asyncio.run(judge(urls, report, proof, write, bar))
        write()
        print(json.dumps(report.figures(), indent=2))
