"""The skill for coding agents, followed to the letter: its blocks run in an empty folder, and what they make is tested,
serves an application and is trained; only the engine process is a stand-in."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from anyio.from_thread import start_blocking_portal
from typer.testing import CliRunner

from gateway.cli.root import app
from tests.ports import free_ports
from tests.standins.upstream import Upstream
from tests.standins.vllm import listening
from tests.tutorial.readmes import SECONDS, commands, run, running

SKILL = Path(__file__).parents[2] / "docs" / "skills" / "build-agent" / "SKILL.md"
FOLDER = "tutorial/opencode_build_shop_agent"
#: the commands of its blocks, for this interpreter
_SHIM = f"""set -e
swarm-gateway() {{ {shlex.quote(sys.executable)} -m gateway.cli "$@"; }}
python() {{ {shlex.quote(sys.executable)} "$@"; }}
"""


def text() -> str:
    return SKILL.read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text(), re.DOTALL)


def test_it_is_printed() -> None:
    assert CliRunner().invoke(app, ["skill"]).output == text()


def test_its_front_matter_is_a_skills() -> None:
    _, head, _ = text().split("---\n", 2)
    fields = yaml.safe_load(head)
    assert fields.keys() == {"name", "description"} and fields["name"] == SKILL.parent.name
    assert len(fields["description"]) <= 1024


def test_an_agent_that_runs_its_blocks_starts_no_training() -> None:
    ran = [line for block in blocks("sh") for line in _outside_of_files(block)]
    assert sum("swarm-gateway" in line for line in ran) == 3
    starting = re.compile(r"swarm-gateway (train|serve|swarm|research|models|replay)\b|swarm-gateway up (?!.*--check)")
    assert [line for line in ran if starting.search(line)] == []


def _outside_of_files(block: str) -> list[str]:
    return re.sub(r"<<'END'\n.*?\nEND\n", "\n", block, flags=re.DOTALL).splitlines()


@pytest.mark.slow
@pytest.mark.usefixtures("model_and_engine")
def test_to_the_letter(tmp_path: Path) -> None:
    from openai import OpenAI

    work = tmp_path / "empty"
    work.mkdir()
    done = subprocess.run(
        ["bash", "-c", _SHIM + "\n".join(blocks("sh"))],
        cwd=work,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "tau with the rank  +1.000 over 6 groups" in done.stdout
    assert f"{FOLDER}/config.yaml: right" in done.stdout
    assert {one.name for one in work.iterdir()} == {"tutorial"}

    # the user's blocks, at ports that are free and with fewer steps
    untrained, trained = blocks("bash")
    gateway, swarm, upstream = free_ports(3)
    config = work / FOLDER / "config.yaml"
    config.write_text(config.read_text().replace("8000", str(gateway)).replace("10086", str(swarm)))
    for usual, free in (("8000", gateway), ("10086", swarm), ("11434", upstream), ("steps 20", "steps 1")):
        untrained, trained = (one.replace(usual, str(free)) for one in (untrained, trained))
    up, users = commands(f"```sh\n{trained}```")
    base_url = f"http://127.0.0.1:{gateway}/v1"
    with running(up, work):
        with OpenAI(base_url=base_url, api_key="none") as client:
            answer = client.chat.completions.with_raw_response.create(
                model="smollm2-135m", messages=[{"role": "user", "content": "Do you sell bells?"}]
            )
        assert answer.parse().choices[0].message.content
        # the best of the eight, by the reward that the skill has written
        assert answer.headers["x-swarm-reward"] == "1.0"
        assert "held-out prompts prove more" in run([*users, "--base-url", base_url], work)

    making = untrained.partition("swarm-gateway")[0]
    subprocess.run(["bash", "-c", making], cwd=work, check=True, timeout=SECONDS)
    serve, users = commands(f"```sh\n{untrained.removeprefix(making)}```")
    with (
        start_blocking_portal() as loop,
        loop.wrap_async_context_manager(listening(Upstream().app, upstream)),
        running(serve, work),
    ):
        run(users, work)
