"""The incumbents of ``up`` that the job's own engine answers as: how one succeeds another."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.launch import incumbents
from gateway.launch.incumbents import Incumbents
from gateway.launch.plan import BesidePlan
from gateway.launch.succession import read_successors
from swarm.errors import NotFoundError, SwarmGatewayError, UnavailableError
from swarm.job import LoraSettings
from tests.gateway.launch.test_incumbents import SECTION, Site, up
from tests.processes import nothing_left_behind

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incumbents, "_LOOK", 0.02)


@contextmanager
def up_beside(folder: Path, lingers: float = 0.0) -> Generator[Site]:
    """The engine of its job answers as the incumbent from the beginning; nothing is served by a process."""
    with nothing_left_behind():
        site = Site(folder, lingers)
        [succession] = site.plan.successions
        job = succession.server.job.model_copy(update={"lora": LoraSettings(rank=4), "serving": "always"})
        server = replace(succession.server, job=job)
        site.plan = replace(
            site.plan,
            incumbents=(),
            successions=(replace(succession, server=server, name="the job's model", first="the job's model"),),
            beside=(BesidePlan("default", "the job's model", folder / "incumbents" / "adapter-0"),),
        )
        site.stages = [site.stage(site.first)]
        site.incumbents = Incumbents(site.plan, site.event, site.reload, site.client_of)
        try:
            site.incumbents.start()
            yield site
        finally:
            site.incumbents.stop(threading.Event())


def test_the_engine_of_the_job_answers_as_the_version_that_succeeds(tmp_path: Path) -> None:
    with up_beside(tmp_path) as site:
        assert site.incumbents.serves and site.told("beside") == [{"name": "the job's model", "route": "default"}]
        site.engine_error = UnavailableError("it boots", code="engine_offline")
        site.stages = [site.stage(site.first, successor=2)]
        site.until(lambda: len(site.asked_of_engines) > 1)
        assert not site.reloads, "the gateway asks it once it answers"
        site.engine_error = None
        site.until(lambda: site.reloads == 1)
        assert site.asked == {"policy": 2} and set(site.asked_of_engines) == {("", 2)}
        site.stages.append(site.stage("the job's model, version 2"))
        site.until(lambda: site.told("succeeded"))
        site.stages = [site.stage("the job's model, version 2", successor=4)]
        site.until(lambda: site.reloads == 2)
        site.stages.append(site.stage("the job's model, version 4"))
        site.until(lambda: len(site.told("succeeded")) == 2)
        assert [path.name for path in (tmp_path / "incumbents").iterdir()] == ["adapter-4"]
        assert not site.running() and not site.told("starting_incumbent")
    with up_beside(tmp_path) as site:
        assert site.told("beside") == [{"name": "the job's model, version 4", "route": "default"}]
        assert site.asked == {"policy": 4} and not site.running()
        # recalled: the model below the adapter
        stage = site.stage("the job's model, version 4")
        site.stages = [stage.model_copy(update={"recalled": True})]
        site.until(lambda: site.reloads == 1)
        assert site.asked == SECTION["serve"]["incumbent"]
        site.stages = [site.stage(site.first)]
        site.until(lambda: site.told("succeeded"))
        site.stages = [site.stage(site.first, successor=6)]
        site.until(lambda: site.reloads == 2)
    # the job is another, and its engine answers as one version
    with up(tmp_path) as site:
        assert site.asked["model"] == "base" and not site.told("beside")
        [warning] = site.told("warning")
        assert warning["message"].startswith("version 6 answers the route default no longer")
        # the gateway reads the file, too
        assert read_successors(site.incumbents.file) == {}


def test_a_version_that_the_engine_cannot_load_is_no_incumbent(tmp_path: Path) -> None:
    with up_beside(tmp_path) as site:
        site.engine_error = UnavailableError("version 2 does not answer: no tensors", code="version_not_kept")
        site.stages = [site.stage(site.first, successor=2)]
        site.until(lambda: site.told("warning"))
        assert "no tensors" in site.told("warning")[0]["message"] and not site.reloads
        assert not list((tmp_path / "incumbents").iterdir()), "other weights may come under its number"


@pytest.mark.parametrize(
    "error", [UnavailableError("all slots answer", code="engine_busy"), NotFoundError("it trains all weights")]
)
def test_a_passing_trouble_of_the_engine_is_told_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: SwarmGatewayError
) -> None:
    monkeypatch.setattr(incumbents, "_FOLLOWS", 0.05)
    with up_beside(tmp_path) as site:
        site.engine_error = error
        site.stages = [site.stage(site.first, successor=2)]
        site.until(lambda: site.told("warning"))
        asked = len(site.asked_of_engines)
        site.until(lambda: len(site.asked_of_engines) > asked + 3)
        [warning] = site.told("warning")
        assert warning["message"].endswith(f"is not the incumbent of the route default yet: {error.message}")
        site.engine_error = None
        site.until(lambda: site.reloads == 1)
        assert site.asked == {"policy": 2}


def test_an_engine_that_never_has_room_is_asked_so_often_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incumbents, "_REFUSALS", 3)
    with up_beside(tmp_path) as site:
        # while it is away, that it cannot load the version is not said
        site.engine_error = UnavailableError("it boots", code="engine_offline")
        site.stages = [site.stage(site.first, successor=2)]
        site.until(lambda: len(site.asked_of_engines) == 4)
        assert not site.told("warning")
        site.engine_error = UnavailableError("the adapter is of rank 512", code="engine_busy")
        site.until(lambda: site.told("warning"))
        assert "does not become the incumbent" in site.told("warning")[0]["message"]
        assert len(site.asked_of_engines) == 7 and not site.reloads


def test_the_adapter_of_the_incumbent_before_stays_for_its_last_answers(tmp_path: Path) -> None:
    with up_beside(tmp_path, lingers=1000.0) as site:
        site.stages = [site.stage(site.first, successor=2)]
        site.until(lambda: site.reloads == 1)
        site.stages.append(site.stage("the job's model, version 2"))
        site.until(lambda: site.told("succeeded"))
        site.stages = [site.stage("the job's model, version 2", successor=4)]
        site.until(lambda: site.reloads == 2)
        site.stages.append(site.stage("the job's model, version 4"))
        site.until(lambda: len(site.told("succeeded")) == 2)
        assert sorted(path.name for path in (tmp_path / "incumbents").iterdir()) == ["adapter-2", "adapter-4"]


def test_a_version_with_a_vllm_of_its_own_is_succeeded_by_one_of_the_engine(tmp_path: Path) -> None:
    (tmp_path / "serves").touch()
    with up(tmp_path) as site:
        site.stages = [site.stage(site.first, successor=2)]
        site.until(lambda: site.reloads == 1)
    with up_beside(tmp_path) as site:
        assert site.running() == ["incumbent tiny"]
        # it keeps the name under which it was written
        site.stages = [site.stage("tiny, version 2", successor=4)]
        site.until(lambda: site.reloads == 1)
        assert site.asked == {"policy": 4}
        site.stages = [site.stage("the job's model, version 4")]
        site.until(lambda: not site.running())
