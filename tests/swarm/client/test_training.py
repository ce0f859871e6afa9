"""Training on a dataset: how often each task runs, when it ends, and what is counted."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import threading
import tracemalloc
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from swarm.client import (
    AsyncSwarmClient,
    EpisodeEndpoint,
    SwarmClient,
    ThrottleSchedule,
    TrainReport,
    auto_train_with_dataset,
    auto_train_with_dataset_async,
)
from swarm.client.episodes import each, sweep
from swarm.client.training import begin_training
from swarm.client.training_options import Evaluation, EvaluationReport, Progress, TrainOptions
from swarm.client.training_run import DatasetTraining
from swarm.errors import ConfigError, ConflictError
from swarm.job import TrainJob
from swarm.states import EngineState
from swarm.status import ServerStatus
from swarm.types import Task, WorkflowOutput
from tests.swarm.client.conftest import QUICK
from tests.swarm.client.scripted import DROP, Answer, ScriptedServer
from tests.swarm.client.test_asynchronous import group
from tests.swarm.client.test_sync import claimed, engine, not_yet

pytestmark = pytest.mark.anyio

JOB = TrainJob(model="tiny", batch_size=2, num_repeat=2, total_training_steps=100)
TASKS = [Task(task_id=name) for name in ("a", "b", "c")]


def at(step: int, change: int = 1, job: TrainJob | None = JOB) -> dict[str, Any]:
    fields = job.model_dump(mode="json") if job else None
    return {"engine": engine(EngineState.ROLLING, step=step), "job": fields, "engine_changes": change}


@pytest.fixture
def rolling(server: ScriptedServer) -> ScriptedServer:
    server.script("/status", at(0))
    server.script("/claim_episode", claimed())
    for path in ("/end_episode", "/end_group", "/abort_episode"):
        server.script(path, {"success": True})
    return server


Train = Callable[..., Awaitable[TrainReport]]


@pytest.fixture(params=["sync", "async"])
def train(request: pytest.FixtureRequest, server: ScriptedServer, anyio_backend: str) -> Train:
    """The same training by either client; the agent is a plain function."""

    async def sync(dataset: Any, agent: Callable[[Task], WorkflowOutput], **options: Any) -> TrainReport:
        with SwarmClient(server.url, policy=QUICK) as client:
            options = {"progress": False} | options
            return auto_train_with_dataset(dataset, client, lambda task, api: agent(task), **options)

    async def asynchronous(dataset: Any, agent: Callable[[Task], WorkflowOutput], **options: Any) -> TrainReport:
        async def execute(task: Task, api: EpisodeEndpoint) -> WorkflowOutput:
            return agent(task)

        async with AsyncSwarmClient(server.url, policy=QUICK) as client:
            options = {"progress": False} | options
            return await auto_train_with_dataset_async(dataset, client, execute, **options)

    return sync if request.param == "sync" else asynchronous


def control(
    server: ScriptedServer, agent: Callable[[Task, EpisodeEndpoint], WorkflowOutput], **options: Any
) -> TrainReport:
    """A training with groups of four whose rewards are shuffled."""
    given: dict[str, Any] = {"num_repeat": 4, "max_parallel": 4, "shuffle_rewards": True} | options
    with SwarmClient(server.url, policy=QUICK) as client:
        return begin_training(TASKS, client, agent, TrainOptions(**given)).result()


def reward(task: Task) -> WorkflowOutput:
    return WorkflowOutput(reward=1.0 if task.task_id == "a" else 0.25)


async def test_every_task_runs_as_often_as_its_group_needs(rolling: ScriptedServer, train: Train) -> None:
    report = await train(TASKS, reward, epochs=2)
    assert sorted(body["task_id"] for body in rolling.bodies("/end_episode")) == ["a"] * 4 + ["b"] * 4 + ["c"] * 4
    assert report == TrainReport(finished=12, failed=0, mean_reward=0.5, first_step=0, last_step=0)


async def test_what_the_caller_says_goes_before_the_job(rolling: ScriptedServer, train: Train) -> None:
    schedule = ThrottleSchedule([(0, 0.5)])
    rolling.script("/get_engine_status", engine(EngineState.ROLLING))
    report = await train(lambda: iter(TASKS), reward, num_repeat=3, max_parallel=1, throttle_policy=schedule)
    assert report.finished == 9
    sent = [body["throttle_policy"]["current_task_id"] for body in rolling.bodies("/claim_episode")]
    assert sent == ["a"] * 3 + ["b"] * 3 + ["c"] * 3


async def test_a_training_that_alone_makes_no_group_whole_is_warned_of(rolling: ScriptedServer, train: Train) -> None:
    with pytest.warns(RuntimeWarning, match=r"num_repeat is 1, and .* groups of 2 episodes .* at other clients"):
        assert (await train(TASKS, reward, num_repeat=1)).finished == 3
    # batches of any groups
    rolling.script("/status", {**at(0), "pool": {"whole_groups": False}})
    assert (await train(TASKS, reward, num_repeat=1)).finished == 3


async def test_it_ends_with_its_last_step(rolling: ScriptedServer, train: Train) -> None:
    reached = threading.Event()
    rolling.script("/status", at(5), at(5), Answer(at(7, change=2), wait=reached), at(7, change=2))

    def agent(task: Task) -> WorkflowOutput:
        if len(rolling.bodies("/end_episode")) >= 20:
            reached.set()
        return reward(task)

    # without end, but for the steps
    report = await train(itertools.cycle(TASKS), agent, total_steps=2)
    assert (report.first_step, report.last_step) == (5, 7)
    assert report.finished == len(rolling.bodies("/end_episode")) >= 20


# more steps than the job still has: no others come
@pytest.mark.parametrize("steps", [None, 5])
async def test_claims_that_wait_when_the_last_step_is_done_are_given_up(
    rolling: ScriptedServer, train: Train, steps: int | None
) -> None:
    rolling.script("/claim_episode", not_yet("No available episodes to claim."))
    rolling.script("/status", at(99), at(99), at(100, change=2))
    report = await train(itertools.cycle(TASKS), reward, total_steps=steps)
    assert (report.finished, report.failed, report.last_step) == (0, 0, 100)


async def test_an_agent_that_fails_at_times_is_counted(rolling: ScriptedServer, train: Train) -> None:
    def agent(task: Task) -> WorkflowOutput:
        if task.task_id == "b":
            raise ValueError("broken")
        return reward(task)

    report = await train(TASKS, agent, auto_retry=False)
    assert (report.finished, report.failed) == (4, 2)
    assert len(rolling.bodies("/abort_episode")) == 2


@pytest.mark.parametrize("path", ["/end_episode", "/end_group"])
def test_why_the_server_trains_nothing_of_what_it_took_is_told_once(
    rolling: ScriptedServer, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    """The agent may ask another address than its episode's: its rewards are taken, and no step ever comes."""
    why = "not trained: no completed LLM call was recorded in the episode"
    rolling.script(path, {"success": True, "error": why})
    rolling.script("/claim_group", group("e1", "e2"))
    with SwarmClient(rolling.url, policy=QUICK) as client:
        options = TrainOptions(shuffle_rewards=path == "/end_group", max_parallel=2)
        report = begin_training(TASKS, client, lambda task, api: reward(task), options).result()
    assert report.finished == 6
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "'a'" in line and line.endswith(why)


async def test_an_agent_that_never_works_ends_it(rolling: ScriptedServer, train: Train) -> None:
    def agent(task: Task) -> WorkflowOutput:
        raise ValueError("broken")

    with pytest.raises(ExceptionGroup, match="episodes failed") as caught:
        await train(itertools.cycle(TASKS), agent, auto_retry=False, max_parallel=3)
    assert all(isinstance(error, ValueError) for error in caught.value.exceptions)
    assert len(rolling.bodies("/claim_episode")) < 20


async def test_an_agent_that_works_no_more_ends_it(rolling: ScriptedServer, train: Train) -> None:
    left = itertools.count()

    def agent(task: Task) -> WorkflowOutput:
        if next(left) > 5:
            raise ValueError("broken")
        return reward(task)

    tasks = itertools.islice(itertools.cycle(TASKS), 100)
    with pytest.raises(ExceptionGroup, match="4 episodes in a row failed") as caught:
        await train(lambda: tasks, agent, auto_retry=False, max_parallel=1)
    assert [str(error) for error in caught.value.exceptions] == ["broken"] * 4
    assert len(rolling.bodies("/end_episode")) == 6 and len(rolling.bodies("/claim_episode")) < 20


async def test_an_agent_whose_own_task_was_cancelled_has_failed(rolling: ScriptedServer, train: Train) -> None:
    def agent(task: Task) -> WorkflowOutput:
        if task.task_id == "b":
            # as who awaits a task that was cancelled
            raise asyncio.CancelledError
        return reward(task)

    report = await train(TASKS, agent, auto_retry=2)
    assert (report.finished, report.failed) == (4, 2)
    assert len(rolling.bodies("/abort_episode")) == 4, "it is not tried again"


async def test_a_line_that_is_down_for_a_while_fails_no_episode(rolling: ScriptedServer, train: Train) -> None:
    # more than all tries of all tasks, each with its client's
    rolling.script("/claim_episode", claimed(), *[DROP] * 150, claimed())
    rolling.script("/end_episode", {"success": True}, *[DROP] * 150, {"success": True})
    ran: list[Task] = []

    def agent(task: Task) -> WorkflowOutput:
        ran.append(task)
        return reward(task)

    report = await train(TASKS, agent, max_parallel=2)
    assert (report.finished, report.failed) == (6, 0)
    assert len(ran) == 6, "what an agent did is handed in once somebody answers"


async def test_a_server_that_is_gone_for_good_ends_it(
    rolling: ScriptedServer, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.client.training_run._MOST_IN_VAIN", 2)
    rolling.script("/claim_episode", claimed(), DROP)
    with pytest.raises(ExceptionGroup, match="4 episodes in a row failed") as failed:
        await train(itertools.cycle(TASKS), reward, max_parallel=4, auto_retry=False)
    assert "no swarm server answers" in str(failed.value.exceptions[0])


async def test_a_server_that_is_gone_for_good_is_waited_for_once(
    rolling: ScriptedServer, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for half an hour in each try of each task."""
    monkeypatch.setattr("swarm.client.training_run._MOST_IN_VAIN", 3)
    tries = QUICK.attempts
    rolling.script("/claim_episode", *[DROP] * (3 * tries), claimed(), DROP)
    with pytest.raises(ExceptionGroup, match="4 episodes in a row failed"):
        await train(itertools.cycle(TASKS), reward, max_parallel=1, auto_retry=2)
    waited = 4 * tries
    assert len(rolling.bodies("/claim_episode")) == waited - tries + 1 + waited + tries + 3 * 2 * tries


async def test_one_task_that_fails_again_and_again_ends_nothing(rolling: ScriptedServer, train: Train) -> None:
    def agent(task: Task) -> WorkflowOutput:
        if task.task_id == "b":
            raise ValueError("broken")
        return reward(task)

    report = await train(TASKS, agent, epochs=3, auto_retry=False, max_parallel=1)
    assert (report.finished, report.failed) == (12, 6)


async def test_a_dataset_that_fails_ends_it(rolling: ScriptedServer, train: Train) -> None:
    def tasks() -> Iterator[Task]:
        yield TASKS[0]
        raise RuntimeError("no more data")

    with pytest.raises((RuntimeError, ExceptionGroup)) as caught:
        await train(tasks, reward)
    assert caught.group_contains(RuntimeError) if isinstance(caught.value, ExceptionGroup) else True


async def test_what_can_be_read_only_once_has_one_epoch(rolling: ScriptedServer, train: Train) -> None:
    with pytest.raises((ConfigError, ExceptionGroup)) as caught:
        await train(iter(TASKS), reward, epochs=2)
    assert "only once" in repr(caught.value)


async def test_a_server_without_a_job_is_told(rolling: ScriptedServer, train: Train) -> None:
    rolling.script("/status", at(0, job=None))
    with pytest.raises(ConflictError, match="no job"):
        await train(TASKS, reward)


@pytest.mark.parametrize(("scale", "mean"), [(1.0, "0.500"), (0.0004, "0.0002")])
async def test_progress_goes_to_stderr(
    rolling: ScriptedServer, train: Train, capsys: pytest.CaptureFixture[str], scale: float, mean: str
) -> None:
    def scaled(task: Task) -> WorkflowOutput:
        return WorkflowOutput(reward=scale * (1.0 if task.task_id == "a" else 0.25))

    await train(TASKS, scaled, progress=True)
    shown = capsys.readouterr()
    assert f"6 episodes, mean reward {mean}," in shown.err
    assert shown.out == ""


async def test_shuffled_rewards_are_those_of_the_tasks_other_episodes(
    rolling: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backwards(values: list[float], count: int) -> list[float]:
        return values[::-1]

    monkeypatch.setattr(random, "sample", backwards)
    rolling.script("/claim_group", *(group(*(f"{task}{n}" for n in range(4))) for task in range(3)))

    def agent(task: Task, api: EpisodeEndpoint) -> WorkflowOutput:
        return WorkflowOutput(reward=float(api.episode_uuid))

    report = control(rolling, agent)
    assert (report.finished, report.failed, report.mean_reward) == (12, 0, 11.5)
    for place, body in enumerate(rolling.bodies("/end_group")):
        given = {end["episode_uuid"]: end["workflow_output"]["reward"] for end in body["ends"]}
        assert given == {f"{place}{n}": 10.0 * place + 3 - n for n in range(4)}
        assert all(end["workflow_output"]["log_metrics"] == {"control.shuffled": 1.0} for end in body["ends"])
        assert body["task_id"] == TASKS[place].task_id
    # none of a task's episodes waits for another that the next step keeps from being claimed
    assert [body["count"] for body in rolling.bodies("/claim_group")] == [4, 4, 4]
    assert not rolling.bodies("/claim_episode")


@pytest.mark.parametrize("fails", ["agent", "end"])
async def test_a_control_runs_all_episodes_of_a_task_again_if_one_fails(rolling: ScriptedServer, fails: str) -> None:
    rolling.script("/claim_group", *(group(*(f"{claim}{n}" for n in range(4))) for claim in range(4)))
    deleted = Answer({"error": {"message": "the step began", "code": "episode_deleted"}}, 409)
    rolling.script("/end_group", *([deleted] if fails == "end" else []), {"success": True})

    def agent(task: Task, api: EpisodeEndpoint) -> WorkflowOutput:
        if fails == "agent" and api.episode_uuid == "02":
            raise ValueError("broken")
        return WorkflowOutput(reward=float(api.episode_uuid))

    report = control(rolling, agent)
    assert (report.finished, report.failed) == (12, 0)
    assert len(rolling.bodies("/claim_group")) == 4
    assert {body["episode_uuid"] for body in rolling.bodies("/abort_episode")} >= (
        {f"0{n}" for n in range(4)} if fails == "agent" else set[str]()
    )
    ended = [sorted(end["episode_uuid"] for end in body["ends"]) for body in rolling.bodies("/end_group")][-3:]
    assert ended == [[f"{claim}{n}" for n in range(4)] for claim in (1, 2, 3)]


async def test_a_task_that_fails_in_a_control_counts_with_each_episode(rolling: ScriptedServer) -> None:
    rolling.script("/claim_group", *(group(*(f"{claim}{n}" for n in range(4))) for claim in range(3)))

    def agent(task: Task, api: EpisodeEndpoint) -> WorkflowOutput:
        if task.task_id == "b":
            raise ValueError("broken")
        return reward(task)

    report = control(rolling, agent, auto_retry=False)
    assert (report.finished, report.failed) == (8, 4)


async def test_a_control_needs_room_for_the_episodes_of_a_task(rolling: ScriptedServer) -> None:
    with pytest.raises(ConfigError, match=r"4 episodes.*3 at most \(max_parallel\)"):
        control(rolling, lambda task, api: reward(task), max_parallel=3)


async def test_a_training_that_is_cancelled_abandons_what_its_agents_do(rolling: ScriptedServer) -> None:
    busy, never = threading.Event(), threading.Event()

    def agent(task: Task, api: EpisodeEndpoint) -> WorkflowOutput:
        busy.set()
        never.wait(20)
        return reward(task)

    with SwarmClient(rolling.url, policy=QUICK) as client:
        call = begin_training(itertools.cycle(TASKS), client, agent, TrainOptions(max_parallel=1))
        assert busy.wait(20)
        assert not call.done(0.0)
        call.cancel()
        assert call.done(20), "it waits for the agent"
        never.set()
    assert len(rolling.bodies("/abort_episode")) == 1


@pytest.mark.parametrize("saved", [0, 2])
async def test_an_engine_that_dies_before_the_last_evaluation_is_waited_for(
    rolling: ScriptedServer, saved: int
) -> None:
    evaluated, trained = threading.Event(), threading.Event()
    reports: list[EvaluationReport] = []
    failure = {"reason": "it was killed", "count": 1}
    died = at(2, 2) | {"engine": engine(EngineState.OFFLINE, step=2), "engine_failure": failure}
    if saved == 2:
        trained.set()
    rolling.script("/status", *[at(0)] * 2, Answer(died, wait=evaluated), at(saved, 3), Answer(at(2, 4), wait=trained))

    def agent(task: Task, api: EpisodeEndpoint) -> WorkflowOutput:
        if len(rolling.bodies("/end_episode")) > 20:
            trained.set()
        return reward(task)

    def on_done(report: EvaluationReport) -> None:
        reports.append(report)
        evaluated.set()

    # without end, but for the steps; a run that nothing was saved of does them again
    with SwarmClient(rolling.url, policy=QUICK) as client:
        evaluation = Evaluation(lambda: TASKS, every_steps=5, on_done=on_done)
        options = TrainOptions(total_steps=2, patient=True, evaluation=evaluation)
        call = begin_training(itertools.cycle(TASKS), client, agent, options)
        ended = call.done(20)
        trained.set()
        call.cancel()
    assert ended, "it waits for ever"
    assert [report.step for report in reports] == [0, 2]


async def test_an_engine_that_loses_the_weights_of_an_evaluation_trains_and_is_evaluated_again(
    rolling: ScriptedServer,
) -> None:
    evaluating, trained, never = threading.Event(), threading.Event(), threading.Event()
    reports: list[EvaluationReport] = []
    failure = {"reason": "it was killed", "count": 1}
    died = at(2, 3) | {"engine": engine(EngineState.OFFLINE, step=2), "engine_failure": failure}
    begun = threading.Event()
    after = [Answer(died, wait=evaluating), at(0, 4), Answer(at(2, 5), wait=trained)]
    rolling.script("/status", *[at(0)] * 2, Answer(at(2, 2), wait=begun), *after)

    def agent(task: Task, api: EpisodeEndpoint) -> WorkflowOutput:
        kinds = [body["episode_type"] for body in rolling.bodies("/claim_episode")]
        if kinds.count("train") > 10:
            begun.set()
        if begun.is_set() and kinds[-1] == "eval" and not evaluating.is_set():
            evaluating.set()
            never.wait(120)
        if evaluating.is_set() and kinds.count("train") > 60:
            trained.set()
        return reward(task)

    with SwarmClient(rolling.url, policy=QUICK) as client:
        evaluation = Evaluation(lambda: TASKS, every_steps=5, on_done=reports.append)
        options = TrainOptions(total_steps=2, patient=True, evaluation=evaluation, max_parallel=2)
        call = begin_training(itertools.cycle(TASKS), client, agent, options)
        assert evaluating.wait(20)
        ended = trained.wait(60)
        for event in (never, trained):
            event.set()
        call.done(60)
        call.cancel()
    assert ended, "the steps whose weights were lost are not done again"
    assert [report.step for report in reports] == [0, 2]


async def test_steps_that_others_take_during_an_evaluation_are_evaluated_as_well(rolling: ScriptedServer) -> None:
    taken = threading.Event()
    reports: list[EvaluationReport] = []
    rolling.script("/status", at(0), at(0), at(2, 2))

    def show(progress: Progress) -> None:
        if progress.step == 2:
            taken.set()

    def agent(task: Task, api: EpisodeEndpoint) -> WorkflowOutput:
        assert taken.wait(20)
        return reward(task)

    with SwarmClient(rolling.url, policy=QUICK) as client:
        evaluation = Evaluation(lambda: TASKS, every_steps=5, on_done=reports.append)
        options = TrainOptions(total_steps=2, evaluation=evaluation, on_progress=show)
        report = begin_training(itertools.cycle(TASKS), client, agent, options).result()
    assert [report.step for report in reports] == [0, 2], "the last weights were not evaluated"
    assert report.last_step == 2


async def test_whose_tasks_are_over_evaluates_no_steps_that_others_take(rolling: ScriptedServer) -> None:
    taken = threading.Event()
    reports: list[EvaluationReport] = []
    rolling.script("/status", at(0), at(0), at(1, 2))

    def show(progress: Progress) -> None:
        if progress.step == 1:
            taken.set()

    def agent(task: Task, api: EpisodeEndpoint) -> WorkflowOutput:
        assert taken.wait(20)
        return reward(task)

    with SwarmClient(rolling.url, policy=QUICK) as client:
        evaluation = Evaluation(lambda: TASKS, every_steps=1, on_done=reports.append)
        options = TrainOptions(total_steps=9, evaluation=evaluation, on_progress=show)
        begin_training([], client, agent, options).result()
    # with slow evaluations there would be no end of them while others train
    assert [report.step for report in reports] == [0]


class Claims(AsyncSwarmClient):
    """Grants nothing, and counts the claims."""

    claims = 0

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.claimed, self.statuses = asyncio.Event(), asyncio.Queue[list[ServerStatus]]()

    async def begin_episode(self, *_: Any, **__: Any) -> Any:
        self.claims += 1
        self.claimed.set()
        await asyncio.Event().wait()

    @asynccontextmanager
    async def watching_status(self, on_status: Callable[[ServerStatus], Awaitable[object]]) -> AsyncGenerator[Any]:
        async def watch() -> None:
            while statuses := await self.statuses.get():
                for status in statuses:
                    await on_status(status)

        watching = asyncio.create_task(watch())
        yield ServerStatus.model_validate(at(0))
        watching.cancel()


async def test_an_engine_that_goes_away_in_the_turn_in_which_it_is_back_is_asked_for_nothing() -> None:
    back = ServerStatus.model_validate(at(0))
    away = ServerStatus.model_validate(at(0) | {"engine": engine(EngineState.OFFLINE)})
    client = Claims()

    async def execute(task: Task, api: EpisodeEndpoint) -> WorkflowOutput:
        raise AssertionError("nothing is granted")

    async def turns() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    training = DatasetTraining(back, TrainOptions(patient=True, max_parallel=1))
    running = asyncio.create_task(training.run(client, each(TASKS), execute))
    await client.claimed.wait()
    client.statuses.put_nowait([away])
    await turns()
    client.statuses.put_nowait([back, away])
    await turns()
    assert client.claims == 1
    client.statuses.put_nowait([back])
    await turns()
    assert client.claims == 2
    running.cancel()
    await asyncio.wait([running])
    await client.close()


async def test_an_evaluation_of_weights_that_are_lost_later_is_made_again(rolling: ScriptedServer) -> None:
    reports: list[EvaluationReport] = []
    done = [threading.Event() for _ in range(4)]
    # step 1 is not saved when the engine dies
    answers = at(1, 2), at(0, 3), at(1, 4), at(2, 5)
    rolling.script(
        "/status", *[at(0)] * 2, *(Answer(answers[at_], wait=done[of]) for at_, of in enumerate((0, 1, 1, 2)))
    )

    def on_done(report: EvaluationReport) -> None:
        reports.append(report)
        done[len(reports) - 1].set()

    with SwarmClient(rolling.url, policy=QUICK) as client:
        evaluation = Evaluation(lambda: TASKS, every_steps=1, on_done=on_done)
        options = TrainOptions(total_steps=2, patient=True, evaluation=evaluation, max_parallel=2)
        call = begin_training(itertools.cycle(TASKS), client, lambda task, api: reward(task), options)
        ended = call.done(60)
        for event in done:
            event.set()
        call.done(20)
        call.cancel()
    assert ended, "it waits for ever"
    assert [report.step for report in reports] == [0, 1, 1, 2]


@pytest.mark.parametrize("shuffled", [False, True])
async def test_values_that_are_not_finite_are_left_out_with_a_warning(rolling: ScriptedServer, shuffled: bool) -> None:
    rolling.script("/claim_group", group("e1", "e2"))

    def agent(task: Task, api: EpisodeEndpoint) -> WorkflowOutput:
        return WorkflowOutput(reward=1.0, log_metrics={"loss": float("nan"), "length": 3.0})

    with (
        SwarmClient(rolling.url, policy=QUICK) as client,
        pytest.warns(RuntimeWarning, match="'loss' is nan: it is left"),
    ):
        begin_training(TASKS * 4, client, agent, TrainOptions(shuffle_rewards=shuffled)).result()


async def test_an_error_while_it_follows_the_engine_ends_it(rolling: ScriptedServer) -> None:
    rolling.script("/status", at(0), at(0), at(1, 2))

    def show(progress: Progress) -> None:
        if progress.step == 1:
            raise UnicodeEncodeError("ascii", "ä", 0, 1, "ordinal not in range(128)")

    rolling.script("/claim_episode", not_yet("No available episodes to claim."))
    with SwarmClient(rolling.url, policy=QUICK) as client:
        options = TrainOptions(on_progress=show)
        call = begin_training(itertools.cycle(TASKS), client, lambda task, api: reward(task), options)
        ended = call.done(20)
        call.cancel()
        assert ended, "it waits for ever"
        with pytest.raises(UnicodeEncodeError):
            call.result()


async def test_an_error_while_it_evaluates_is_not_forgotten_at_its_end(rolling: ScriptedServer) -> None:
    told = threading.Event()
    rolling.script("/status", at(0), at(0), at(1, 2))

    def show(progress: Progress) -> None:
        if progress.step == 1 and not told.is_set():
            told.set()
            raise OSError("the terminal is gone")

    def agent(task: Task, api: EpisodeEndpoint) -> WorkflowOutput:
        assert told.wait(20)
        return reward(task)

    with SwarmClient(rolling.url, policy=QUICK) as client:
        options = TrainOptions(on_progress=show, evaluation=Evaluation(lambda: TASKS, every_steps=5))
        call = begin_training(TASKS, client, agent, options)
        assert call.done(20)
        with pytest.raises(OSError, match="terminal"):
            call.result()


async def test_a_training_remembers_nothing_of_its_tasks() -> None:
    sizes: list[int] = []

    async def tasks() -> AsyncGenerator[int]:
        for number in range(6_000):
            yield number

    async def work(index: int, _: int) -> None:
        if index in (1_000, 5_999):
            sizes.append(tracemalloc.get_traced_memory()[0])

    tracemalloc.start()
    try:
        await sweep(tasks(), work, 1)
    finally:
        tracemalloc.stop()
    assert sizes[1] - sizes[0] < 100_000


async def test_errors_are_forgotten_once_a_task_has_succeeded() -> None:
    class Failure(Exception):
        pass

    errors: list[weakref.ref[Failure]] = []

    async def tasks() -> AsyncGenerator[str]:
        yield "fails"
        yield "works"
        yield "fails"
        yield "works"  # read when the one before is over
        gc.collect()
        assert [error() for error in errors] == [None, None]

    async def work(_: int, task: str) -> str:
        if task == "works":
            return task
        error = Failure("of this task")
        errors.append(weakref.ref(error))
        raise error

    assert await sweep(tasks(), work, 1) == [None, "works", None, "works"]
