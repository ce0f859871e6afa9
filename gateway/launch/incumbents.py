"""The incumbents that ``up`` serves, and the challengers that succeed them.

Where a route's ``incumbent.policy`` is ``promoted``, a challenger that is proven live becomes the next incumbent: its
checkpoint is written as a model folder, another vLLM serves that, the gateway reads its settings anew, and the vLLM of
the incumbent before it stops once the last answers of that have ended. A version that people recall gives its place
back to the incumbent of the user's file, in the same way.

Invariant: who answers a route is what ``incumbents.yaml`` in the run folder says, else the user's file. That changes
once the next incumbent answers: a death at any moment leaves one of the two.
"""

from __future__ import annotations

import math
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gateway.config.takeover import name_of_version
from gateway.launch.children import FOLDER_VARIABLE, Child
from gateway.launch.plan import IncumbentPlan, SuccessionPlan, UpPlan, export_command
from gateway.launch.servers import LastingProcess, ended
from gateway.launch.succession import (
    OF_THE_FILE,
    RouteSuccession,
    ServedModel,
    Successor,
    named_successors,
    write_successors,
)
from gateway.launch.watch import OnEvent, UpFailedError
from swarm.client import SwarmClient
from swarm.errors import SwarmGatewayError
from swarm.evidence.stages import ServingStage
from swarm.http.serve import free_port, is_free
from swarm.importer import load_attribute, python_path
from swarm.kept_adapters import INCUMBENTS

_GRACE = 10.0
#: Seconds between two looks at the stages.
_LOOK = 5.0
#: Within which a gateway that was told of its next incumbent asks for the stage of that.
_FOLLOWS = 60.0
#: Looks at which the job's engine may say that it cannot answer with a version yet: an hour.
_REFUSALS = 720
#: Folders of versions, and what an export that was killed leaves of them.
_WRITTEN = re.compile(r"\.?(?:adapter-)?(?P<version>\d+)(?:\.\d+)?")


class Incumbents:
    """All that one ``up`` serves.

    Args:
        plan: its incumbents, and the routes that follow promotions.
        on_event: called with ``starting_incumbent``, ``beside``, ``succeeding``, ``succeeded``, ``warning``, and the
            events of :class:`LastingProcess`.
        reload: lets the gateway read its settings anew.
        client_of: the client of the server of the job of that name.
    """

    def __init__(
        self,
        plan: UpPlan,
        on_event: OnEvent,
        reload: Callable[[], None],
        client_of: Callable[[str], SwarmClient],
    ) -> None:
        self._plan = plan
        self._tell = on_event
        self._reload = reload
        self._client_of = client_of
        self._served: list[ServedModel] = []
        self._successions: list[RouteSuccession] = []
        self._successors: dict[str, Successor] = {}

    @property
    def file(self) -> Path:
        """Who answers which route."""
        return self._plan.folder / "incumbents.yaml"

    @property
    def serves(self) -> bool:
        """Whether all that answer users do so."""
        return all(served.process is None or served.process.serves for served in self._served)

    def start(self) -> None:
        """Start those of the plan, and in their place those that succeeded them before.

        Raises:
            ConfigError: what an earlier start wrote cannot be read.
        """
        beside = {planned.route: planned.beside for planned in self._plan.successions}
        named = named_successors(self.file) if beside else {}
        for route in beside.keys() & named.keys():
            successor = named[route]
            if not successor.folder.is_dir():
                why = f"its folder {successor.folder} is gone, and the incumbent of your file answers"
            elif successor.port is None and not beside[route]:
                # at each start and reload the gateway reads that file
                del named[route]
                write_successors(self.file, named)
                why = "it is an adapter, and with this job no engine surely answers with one beside the newest "
                why += "(job.lora, serving: always)"
            else:
                self._successors[route] = successor
                continue
            message = f"version {successor.version} answers the route {route} no longer: {why}"
            self._tell("warning", {"message": message})
        for planned in self._plan.incumbents:
            if routes := set(planned.routes) - self._successors.keys():
                self._served.append(ServedModel(Path(planned.model), self._started(planned), routes))
        for kept in self._plan.beside:
            if kept.route not in self._successors:
                self._tell("beside", {"name": kept.name, "route": kept.route})
        for planned in self._plan.successions:
            succession = RouteSuccession(planned, planned.first)
            self._successions.append(succession)
            if (successor := self._successors.get(planned.route)) is not None:
                succession.follows(successor)
                process = None
                if successor.port is None:
                    self._tell("beside", {"name": succession.stage_of, "route": planned.route})
                else:
                    if not is_free(successor.port):
                        successor = successor.model_copy(update={"port": free_port()})
                        self._write(planned.route, successor)
                    process = self._started(self._incumbent(planned, successor))
                self._served.append(ServedModel(successor.folder, process, {planned.route}))
        # later versions may be on their way; after a step back they come again under their numbers, with other weights
        answering = min((successor.version for successor in self._successors.values()), default=0)
        self._clear(below=answering if self._plan.from_step is None else math.inf)

    def look(self) -> None:
        """Report what is new, start again what died, and go on with each succession.

        Raises:
            UpFailedError: one that answers users died too often in a row.
        """
        now = time.monotonic()
        for served in self._served:
            if served.process is not None and (served.ends is None or served.process.child.exit_code is None):
                served.process.look()
        for succession in self._successions:
            self._go_on(succession, now)
        for served in [served for served in self._served if served.ends is not None and served.ends <= now]:
            self._served.remove(served)
            if served.process is not None:
                served.process.child.stop(_GRACE)
                _remove_logs(served.process)
            self._clear()

    def stop(self, hurry: threading.Event) -> None:
        """Stop all; a succession on its way goes on at the next start."""
        children = [served.process.child for served in self._served if served.process is not None]
        for succession in self._successions:
            children += [succession.writing] if succession.writing is not None else []
            children += [succession.booting.child] if succession.booting is not None else []
        for child in children:
            self._tell("stopping", {"name": child.name})
            child.stop(_GRACE, hurry)

    # ------------------------------------------------------------------ one succession

    def _go_on(self, succession: RouteSuccession, now: float) -> None:
        """From each step to the next: proven, written, booted, told, followed."""
        stages: list[ServingStage] | None = None
        try:
            if succession.writing is not None:
                self._written(succession, succession.writing)
            elif succession.booting is not None:
                succession.booting.look()
            if now >= succession.looked_at + _LOOK:
                succession.looked_at = now
                with suppress(SwarmGatewayError):  # a server that is away is others' to report
                    policies = self._client_of(succession.plan.server.name).policies().policies
                    stages = [policy.stage for policy in policies]
                if stages is not None:
                    self._read(succession, stages, now)
        except UpFailedError as exc:
            self._refuse(succession, exc.with_last_line)
        except OSError as exc:
            if not succession.recalling:
                self._refuse(succession, str(exc))
                return
            succession.looked_at = now + _FOLLOWS
            message = f"{succession.plan.first} does not answer the route {succession.plan.route} again yet: {exc}"
            self._tell("warning", {"message": message})

    def _read(self, succession: RouteSuccession, stages: Sequence[ServingStage], now: float) -> None:
        mine = succession.among(stages)
        if succession.awaited:
            # of a recalled version the gateway may have followed the incumbent before it until a minute ago
            if succession.awaited in mine and not (succession.recalling and succession.stage_of in mine):
                self._followed(succession, now)
            elif now > succession.told_at + (2 if succession.recalling else 1) * _FOLLOWS:
                succession.told_at = now
                message = f"{succession.label} serves, but the gateway does not ask it: see the gateway's log"
                self._tell("warning", {"message": message})
            return
        stage = mine.get(succession.stage_of)
        if stage is None:
            return
        if stage.recalled and succession.version:
            self._recall(succession, stage, now)
            return
        if succession.recalling:
            succession.recalling = False
            self._give_up(succession, f"{succession.stage_of} keeps its place: it was promoted once more")
        if succession.next is not None:
            if stage.successor is None:
                self._drop(succession)
            elif stage.pinned:
                return  # a person holds who answers
            elif succession.plan.beside and succession.writing is None:
                self._try(succession, succession.next, now)
            elif succession.booting is not None and succession.booting.serves:
                self._ask(succession, ServedModel(succession.next.folder, succession.booting), now)
            return
        if stage.pinned or stage.successor in (None, succession.version, *succession.refused):
            return
        plan, folder = succession.plan, succession.plan.folder(stage.successor)
        if any(other.writing and other.next and other.next.folder == folder for other in self._successions):
            return  # for another route of the job
        succession.next = Successor(version=stage.successor, name=plan.name, folder=folder, port=None)
        self._tell("succeeding", {"name": succession.label, "route": plan.route, "why": stage.why})
        if folder.is_dir():
            self._boot(succession, succession.next)
        else:
            folder.parent.mkdir(exist_ok=True)
            run_dir, job = plan.server.run_dir, plan.server.job
            # a model folder of an adapter's version has the weights below it, too
            merged = job.lora is not None and not plan.beside
            arguments = export_command(run_dir, stage.successor, folder, merged=merged)
            log = run_dir / "logs" / "incumbent-export.log"
            name = f"export of version {stage.successor}"
            succession.writing = Child(name, [*self._plan.command, *arguments], log, self._env)

    def _written(self, succession: RouteSuccession, writing: Child) -> None:
        if writing.exit_code is None:
            return
        succession.writing = None
        writing.stop(0.0)
        if writing.exit_code != 0 or succession.next is None:
            raise ended(writing)
        self._boot(succession, succession.next)

    def _try(self, succession: RouteSuccession, successor: Successor, now: float) -> None:
        """Have the job's engine answer with its adapter; while that is away or busy, again at the next look."""
        try:
            self._client_of(succession.plan.server.name).check_answers(successor.version)
        except SwarmGatewayError as exc:
            succession.refusals += exc.code == "engine_busy"
            if exc.code == "version_not_kept" or succession.refusals >= _REFUSALS:
                self._refuse(succession, exc.message)
            elif now > succession.warns_at:
                succession.warns_at = math.inf
                message = f"{succession.label} is not the incumbent of the route {succession.plan.route} yet: {exc}"
                self._tell("warning", {"message": message})
            return
        self._ask(succession, ServedModel(successor.folder, None), now)

    def _boot(self, succession: RouteSuccession, successor: Successor) -> None:
        if succession.plan.beside:
            succession.warns_at, succession.refusals = time.monotonic() + _FOLLOWS, 0
            return
        # chosen no sooner: somebody else may take it while the model is written
        succession.next = successor.model_copy(update={"port": free_port()})
        succession.booting = self._started(self._incumbent(succession.plan, succession.next))

    def _recall(self, succession: RouteSuccession, stage: ServingStage, now: float) -> None:
        """Give the place of a version back to the incumbent of the file, once that answers."""
        plan = succession.plan
        if not succession.recalling:
            if succession.next is not None:
                self._drop(succession)
            succession.recalling = True
            values = {"version": succession.version, "route": plan.route, "why": stage.why, "name": plan.first}
            self._tell("recalled", values)
        planned = next((planned for planned in self._plan.incumbents if plan.route in planned.routes), None)
        if planned is None:
            self._ask(succession, None, now)
        elif succession.booting is not None:
            if succession.booting.serves:
                self._ask(succession, ServedModel(Path(planned.model), succession.booting), now)
        elif (served := self._at(planned.port)) is not None:
            # its last answers, or other routes, have kept it; whether it died meanwhile says the next look
            looked_at, served.ends = served.ends is None, None
            if looked_at and served.process is not None and served.process.serves:
                self._ask(succession, served, now)
        elif OF_THE_FILE not in succession.refused:
            succession.booting = self._started(planned)

    def _drop(self, succession: RouteSuccession) -> None:
        """What is on its way was taken back."""
        booting = succession.booting
        self._give_up(succession, f"{succession.label} was taken back before it was the incumbent")
        if booting is not None:
            _remove_logs(booting)

    def _ask(self, succession: RouteSuccession, served: ServedModel | None, now: float) -> None:
        """Have the gateway ask ``served``, beside the one before it, or the upstream of the file."""
        plan, successor = succession.plan, succession.next
        self._write(plan.route, successor)
        succession.booting = None
        if served is not None:
            served.routes.add(plan.route)
            if served not in self._served:
                self._served.append(served)
        succession.taking, succession.told_at = served, now
        succession.awaited = plan.first if successor is None else name_of_version(plan.name, successor.version)
        self._reload()

    def _at(self, port: int) -> ServedModel | None:
        address = ("127.0.0.1", port)
        return next((it for it in self._served if it.process is not None and it.process.address == address), None)

    def _followed(self, succession: RouteSuccession, now: float) -> None:
        for served in self._served:
            if served is not succession.taking:
                served.routes.discard(succession.plan.route)
            if not served.routes and served.ends is None:
                served.ends = now + succession.plan.lingers
        self._tell("succeeded", {"name": succession.label, "route": succession.plan.route})
        succession.follows(succession.next)
        succession.next, succession.taking, succession.awaited, succession.recalling = None, None, "", False

    def _refuse(self, succession: RouteSuccession, reason: str) -> None:
        """Its incumbent stays; another version may succeed it, and this one after the next start."""
        message = f"{succession.label} does not become the incumbent of the route {succession.plan.route}: {reason}"
        succession.refused.add(OF_THE_FILE if succession.next is None else succession.next.version)
        self._give_up(succession, message)

    def _give_up(self, succession: RouteSuccession, message: str) -> None:
        """End what is on its way, and tell of it."""
        for child in (succession.writing, succession.booting and succession.booting.child):
            if child is not None:
                child.stop(_GRACE)
        succession.next = succession.writing = succession.booting = None
        self._tell("warning", {"message": message})
        # trained again after a step back, it has other weights
        self._clear()

    @property
    def _env(self) -> dict[str, str]:
        return {FOLDER_VARIABLE: str(self._plan.folder), "PYTHONPATH": python_path()}

    def _incumbent(self, plan: SuccessionPlan, successor: Successor) -> IncumbentPlan:
        return replace(plan.template, model=str(successor.folder), name=successor.name, port=successor.port or 0)

    def _started(self, planned: IncumbentPlan) -> LastingProcess:
        folder, name = self._plan.folder, f"incumbent {planned.name}"
        command = [*self._plan.command, *planned.command(folder / "incumbent")]
        log = folder / "logs" / f"incumbent-{planned.port}.log"
        size = load_attribute("adapters.models:weight_bytes")(planned.model)
        values = {"name": name, "gigabytes": round(size / 1e9, 2) if size else None, "log": str(log)}
        self._tell("starting_incumbent", values)
        boot_seconds = max(server.boot_timeout for server in self._plan.servers)
        process = LastingProcess(
            lambda: Child(name, command, log, self._env),
            self._tell,
            self._plan.restart_pause,
            "incumbent",
            boot_seconds,
        )
        process.address, process.serves = ("127.0.0.1", planned.port), False
        return process

    def _write(self, route: str, successor: Successor | None) -> None:
        successors = {name: other for name, other in self._successors.items() if name != route}
        if successor is not None:
            successors[route] = successor
        write_successors(self.file, successors)
        self._successors = successors

    def _clear(self, below: float = math.inf) -> None:
        """Remove the folders of versions ``below`` that answer nobody any more."""
        if any(succession.writing is not None for succession in self._successions):
            return
        answering = {served.folder for served in self._served}
        answering |= {beside.folder for beside in self._plan.beside}
        answering |= {Path(planned.model) for planned in self._plan.incumbents}
        answering |= {succession.next.folder for succession in self._successions if succession.next is not None}
        for succession in self._successions:
            for folder in (succession.plan.server.run_dir / INCUMBENTS).glob("*"):
                written = _WRITTEN.fullmatch(folder.name)
                if folder not in answering and written and int(written["version"]) < below:
                    shutil.rmtree(folder, ignore_errors=True)


def _remove_logs(process: LastingProcess) -> None:
    """Those of each of its starts: the next version has a port, and with it logs, of its own, and nothing else would
    bound their number."""
    log = process.child.log
    for path in log.parent.glob(f"{log.name}*"):
        path.unlink(missing_ok=True)
