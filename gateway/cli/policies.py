"""``swarm-gateway policies``: which challenger answers whom, what proves it, and how a person moves it; the versions
that are kept are in :mod:`gateway.cli.kept`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from gateway.cli import kept
from gateway.cli.output import tell
from gateway.cli.target import AsJson, ServerTarget, targeted

if TYPE_CHECKING:
    from swarm.protocol import PoliciesResponse, PolicyStatus

app = typer.Typer(
    help="Challengers and incumbents: who answers whom, what is proven, and the versions that are kept. Learn more in "
    "Takeover.",
    no_args_is_help=True,
)
for _command in (kept.show, kept.export, kept.fork, kept.delete):
    app.command()(_command)

Name = Annotated[str, typer.Argument(help="route of the gateway; default: the only one")]
Before = Annotated[str, typer.Option("--incumbent", help="the route's incumbent; default: the latest version")]
Reason = Annotated[str, typer.Option("--reason", "-r", help="why, for the audit log and for whoever looks later")]
Seen = Annotated[
    int | None, typer.Option("--version", help="refuse if the stage has another version by now (`list` shows it)")
]


@app.command("list")
@targeted
def list_policies(target: ServerTarget, as_json: AsJson = False) -> None:
    """The challenger of each route, its stage, and the verdict in it."""
    with target.connect() as client:
        policies = client.policies()
    lines = [_line(policy) for policy in policies.policies] or ["no route has an incumbent here"]
    tell(as_json, policies.model_dump(mode="json"), *lines, *_of_training(policies))


@app.command()
@targeted
def explain(target: ServerTarget, name: Name = "", incumbent: Before = "", as_json: AsJson = False) -> None:
    """The verdict on one challenger line by line: terms, evidence, guards, budget, sides, and who moved it last."""
    with target.connect() as client:
        explained = client.explain_policy(name, incumbent)
    tell(as_json, explained.model_dump(mode="json"), *explained.lines)


@app.command()
@targeted
def promote(
    target: ServerTarget,
    reason: Reason,
    name: Name = "",
    incumbent: Before = "",
    share: Annotated[
        float | None, typer.Option(help="of the conversations that begin, 1: live; default: the next of canary.shares")
    ] = None,
    version: Seen = None,
    as_json: AsJson = False,
) -> None:
    """Let a challenger answer more of the users."""
    from swarm.client.wire import checked
    from swarm.protocol import PromotePolicyRequest

    fields = {"route": name, "incumbent": incumbent, "version": version, "reason": reason, "share": share}
    with target.connect() as client:
        _tell_moved(client.promote_policy(checked(PromotePolicyRequest, fields)), as_json)


@app.command()
@targeted
def rollback(
    target: ServerTarget,
    reason: Reason,
    name: Name = "",
    incumbent: Before = "",
    recall: Annotated[
        bool,
        typer.Option(
            "--recall", help="also take back the version that became the incumbent: that of `up`'s file answers"
        ),
    ] = False,
    version: Seen = None,
    as_json: AsJson = False,
) -> None:
    """Let the incumbent answer everybody from now on; what runs ends as it began, and training goes on."""
    from swarm.client.wire import checked
    from swarm.protocol import RollBackPolicyRequest

    fields = {"route": name, "incumbent": incumbent, "version": version, "reason": reason, "recall": recall}
    with target.connect() as client:
        _tell_moved(client.roll_back_policy(checked(RollBackPolicyRequest, fields)), as_json)


@app.command()
@targeted
def pin(
    target: ServerTarget,
    reason: Reason,
    name: Name = "",
    incumbent: Before = "",
    off: Annotated[bool, typer.Option("--off", help="let verdicts move it again")] = False,
    version: Seen = None,
    as_json: AsJson = False,
) -> None:
    """Hold a challenger in its stage: no verdict moves it, not even one that it is worse."""
    from swarm.client.wire import checked
    from swarm.protocol import PinPolicyRequest

    fields = {"route": name, "incumbent": incumbent, "version": version, "reason": reason, "pinned": not off}
    with target.connect() as client:
        _tell_moved(client.pin_policy(checked(PinPolicyRequest, fields)), as_json)


@app.command()
@targeted
def resume(target: ServerTarget, reason: Reason, as_json: AsJson = False) -> None:
    """Let training go on in spite of the alarms or the rollback that paused it; later ones pause it again."""
    with target.connect() as client:
        policies = client.resume_training(reason)
    lines = _of_training(policies) or ["training goes on, and no alarm is raised"]
    tell(as_json, policies.model_dump(mode="json"), *lines)


def _of_training(policies: PoliciesResponse) -> list[str]:
    alarms = [f"alarm: {alarm.sentence}" for alarm in policies.alarms]
    if not policies.training_waits or any(alarm.pauses for alarm in policies.alarms):
        return alarms
    if any(policy.stage.paused for policy in policies.policies):
        how = "`swarm-gateway policies resume --reason WHY`"
        return [*alarms, f"training waits for a person, for a challenger was taken back: {how}"]
    return [*alarms, "training waits for a verdict, or because a challenger answers users"]


def _tell_moved(moved: PolicyStatus, as_json: bool) -> None:
    tell(as_json, moved.model_dump(mode="json"), _line(moved))


def _line(policy: PolicyStatus) -> str:
    stage = policy.stage
    challenger = "no version yet" if stage.challenger is None else f"version {stage.challenger}"
    parts = [
        f"{stage.route}: {challenger} against {stage.incumbent}",
        f"{stage.label}{' (rolled back)' if stage.rolled_back else ''}{' (pinned)' if stage.pinned else ''}"
        f"{', the incumbent is recalled' if stage.recalled else ''}"
        f", stage version {stage.version}, by {stage.by}: {stage.why}",
        policy.verdict.sentence if policy.verdict is not None else "nothing is compared yet in this stage",
    ]
    return " | ".join([*parts, f"waits for a person: {policy.waits}"] if policy.waits else parts)
