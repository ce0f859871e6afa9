"""What alarms do to a whole server: they are told, pause the training, take challengers back; after a restart the
same."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from swarm.evidence.alarms import Alarm, WatchRules
from swarm.evidence.stages import StageRules
from swarm.job import TrainJob, dump_job
from swarm.measures import EVAL_REWARD, EVAL_SPREAD, REWARD, SPREAD, TASKS, TASKS_WITH_SIGNAL
from swarm.protocol import TRAINING_WAITS, FollowedRoute
from swarm.server.app import create_app
from swarm.server.config import ServerConfig
from swarm.server.engine.controller import Controller
from swarm.server.episodes.evidence import TrainingWatch
from swarm.server.journal.journal import Journal
from swarm.server.journal.rows import ResumptionRow, RunRow
from swarm.types import EvalResult, StepResult
from tests.standins.vllm import listening
from tests.swarm.server import conftest as server
from tests.swarm.server.conftest import Rig, ready
from tests.swarm.server.test_webhook import Told
from tests.swarm.server.test_webhook import told as told_of_webhook

pytestmark = pytest.mark.anyio

rig = server.rig
told = told_of_webhook
RULES = StageRules(num_repeat=2, begins="canary")


@pytest.fixture
def overrides(request: pytest.FixtureRequest, told: Told, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr("swarm.server.webhook._LOOK", 0.01)
    watch = WatchRules.model_validate({"signal": {"action": request.param}})
    return {"webhook": told.url, "watch": watch}


async def batch(rig: Rig, *rewards: float) -> None:
    """Episodes for a whole batch, two to a task."""
    for number, reward in enumerate(rewards):
        episode = await rig.claim()
        await episode.chat()
        await episode.end(f"task {number // 2}", reward)


async def step(rig: Rig, number: int, *rewards: float) -> None:
    """The trainer takes its step ``number``."""
    controller, taking = rig.controller, asyncio.create_task(rig.controller.next_batch())
    await batch(rig, *rewards)
    taken = await asyncio.wait_for(taking, 20)
    controller.step_done(StepResult(step=number, batch_id=taken.batch_id, metrics={}, seconds=1.0))
    controller.rollout_ready(ready(rig.vllm_address, number, taken.batch_id))


async def status(rig: Rig) -> dict[str, Any]:
    return (await rig.client.get("/status")).json()


async def restarted(rig: Rig, tmp_path: Path, watch: WatchRules) -> Any:
    """Another server on a copy of what is on disk once all is, as a crash would leave it."""
    await rig.controller.episodes.synced()
    run_dir = Path(tempfile.mkdtemp(dir=tmp_path))
    with (
        closing(sqlite3.connect(tmp_path / "journal.db")) as living,
        closing(sqlite3.connect(run_dir / "journal.db")) as copy,
    ):
        living.backup(copy)
    return create_app(ServerConfig(run_dir=run_dir, watch=watch))


@pytest.mark.parametrize("overrides", ["warn", "off"], indirect=True)
async def test_an_alarm_is_told_and_training_goes_on(
    rig: Rig, told: Told, overrides: dict[str, Any], tmp_path: Path
) -> None:
    await step(rig, 1, 1, 1, 1, 1)
    assert (await status(rig))["alarms"] == []
    await step(rig, 2, 1, 1, 1, 1)
    raised = (await status(rig))["alarms"]
    assert 'swarm_alarm{alarm="entropy"} 0.0' in (await rig.client.get("/metrics")).text
    if overrides["watch"].signal.action == "off":
        assert raised == []
        return
    [alarm] = raised
    learning = f"no: {alarm['text']}; reward over 2 steps tells nothing yet"
    assert (await status(rig))["learning"] == learning and (await rig.client.get("/status?steps=0")).json()["learning"]
    assert (alarm["kind"], alarm["since"], alarm["action"], alarm["pauses"]) == ("signal", 2, "warn", False)
    assert "the rewards differ in 0 of 4 groups" in alarm["text"]
    heard = await told.next()
    assert (heard["event"], heard["alarm"], heard["text"]) == ("alarm", alarm, Alarm.model_validate(alarm).sentence)
    metrics = (await rig.client.get("/metrics")).text
    assert 'swarm_alarm{alarm="signal"} 1.0' in metrics and "swarm_training_paused 0.0" in metrics
    app = await restarted(rig, tmp_path, overrides["watch"])
    async with listening(app) as url:
        assert (await rig.client.get(f"{url}/status")).json()["alarms"] == [alarm]
    await step(rig, 3, 1, 0, 1, 0)
    assert (await status(rig))["alarms"] == []
    assert (await told.next())["event"] == "alarm_over"


@pytest.mark.parametrize("overrides", ["pause"], indirect=True)
async def test_training_waits_for_a_person_and_goes_on_when_told(
    rig: Rig, overrides: dict[str, Any], tmp_path: Path
) -> None:
    await step(rig, 1, 1, 1, 1, 1)
    await step(rig, 2, 1, 1, 1, 1)
    taking = asyncio.create_task(rig.controller.next_batch())
    await batch(rig, 1, 1, 1, 1)
    refused = await rig.post("/claim_episode", client_uuid="me", wait_seconds=0)
    assert refused["fail_cause"] == TRAINING_WAITS and not taking.done()
    evaluation = await rig.post("/claim_episode", client_uuid="me", episode_type="eval", wait_seconds=0)
    assert evaluation["success"], "the weights of now could not be evaluated until somebody lets training go on"
    await rig.post("/abort_episode", client_uuid="me", episode_uuid=evaluation["episode_uuid"])
    policies = (await rig.client.get("/policies")).json()
    assert policies["training_waits"] and policies["alarms"][0]["pauses"]
    assert "swarm_training_paused 1.0" in (await rig.client.get("/metrics")).text
    async with listening(await restarted(rig, tmp_path, overrides["watch"])) as url:
        assert (await rig.client.get(f"{url}/policies")).json() == policies
    goes_on = await rig.post("/policies/resume", reason="the hook is mended")
    assert not goes_on["training_waits"] and not goes_on["alarms"][0]["pauses"]
    taken = await asyncio.wait_for(taking, 20)
    # told twice it changes nothing
    assert await rig.post("/policies/resume", reason="the hook is mended") == goes_on
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    done = [line["details"] for line in lines if line["what"] == "policies resume"]
    assert done[0]["reason"] == "the hook is mended" and done[0]["alarms"][0].startswith("signal, since step 2: ")
    async with listening(await restarted(rig, tmp_path, overrides["watch"])) as url:
        assert (await rig.client.get(f"{url}/policies")).json() == goes_on
    # the same alarm goes on, and another one pauses again
    rig.controller.step_done(StepResult(step=3, batch_id=taken.batch_id, metrics={}, seconds=1.0))
    rig.controller.rollout_ready(ready(rig.vllm_address, 3, taken.batch_id))
    await step(rig, 4, 1, 0, 1, 0)
    assert (await status(rig))["alarms"] == []
    await step(rig, 5, 1, 1, 1, 1)
    await step(rig, 6, 1, 1, 1, 1)
    assert [(one["since"], one["pauses"]) for one in (await status(rig))["alarms"]] == [(6, True)]


@pytest.mark.parametrize("overrides", ["pause"], indirect=True)
async def test_alarms_of_steps_that_a_run_goes_back_to_pause_nothing(
    rig: Rig, overrides: dict[str, Any], tmp_path: Path
) -> None:
    await step(rig, 1, 1, 1, 1, 1)
    await step(rig, 2, 1, 1, 1, 1)
    await rig.post("/policies/resume", reason="it is known")
    await step(rig, 3, 1, 1, 1, 1)
    rig.controller.run.sync(rig.controller.job, from_step=2)
    policies = (await rig.client.get("/policies")).json()
    assert [(alarm["since"], alarm["pauses"]) for alarm in policies["alarms"]] == [(2, False)]
    async with listening(await restarted(rig, tmp_path, overrides["watch"])) as url:
        assert (await rig.client.get(f"{url}/policies")).json() == policies
    await step(rig, 3, 1, 1, 1, 1)
    assert [(alarm["since"], alarm["pauses"]) for alarm in (await status(rig))["alarms"]] == [(2, False)]


@pytest.mark.parametrize("overrides", ["rollback"], indirect=True)
async def test_challengers_that_answer_users_go_back_to_the_shadow_unless_they_are_pinned(
    rig: Rig, overrides: dict[str, Any], tmp_path: Path
) -> None:
    episodes = rig.controller.episodes
    routes = [FollowedRoute(route=name, incumbent="gpt", rules=RULES) for name in ("chat", "code")]
    await episodes.follow_stages(routes, None, 0.0)
    await rig.post("/policies/pin", route="code", reason="demo")
    await step(rig, 1, 1, 1, 1, 1)
    await step(rig, 2, 1, 1, 1, 1)
    of_server = await status(rig)
    chat, code = of_server["stages"]
    assert (chat["stage"], chat["rolled_back"], code["stage"]) == ("shadow", True, "canary")
    [alarm] = of_server["alarms"]
    assert (chat["by"], chat["why"]) == ("the watch over the training", Alarm.model_validate(alarm).sentence)
    assert alarm["pauses"]
    app = await restarted(rig, tmp_path, overrides["watch"])
    async with listening(app) as url:
        again = (await rig.client.get(f"{url}/status")).json()
        assert (again["stages"], again["alarms"]) == (of_server["stages"], of_server["alarms"])
        controller: Controller = app.state.controller
        # what a person does afterwards, the same alarm does not undo
        moved = {"route": "chat", "reason": "read 50", "share": 0.05}
        assert (await rig.client.post(f"{url}/policies/promote", json=moved)).status_code == 200
        controller.pool.stepped(list(controller.run.steps))
        assert controller.pool.stages.find("chat", "").stage == "canary"


HELD_OUT = WatchRules.model_validate({"signal": {"action": "pause"}, "held_out": {"action": "pause"}})
TINY = TrainJob(model="tiny")


def steps_of(*signals: int) -> list[StepResult]:
    shared = {TASKS: 4.0, SPREAD: 0.3, REWARD: 0.5}
    metrics = [shared | {TASKS_WITH_SIGNAL: float(signal)} for signal in signals]
    return [
        StepResult(step=number, batch_id=f"b{number}", metrics=of_step, seconds=1.0)
        for number, of_step in enumerate(metrics, 1)
    ]


def evaluated(**means: float) -> list[EvalResult]:
    return [
        EvalResult(step=int(name[1:]), episodes=400, metrics={EVAL_REWARD: mean, EVAL_SPREAD: 0.3})
        for name, mean in means.items()
    ]


async def test_held_out_prompts_that_fall_after_a_person_let_training_go_on_pause_it_again() -> None:
    rows: list[ResumptionRow] = []
    watch = TrainingWatch(rows.append, HELD_OUT)
    watch.look(steps_of(4, 4, 0, 0), evaluated(v0=0.8, v2=0.8, v3=0.2), TINY)
    assert [alarm.kind for alarm in watch.alarms] == ["signal"] and watch.pauses
    watch.resume()
    # the version of the step after which it was resumed is evaluated, and is the second that is lower
    evaluations = evaluated(v0=0.8, v2=0.8, v3=0.2, v4=0.2)
    watch.look(steps_of(4, 4, 0, 0, 4), evaluations, TINY)
    assert [(alarm.kind, alarm.since, alarm.pauses) for alarm in watch.alarms] == [("held_out", 4, True)]
    again = TrainingWatch(rows.append, HELD_OUT)
    again.restore(rows[-1].step, steps_of(4, 4, 0, 0, 4), evaluations, TINY)
    assert again.alarms == watch.alarms
    watch.resume()
    watch.look(steps_of(4, 4, 0, 0, 4, 4), evaluations, TINY)
    assert [alarm.pauses for alarm in watch.alarms] == [False]


@pytest.mark.parametrize(
    ("before", "again", "alarm"),
    [((4, 4, 4, 4, 4, 4, 0, 0), (0, 0), (7, True)), ((4, 4, 4, 0, 0, 0, 0, 0), (0,), (5, False))],
    ids=["begins again", "goes on"],
)
async def test_of_steps_that_are_done_again_only_an_alarm_that_goes_on_stays_let_go_on(
    tmp_path: Path, before: tuple[int, ...], again: tuple[int, ...], alarm: tuple[int, bool]
) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    journal.append(RunRow("run", dump_job(TINY), False))
    watch = TrainingWatch(journal.append, HELD_OUT, "run")
    steps = steps_of(*before)
    watch.look(steps, [], TINY)
    watch.resume()
    # the engine dies after step 8, and goes on from its checkpoint of step 5
    for step in steps_of(*before[:5], *again)[5:]:
        steps.append(step)
        watch.look(steps, [], TINY)
    assert [(each.since, each.pauses) for each in watch.alarms] == [alarm]
    await journal.close()
    journal = Journal.open(tmp_path / "journal.db")
    restarted = TrainingWatch(journal.append, HELD_OUT, "run")
    restarted.restore(journal.recover().resumed, steps, [], TINY)
    assert restarted.alarms == watch.alarms
    await journal.close()


async def test_an_alarm_that_was_let_go_on_pauses_nothing_once_the_steps_before_it_are_forgotten() -> None:
    rows: list[ResumptionRow] = []
    rules = HELD_OUT.model_copy(update={"window": 2})
    watch = TrainingWatch(rows.append, rules)
    all_steps = steps_of(4, *[0] * 40, 4, 4, 0, 0)

    def look(last: int) -> list[tuple[int, bool]]:
        # of a long run, the latest are remembered
        steps = all_steps[:last][-10:]
        watch.look(steps, [], TINY)
        again = TrainingWatch(rows.append, rules)
        again.restore(rows[-1].step if rows else 0, steps, [], TINY)
        assert again.alarms == watch.alarms
        return [(alarm.since, alarm.pauses) for alarm in watch.alarms]

    assert look(3) == [(3, True)]
    watch.resume()
    assert [look(last)[0][1] for last in range(4, 42)] == [False] * 38
    # one that begins among them is another
    assert [look(last) for last in (43, 44, 45)] == [[], [], [(45, True)]]


async def test_a_decline_that_was_let_go_on_pauses_nothing_once_its_first_steps_are_forgotten() -> None:
    rows: list[ResumptionRow] = []
    rules = WatchRules.model_validate({"window": 2, "entropy": {"action": "pause"}})
    watch = TrainingWatch(rows.append, rules)
    metrics = [{REWARD: 0.5, SPREAD: 0.3, "actor/entropy": 0.99**number} for number in range(600)]
    steps = [StepResult(step=number, batch_id="b", metrics=each, seconds=1.0) for number, each in enumerate(metrics, 1)]
    paused: list[int] = []
    for last in range(1, 600):
        remembered = steps[:last][-150:]
        watch.look(remembered, [], TINY)
        again = TrainingWatch(rows.append, rules)
        again.restore(rows[-1].step if rows else 0, remembered, [], TINY)
        assert again.alarms == watch.alarms
        if watch.pauses:
            paused.append(last)
            watch.resume()
    # half of it is gone
    assert paused == [71]


async def test_a_restart_before_the_first_step_is_no_step_back() -> None:
    rows: list[ResumptionRow] = []
    TrainingWatch(rows.append, HELD_OUT).restore(0, [], [], TINY)
    assert not rows


async def test_an_alarm_of_held_out_prompts_that_a_restart_shows_at_once_is_let_go_on_once(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal.db")
    journal.append(RunRow("run", dump_job(TINY), False))
    evaluations = evaluated(v0=0.8, v2=0.8, v3=0.2, v4=0.2)
    watch = TrainingWatch(journal.append, HELD_OUT, "run")
    watch.restore(0, steps_of(4, 4, 4, 4), evaluations, TINY)
    assert watch.pauses
    watch.resume()
    watch.look(steps_of(4, 4, 4, 4, 4), evaluations, TINY)
    assert [(alarm.since, alarm.pauses) for alarm in watch.alarms] == [(4, False)]
    await journal.close()
    journal = Journal.open(tmp_path / "journal.db")
    again = TrainingWatch(journal.append, HELD_OUT, "run")
    again.restore(journal.recover().resumed, steps_of(4, 4, 4, 4, 4), evaluations, TINY)
    assert again.alarms == watch.alarms
    # another one that begins with the next step is news
    again.look(steps_of(4, 4, 4, 0, 0), evaluations, TINY)
    assert [(alarm.kind, alarm.since, alarm.pauses) for alarm in again.alarms if alarm.pauses] == [("signal", 5, True)]
    await journal.close()
