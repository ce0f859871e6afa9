import json
import subprocess
import sys

CODE = """
import logging, uvicorn
from gateway.cli.logs import log_to_stderr
log_to_stderr()
uvicorn.Config(None, log_level="warning")
for name in ("swarm.server.engine.controller", "uvicorn.error", "httpx"):
    logging.getLogger(name).info("news")
    logging.getLogger(name).warning("trouble")
"""


def test_servers_log_with_time_level_and_name() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=True)
    # the first two words are the date and the time
    assert [line.split(maxsplit=2)[2] for line in done.stderr.splitlines()] == [
        "INFO swarm.server.engine.controller: news",
        "WARNING swarm.server.engine.controller: trouble",
        "WARNING uvicorn.error: trouble",
        "WARNING httpx: trouble",
    ]
    assert all(line[:2] == "20" for line in done.stderr.splitlines())


AS_JSON = """
import logging, uvicorn
from gateway.cli.logs import log_to_stderr
log_to_stderr("json")
uvicorn.Config(None, log_level="warning")
for name in ("gateway.x", "uvicorn.error"):
    logging.getLogger(name).warning("trouble: %s", ValueError("what a user said"))
"""


def test_servers_log_objects_without_what_users_say() -> None:
    done = subprocess.run([sys.executable, "-c", AS_JSON], capture_output=True, text=True, timeout=60, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["level"], line["logger"], line["message"]) for line in lines] == [
        ("warning", "gateway.x", "trouble: ValueError"),
        ("warning", "uvicorn.error", "trouble: ValueError"),
    ]
