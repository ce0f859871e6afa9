"""The researcher of the kill test: sends code, goes back, and restarts the engine each time; for ever.

``python -m tests.kill.researcher PORT FOLDER``; speaks to the proxy at PORT through ``SwarmClient``. It notes what it
was told in ``FOLDER/researcher.jsonl`` and ends when there is a file ``FOLDER/stop``. All files of one archive have the
same text, so that a mixture of two is told apart.
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
import time
import zipfile
from pathlib import Path

from swarm.client import RetryPolicy, SwarmClient
from swarm.code_snapshots.manifest import digest_of, manifest_of
from swarm.errors import SwarmGatewayError
from swarm.server.engine.snapshots import Snapshots
from swarm.states import EngineState
from tests.standins.engine import Log

FILES = 40


def archive(text: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as writer:
        writer.writestr("mine/__init__.py", text)
        for number in range(FILES):
            writer.writestr(f"mine/part{number}.py", text)
    return buffer.getvalue()


def half_applied(run_dir: Path) -> list[str]:
    """What is wrong with the snapshots of a dead server."""
    snapshots = Snapshots(run_dir)
    known = snapshots.all()
    wrong: list[str] = []
    try:
        snapshots.selected()
    except OSError as exc:
        wrong.append(f"the selected snapshot is not there: {exc}")
    for one in known:
        folder = snapshots.files(one.id)
        manifest = manifest_of(folder)
        texts = {path.read_text() for path in folder.rglob("*.py")}
        if digest_of(manifest) != one.digest or len(texts) != 1 or len(manifest) != FILES + 1:
            wrong.append(f"{one.id} has {len(manifest)} files with {len(texts)} texts")
    return wrong


def main(port: int, folder: Path) -> None:
    log = Log(folder / "researcher.jsonl")
    patient = RetryPolicy(attempts=10_000, base=0.05, cap=0.3, total=120.0)
    with SwarmClient(f"http://127.0.0.1:{port}", policy=patient, request_timeout=20.0) as client:
        while not (folder / "stop").exists():
            text = f"NUMBER = {time.time_ns()}\n"
            if random.random() < 0.25:
                with contextlib.suppress(SwarmGatewayError):
                    done = client.select_code(force_restart=True)
                    log.write(selected=done.snapshot and done.snapshot.id)
            else:
                done = client.sync_train_code(archive(text), force_restart=True)
                log.write(synced=done.snapshot and done.snapshot.id, changed=done.changed)
            # time for episodes and steps
            with contextlib.suppress(SwarmGatewayError):
                client.wait_for_state(EngineState.ROLLING, wait_seconds=5.0)
            time.sleep(random.uniform(0.0, 0.8))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
