"""The model card of an exported step: what trained it, from the journal.

Invariant: what the journal does not know, the card does not say; nothing of what people wrote is in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from adapters.models.cache import models_home
from adapters.models.pull import CATALOG
from swarm.evidence.learning import learning_of
from swarm.measures import EVAL_REWARD, EVAL_SUCCESS, REWARD, SPREAD, TRAIN
from swarm.status import Lineage

#: Rows of the table of steps; of more steps, only so many are listed.
_ROWS = 50
_ADVANTAGES = {"grpo": "GRPO", "dr_grpo": "Dr. GRPO", "rloo": "RLOO"}


def model_card(lineage: Lineage, dtype: str, versions: Mapping[str, str], *, adapter: bool, lora: bool) -> str:
    """The text of ``README.md``, with the YAML that model hubs read at its top.

    Args:
        versions: what wrote the checkpoint, by distribution.
        adapter: it is a LoRA adapter alone.
        lora: LoRA trained it.
    """
    job = lineage.job
    base, hub, licence = _base(job.model)
    front: dict[str, Any] = {"base_model": hub} if hub else {}
    front |= {"license": licence} if licence else {}
    front |= {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["reinforcement-learning", job.advantage, "swarm-gateway", "verl", *(["lora"] if lora else [])],
    }
    what = "A LoRA adapter for" if adapter else "The weights of"
    lines = [
        "---",
        yaml.safe_dump(front, sort_keys=False).rstrip(),
        "---",
        "",
        f"# {job.model_name}, step {lineage.step}",
        "",
        f"{what} {base} after {lineage.step} training steps with swarm-gateway, in {dtype}."
        + (" LoRA trained them; its adapter is merged into the weights." if lora and not adapter else ""),
        "",
        "## Training",
        "",
        *_table(("setting", "value"), _settings(lineage)),
        *_data(lineage),
        *_rewards(lineage),
        *_evaluations(lineage),
    ]
    if versions:
        lines += ["", "## Versions", "", *_table(("package", "version"), sorted(versions.items()))]
    return "\n".join(lines) + "\n"


def _base(model: str) -> tuple[str, str, str]:
    """What the base model is called, its name on the hub and its licence; the latter two are empty if unknown. A local
    path says more of a machine than of a model: its last part is enough."""
    path = Path(model)
    if path.parent == models_home() and (entry := CATALOG.get(path.name)) is not None:
        return entry.hub_id, entry.hub_id, entry.licence.lower()
    if path.is_absolute() or path.exists():
        return path.name, "", ""
    return model, model, ""


def _settings(lineage: Lineage) -> list[tuple[str, str]]:
    job = lineage.job
    rows = [
        ("method", f"{_ADVANTAGES[job.advantage]}, {job.batch_size} tasks of {job.num_repeat} answers per step"),
        ("learning rate", f"{job.lr:g}"),
        ("KL loss", f"{job.kl_coef:g}" if job.kl_coef else "none"),
        ("optimizer steps per training step", str(job.mini_batch_num * job.ppo_epochs)),
        ("sampling", f"temperature {job.temperature:g}" if job.sampling == "trainer" else "as the app asked"),
        ("lengths", f"prompts to {job.max_prompt_length} tokens, answers to {job.max_response_length}"),
        ("seed", str(job.seed)),
    ]
    rows += [("goes on from", lineage.parent)] if lineage.parent else []
    kinds = ("actor_rollout_ref.model.", "actor_rollout_ref.actor.", "algorithm.")
    return rows + [(f"`{key}`", str(value)) for key, value in job.flat_overrides.items() if key.startswith(kinds)]


def _data(lineage: Lineage) -> list[str]:
    if not lineage.steps:
        return ["", "The journal holds none of these steps: it does not say on what they were trained."]
    first, last = lineage.steps[0].step, lineage.steps[-1].step
    counts = {name: sum(int(step.metrics.get(TRAIN + name, 0)) for step in lineage.steps) for name in _COUNTED}
    lines = ["", "## Data", ""]
    if counts["episodes"]:
        lines += [
            f"Steps {first} to {last} trained on {counts['episodes']} answers to {counts['tasks']} tasks; the rewards "
            f"of {counts['tasks_with_signal']} tasks differed."
        ]
    if len(lineage.steps) < lineage.step:
        lines += [
            f"The journal holds {len(lineage.steps)} of the {lineage.step} steps: others were done by another run, or "
            "before it began."
        ]
    of = [f"{count} through the gateway's route `{name}`" for name, count in lineage.routes.items()]
    of += [f"{lineage.others} by clients of their own"] if lineage.others else []
    if of:
        total = sum(lineage.routes.values()) + lineage.others
        lines += [f"Of the {total} answers that the journal still has, " + ", ".join(of) + "."]
    return lines


_COUNTED = ("episodes", "tasks", "tasks_with_signal")


def _rewards(lineage: Lineage) -> list[str]:
    steps = [step for step in lineage.steps if REWARD in step.metrics]
    if not steps:
        return []
    every = -(-len(steps) // _ROWS)
    shown = [step for row, step in enumerate(steps) if row % every == 0 or step is steps[-1]]
    title = "## Reward per step" if every == 1 else f"## Reward per step (each {every}th)"
    rows = [[str(step.step), *_cells(step.metrics, {REWARD: ".4g", SPREAD: ".4g"})] for step in shown]
    learns = learning_of(lineage.steps, lineage.evaluations)
    return ["", title, "", f"{learns[0].upper()}{learns[1:]}.", "", *_table(("step", "mean", "deviation"), rows)]


def _cells(metrics: Mapping[str, float], forms: Mapping[str, str]) -> list[str]:
    return [format(metrics[name], form) if name in metrics else "" for name, form in forms.items()]


def _evaluations(lineage: Lineage) -> list[str]:
    held_out = [f"- {sentence}" for sentence in lineage.held_out]
    if held_out:
        held_out = ["", "## Held-out prompts", "", *held_out]
    if not lineage.evaluations:
        return held_out or [
            "",
            "The journal holds no evaluation of these weights; the rewards above are those of training batches.",
        ]
    forms = {EVAL_REWARD: ".4g", EVAL_SUCCESS: ".1%"}
    rows = [[str(run.step), str(run.episodes), *_cells(run.metrics, forms)] for run in lineage.evaluations]
    table = _table(("weights of step", "episodes", "mean reward", "success"), rows)
    return ["", "## Evaluation", "", *table, *held_out]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
