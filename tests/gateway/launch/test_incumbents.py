"""The incumbents of ``up`` with scripted children: who answers before, while and after a challenger succeeds one."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from gateway.launch import incumbents
from gateway.launch.incumbents import Incumbents
from gateway.launch.plan import IncumbentPlan, SuccessionPlan, UpPlan
from gateway.launch.succession import Successor, read_successors, with_successors, write_successors
from swarm.client import SwarmClient
from swarm.errors import ConfigError, SwarmGatewayError
from swarm.evidence.stages import ServingStage, StageRules
from tests.gateway.launch.test_up import COMMAND, server_plan
from tests.ports import free_ports
from tests.processes import children, nothing_left_behind

pytestmark = pytest.mark.slow

BASE = IncumbentPlan("/models/base", "base", 0, 560, 48, routes=("default",))
SECTION: dict[str, Any] = {
    "hooks": "h",
    "serve": {"incumbent": {"model": "base", "policy": "promoted"}, "stage": "shadow"},
}


class Site:
    """What one ``up`` serves: looks at stages that the test sets, and counts what the gateway is told."""

    def __init__(
        self,
        folder: Path,
        lingers: float = 0.0,
        routes: tuple[str, ...] = ("default",),
        from_step: int | None = None,
    ) -> None:
        [port] = free_ports(1)
        base = replace(BASE, port=port, routes=routes)
        template = replace(base, model="", name="", routes=())
        first = f"base at 127.0.0.1:{port}"
        succession = SuccessionPlan("default", server_plan(folder), "tiny", first, template, lingers)
        self.folder = folder
        self.plan = UpPlan(
            servers=(server_plan(folder),),
            gateway_section=SECTION,
            incumbents=(base,),
            successions=(succession,),
            restart_pause=0.01,
            from_step=from_step,
            command=(*COMMAND, "tests.gateway.scripted_up", "steps"),
        )
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.reloads = 0
        self.stages = [self.stage(first)]
        self.asked_of_engines: list[tuple[str, int]] = []
        self.engine_error: SwarmGatewayError | None = None
        self.incumbents = Incumbents(self.plan, self.event, self.reload, self.client_of)

    def event(self, kind: str, values: dict[str, Any]) -> None:
        self.events.append((kind, values))

    def reload(self) -> None:
        self.reloads += 1

    def client_of(self, job: str) -> SwarmClient:
        def check_answers(version: int) -> None:
            self.asked_of_engines.append((job, version))
            if self.engine_error is not None:
                raise self.engine_error

        policies = SimpleNamespace(policies=[SimpleNamespace(stage=stage) for stage in self.stages])
        return cast(SwarmClient, SimpleNamespace(policies=lambda: policies, check_answers=check_answers))

    def stage(self, incumbent: str, successor: int | None = None) -> ServingStage:
        stage = ServingStage.begun("default", incumbent, StageRules(), 0.0, "salt")
        return stage.model_copy(update={"successor": successor, "share": 1.0})

    @property
    def first(self) -> str:
        return self.plan.successions[0].first

    @property
    def asked(self) -> dict[str, Any]:
        """The incumbent that the gateway reads."""
        return with_successors(SECTION, read_successors(self.incumbents.file))["serve"]["incumbent"]

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [values for told, values in self.events if told == kind]

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, self.events
            self.incumbents.look()
            time.sleep(0.02)

    def running(self) -> list[str]:
        flags = [flag for command in children("serve").values() for flag in command]
        return sorted(flag.replace("--name=", "incumbent ") for flag in flags if flag.startswith("--name="))


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incumbents, "_LOOK", 0.02)


@contextmanager
def up(
    folder: Path, lingers: float = 0.0, routes: tuple[str, ...] = ("default",), from_step: int | None = None
) -> Generator[Site]:
    with nothing_left_behind():
        site = Site(folder, lingers, routes, from_step)
        try:
            site.incumbents.start()
            yield site
        finally:
            site.incumbents.stop(threading.Event())


def test_a_challenger_that_is_proven_live_becomes_the_incumbent_and_the_next_one_after_it(tmp_path: Path) -> None:
    (tmp_path / "serves").touch()
    with up(tmp_path) as site:
        site.until(lambda: site.incumbents.serves)
        assert site.asked["model"] == "base" and site.running() == ["incumbent base"]
        site.stages = [site.stage(site.first, successor=2)]
        site.until(lambda: site.reloads == 1)
        # both are there until the gateway asks the new one
        assert site.running() == ["incumbent base", "incumbent tiny"]
        assert site.asked == {"model": "tiny", "port": site.asked["port"], "policy": 2}
        assert site.told("succeeding")[0]["name"] == "version 2 of tiny" and not site.told("succeeded")
        site.stages.append(site.stage("tiny, version 2"))
        site.until(lambda: site.running() == ["incumbent tiny"])
        assert site.told("succeeded") == [{"name": "version 2 of tiny", "route": "default"}]
        # what is proven against an incumbent of before begins nothing
        site.until(lambda: site.incumbents.serves)
        assert len(site.told("succeeding")) == 1
        # it had died once
        (tmp_path / "logs" / f"incumbent-{site.asked['port']}.log.1").write_text("killed")
        site.stages = [site.stages[0], site.stage("tiny, version 2", successor=4)]
        site.until(lambda: site.reloads == 2)
        site.stages.append(site.stage("tiny, version 4"))
        site.until(lambda: len(site.running()) == 1)
        assert site.asked["policy"] == 4
        assert [path.name for path in (tmp_path / "incumbents").iterdir()] == ["4"], "2 answers nobody any more"
        logs = [path.name for path in (tmp_path / "logs").glob("incumbent-[0-9]*")]
        assert logs == [f"incumbent-{site.asked['port']}.log"]
    assert (tmp_path / "exports").read_text().split() == ["2", "4"]


def test_the_same_command_goes_on_with_the_incumbent_of_before(tmp_path: Path) -> None:
    (tmp_path / "serves").touch()
    with up(tmp_path, lingers=1000.0) as site:
        site.stages = [site.stage(site.first, successor=2)]
        site.until(lambda: site.reloads == 1)
        site.stages.append(site.stage("tiny, version 2"))
        site.until(lambda: site.told("succeeded"))
        assert site.running() == ["incumbent base", "incumbent tiny"], "its last answers may go on"
        asked = site.asked
    with up(tmp_path) as site:
        assert site.asked == asked and site.running() == ["incumbent tiny"]
        site.stages = [site.stage("tiny, version 2", successor=2)]
        site.until(lambda: site.incumbents.serves)
        assert not site.told("succeeding"), "it is the incumbent"
    # whose folder is gone cannot be served, and the user's file says who answers
    shutil.rmtree(tmp_path / "incumbents")
    with up(tmp_path) as site:
        assert site.asked["model"] == "base" and site.running() == ["incumbent base"]
        [warning] = site.told("warning")
        gone = tmp_path / "incumbents" / "2"
        assert warning["message"] == (
            f"version 2 answers the route default no longer: its folder {gone} is gone, and the incumbent of your "
            "file answers"
        )
    # of a route that follows no promotions any more, the file says who answers
    left = {"version": 2, "name": "tiny", "folder": str(tmp_path), "port": 1}
    (tmp_path / "incumbents.yaml").write_text(yaml.safe_dump({"other": left}))
    with up(tmp_path, routes=("other",)) as site:
        assert site.running() == ["incumbent base"]
    (tmp_path / "incumbents.yaml").write_text("default: 7")
    with pytest.raises(ConfigError, match="does not say who answers"), up(tmp_path):
        pass


@pytest.mark.parametrize("reached", ["succeeding", "starting_incumbent", "written"])
def test_a_death_at_any_moment_leaves_one_of_the_two(tmp_path: Path, reached: str) -> None:
    if reached == "written":
        (tmp_path / "serves").touch()
    with up(tmp_path) as site:
        site.stages = [site.stage(site.first, successor=2)]
        begun = {
            "succeeding": lambda: site.told("succeeding"),
            "starting_incumbent": lambda: len(site.told("starting_incumbent")) == 2,
            "written": lambda: site.reloads,
        }
        site.until(begun[reached])
    answers = "tiny" if reached == "written" else "base"
    (tmp_path / "serves").touch()
    with up(tmp_path) as site:
        site.until(lambda: site.incumbents.serves)
        assert site.running() == [f"incumbent {answers}"] and site.asked["model"] == answers
        # what was on its way goes on
        site.stages = [site.stage(site.first if answers == "base" else "tiny, version 2", successor=2)]
        if answers == "base":
            site.until(lambda: site.reloads == 1)
            assert site.asked["model"] == "tiny"


def test_a_version_that_is_proven_on_two_routes_is_written_once_and_becomes_the_incumbent_of_both(
    tmp_path: Path,
) -> None:
    (tmp_path / "serves").touch()
    with up(tmp_path, routes=("default", "other")) as site:
        site.incumbents.stop(threading.Event())
        [succession] = site.plan.successions
        site.plan = replace(site.plan, successions=(succession, replace(succession, route="other")))
        site.incumbents = Incumbents(site.plan, site.event, site.reload, site.client_of)
        site.incumbents.start()
        stage = site.stage(site.first, successor=2)
        site.stages = [stage, stage.model_copy(update={"route": "other"})]
        site.until(lambda: site.reloads == 2 or site.told("warning"))
        assert not site.told("warning")
        assert {route: kept.version for route, kept in read_successors(site.incumbents.file).items()} == {
            "default": 2,
            "other": 2,
        }
    assert (tmp_path / "exports").read_text().split() == ["2"]


@pytest.mark.parametrize("before", ["ended", "lingers", "upstream"])
def test_a_version_that_is_recalled_gives_its_place_back(tmp_path: Path, before: str) -> None:
    (tmp_path / "serves").touch()
    with up(tmp_path, lingers=1000.0 if before == "lingers" else 0.0) as site:
        if before == "upstream":
            site.incumbents.stop(threading.Event())
            site.plan = replace(site.plan, incumbents=())
            site.incumbents = Incumbents(site.plan, site.event, site.reload, site.client_of)
            site.incumbents.start()
        site.stages = [site.stage(site.first, successor=2)]
        site.until(lambda: site.reloads == 1)
        site.stages = [site.stage("tiny, version 2")]
        site.until(lambda: site.told("succeeded"))
        site.until(lambda: len(site.running()) == 1 + (before == "lingers"))
        site.stages = [site.stages[0].model_copy(update={"recalled": True, "why": "users complain"})]
        site.until(lambda: site.reloads == 2)
        assert site.asked == SECTION["serve"]["incumbent"] and "incumbent tiny" in site.running()
        # its last answers end, once the gateway asks the one of the file
        site.stages = [site.stage(site.first)]
        site.until(lambda: len(site.told("succeeded")) == 2)
        recalled = {"version": 2, "route": "default", "why": "users complain", "name": site.first}
        assert site.told("recalled") == [recalled] and site.told("succeeded")[1]["name"] == site.first
        if before != "lingers":
            site.until(lambda: "incumbent tiny" not in site.running())
        # what is proven against it succeeds it again
        site.stages = [site.stage(site.first, successor=4)]
        site.until(lambda: site.reloads == 3)
        assert site.asked["policy"] == 4
    with up(tmp_path) as site:
        assert site.asked["policy"] == 4


def test_a_recalled_version_whose_successor_in_the_file_does_not_start_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "serves").touch()
    with up(tmp_path) as site:
        site.stages = [site.stage(site.first, successor=2)]
        site.until(lambda: site.reloads == 1)
        site.stages = [site.stage("tiny, version 2")]
        site.until(lambda: site.running() == ["incumbent tiny"])
        monkeypatch.setattr(incumbents.IncumbentPlan, "command", _without_flags)
        site.stages = [site.stages[0].model_copy(update={"recalled": True})]
        site.until(lambda: site.told("warning"))
        assert f"{site.first} does not become the incumbent" in site.told("warning")[0]["message"]
        assert site.running() == ["incumbent tiny"] and site.asked["policy"] == 2


def test_a_recalled_version_answers_on_where_the_incumbent_before_died_while_its_last_answers_ended(
    tmp_path: Path,
) -> None:
    (tmp_path / "serves").touch()
    with up(tmp_path, lingers=1000.0) as site:
        site.stages = [site.stage(site.first, successor=2)]
        site.until(lambda: site.reloads == 1)
        site.stages = [site.stage("tiny, version 2")]
        site.until(lambda: site.told("succeeded"))
        (tmp_path / "serves").unlink()
        for child in children(f"--port={site.plan.incumbents[0].port}"):
            child.kill()
        site.until(lambda: site.running() == ["incumbent tiny"])
        site.stages = [site.stages[0].model_copy(update={"recalled": True})]
        # it is started again, and nobody asks it before it serves
        site.until(lambda: site.running() == ["incumbent base", "incumbent tiny"])
        assert site.reloads == 1 and site.asked["policy"] == 2
        (tmp_path / "serves").touch()
        site.until(lambda: site.reloads == 2)
        assert site.asked["model"] == "base"


def test_a_recalled_version_that_is_promoted_once_more_keeps_its_place(tmp_path: Path) -> None:
    (tmp_path / "serves").touch()
    with up(tmp_path) as site:
        site.stages = [site.stage(site.first, successor=2)]
        site.until(lambda: site.reloads == 1)
        site.stages = [site.stage("tiny, version 2")]
        site.until(lambda: site.running() == ["incumbent tiny"])
        (tmp_path / "serves").unlink()
        site.stages = [site.stages[0].model_copy(update={"recalled": True})]
        site.until(lambda: site.running() == ["incumbent base", "incumbent tiny"])
        site.stages = [site.stage("tiny, version 2")]
        site.until(lambda: site.running() == ["incumbent tiny"])
        assert site.told("warning")[-1]["message"] == "tiny, version 2 keeps its place: it was promoted once more"
        assert site.asked["policy"] == 2


def test_a_challenger_that_is_taken_back_on_its_way_does_not_become_the_incumbent(tmp_path: Path) -> None:
    with up(tmp_path) as site:
        site.stages = [site.stage(site.first, successor=2)]
        site.until(lambda: len(site.told("starting_incumbent")) == 2)
        site.stages = [site.stage(site.first)]
        (tmp_path / "serves").touch()
        site.until(lambda: site.told("warning"))
        assert site.told("warning")[0]["message"] == "version 2 of tiny was taken back before it was the incumbent"
        assert site.running() == ["incumbent base"] and not site.reloads
        assert not list((tmp_path / "incumbents").iterdir()), "other weights may come under its number"
        assert len(list((tmp_path / "logs").glob("incumbent-[0-9]*"))) == 1, "nor its log"
        site.stages = [site.stage(site.first, successor=2)]
        site.until(lambda: site.reloads == 1)


def test_a_pin_holds_back_who_is_on_the_way_to_be_the_incumbent(tmp_path: Path) -> None:
    with up(tmp_path) as site:
        site.stages = [site.stage(site.first, successor=2)]
        site.until(lambda: len(site.told("starting_incumbent")) == 2)
        site.stages = [site.stages[0].set_pinned(True, "ann", "demo", 1.0)]
        (tmp_path / "serves").touch()
        site.until(lambda: len(site.told("incumbent_recovered")) == 2)
        looks = iter(range(20))
        site.until(lambda: next(looks, None) is None)
        # it waits, and is there at once when it may
        assert not site.reloads and not site.told("warning") and len(site.running()) == 2
        site.stages = [site.stages[0].set_pinned(False, "ann", "over", 2.0)]
        site.until(lambda: site.reloads == 1)


def _without_flags(plan: IncumbentPlan, folder: Path) -> list[str]:
    return ["models", "serve"]


def test_what_cannot_be_written_or_served_leaves_the_incumbent_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "serves").touch()
    (tmp_path / "no-export").touch()
    with up(tmp_path) as site:
        site.until(lambda: site.incumbents.serves)
        site.stages = [site.stage(site.first, successor=2)]
        site.until(lambda: site.told("warning"))
        message = site.told("warning")[0]["message"]
        assert message.startswith("version 2 of tiny does not become the incumbent of the route default: ")
        assert message.endswith("ended with exit code 1: swarm-gateway: step 2 is not kept")
        assert site.running() == ["incumbent base"]
        (tmp_path / "no-export").unlink()
        for _ in range(5):
            site.incumbents.look()
        assert len(site.told("succeeding")) == 1, "the same version is not tried again before the next start"
        # another one, whose vLLM dies at each start
        monkeypatch.setattr(incumbents.IncumbentPlan, "command", _without_flags)
        site.stages = [site.stage(site.first, successor=4)]
        site.until(lambda: len(site.told("warning")) == 2)
        assert "version 4 of tiny does not become" in site.told("warning")[1]["message"]
        assert site.running() == ["incumbent base"] and site.asked["model"] == "base" and site.reloads == 0


def test_a_run_that_goes_back_keeps_the_weights_that_answer_alone(tmp_path: Path) -> None:
    (tmp_path / "serves").touch()
    with up(tmp_path) as site:
        site.stages = [site.stage(site.first, successor=2)]
        site.until(lambda: site.reloads == 1)
        for name in ("4", ".6.123", "notes"):
            (tmp_path / "incumbents" / name).mkdir()
        (tmp_path / "incumbents" / "adapter-1").mkdir()
    with up(tmp_path) as site:
        assert (tmp_path / "incumbents" / "4").is_dir(), "what was on its way goes on"
        assert not (tmp_path / "incumbents" / "adapter-1").exists(), "it answers nobody any more"
    with up(tmp_path, from_step=1) as site:
        left = {path.name for path in (tmp_path / "incumbents").iterdir()}
        assert left == {"2", "notes"}, "what people put there is theirs"
        assert site.running() == ["incumbent tiny"]


def test_a_gateway_that_does_not_ask_the_next_one_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "serves").touch()
    monkeypatch.setattr(incumbents, "_FOLLOWS", 0.05)
    with up(tmp_path) as site:
        site.stages = [site.stage(site.first, successor=2)]
        site.until(lambda: site.told("warning"))
        assert "the gateway does not ask it" in site.told("warning")[0]["message"]
        assert site.running() == ["incumbent base", "incumbent tiny"]


def test_a_run_folder_that_was_moved_keeps_its_incumbent(tmp_path: Path) -> None:
    before = tmp_path / "before"
    (before / "incumbents" / "2").mkdir(parents=True)
    successor = Successor(version=2, name="tiny", folder=before / "incumbents" / "2", port=1)
    write_successors(before / "incumbents.yaml", {"default": successor})
    after = before.rename(tmp_path / "after")
    kept = read_successors(after / "incumbents.yaml")
    assert kept == {"default": successor.model_copy(update={"folder": after / "incumbents" / "2"})}


def test_a_file_that_follows_no_promotions_any_more_has_its_own_incumbent(tmp_path: Path) -> None:
    (tmp_path / "incumbents" / "2").mkdir(parents=True)
    successor = Successor(version=2, name="tiny", folder=tmp_path / "incumbents" / "2", port=1)
    section: dict[str, Any] = {
        "serve": {"incumbent": {"model": "base"}},
        "routes": [{"name": "a", **SECTION}, {"name": "b"}],
    }
    put = with_successors(section, {"default": successor, "a": successor})
    assert put["serve"] == section["serve"] and put["routes"][1] == {"name": "b"}
    assert put["routes"][0]["serve"]["incumbent"] == {"model": "tiny", "port": 1, "policy": 2}
    assert section["routes"][0]["serve"]["incumbent"]["model"] == "base"
    assert read_successors(tmp_path / "none.yaml") == {}


def test_a_route_that_has_its_incumbent_from_the_top_level_follows_promotions_too(tmp_path: Path) -> None:
    successor = Successor(version=2, name="tiny", folder=tmp_path, port=1)
    section: dict[str, Any] = {**SECTION, "routes": [{"name": "a"}, {"name": "b"}]}
    put = with_successors(section, {"a": successor})
    assert put["routes"][0]["serve"] == {**SECTION["serve"], "incumbent": {"model": "tiny", "port": 1, "policy": 2}}
    assert put["routes"][1] == {"name": "b"} and put["serve"] == SECTION["serve"]


@pytest.mark.parametrize(
    "section",
    [
        {"routes": [{"models": ["x"]}]},
        {"routes": [None, "x"]},
        {"routes": {"name": "a"}},
        {"serve": "live"},
        {"serve": {"incumbent": "promoted"}},
    ],
)
def test_successors_leave_a_wrong_file_to_the_check_that_says_what_is_wrong(section: dict[str, Any]) -> None:
    successor = Successor(version=7, name="tiny", folder=Path("7"), port=1)
    assert with_successors(section, {"a": successor, "default": successor}) == section
