"""``keys``: what is printed where, and that a gateway takes what was made."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from gateway.cli.root import app
from gateway.cli.sections import read_gateway
from gateway.keys.ring import KeyRing
from gateway.keys.store import KeyFile
from swarm.credentials import Ring, digest
from swarm.errors import ConfigError

CONFIG = """
hooks: length
keys_file: keys.json
routes:
  - {name: writer}
  - {name: critic}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "gateway.yaml"
    path.write_text(CONFIG)
    return path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["keys", *arguments])


def listed(config: Path) -> list[dict[str, Any]]:
    return json.loads(run("list", "--json", "-c", str(config)).stdout)


def test_a_key_is_made_listed_and_revoked(config: Path) -> None:
    assert listed(config) == []
    assert run("list", "-c", str(config)).stdout == f"there is no key in {config.parent / 'keys.json'}\n"
    made = run("create", "app", "-c", str(config), "--route", "writer", "--rpm", "60", "--expires", "30d")
    assert made.exit_code == 0, made.output
    key = made.stdout.strip()
    assert "cannot be shown again" in made.stderr and key not in made.stderr
    ring = KeyRing(read_gateway(config))
    assert ring.holder(digest(key)).caller.routes == frozenset({"writer"})
    [row] = listed(config)
    assert (row["label"], row["routes"], row["requests_per_minute"]) == ("app", ["writer"], 60)
    assert (row["state"], row["last_used"]) == ("active", None)
    lifetime = datetime.fromisoformat(row["expires"]) - datetime.now(UTC)
    assert timedelta(days=29, hours=23) < lifetime < timedelta(days=30)
    assert not {"sha256", "key"} & set(row)
    assert run("revoke", "app", "-c", str(config)).stdout == f"app ({row['id']}) is revoked\n"
    assert listed(config)[0]["state"] == "revoked"


def test_a_file_of_keys_that_is_a_link_stays_one_and_the_gateway_takes_its_keys(config: Path) -> None:
    (config.parent / "secret").mkdir()
    link = config.parent / "keys.json"
    link.symlink_to("secret/keys.json")
    first = run("create", "first", "--file", str(link)).stdout.strip()
    read = read_gateway(config)
    second = run("create", "second", "--file", str(link)).stdout.strip()
    ring = KeyRing(read)
    assert [ring.holder(digest(key)).caller.label for key in (first, second)] == ["first", "second"]
    assert link.is_symlink()


def test_a_gateway_follows_a_link_to_keys_that_leads_elsewhere_later(config: Path) -> None:
    """As those of a mounted secret do: what was revoked meanwhile stays in force nowhere."""
    for folder in ("first", "second"):
        (config.parent / folder).mkdir()
    link = config.parent / "keys.json"
    link.symlink_to("first/keys.json")
    key = run("create", "app", "--file", str(link)).stdout.strip()
    shutil.copy(config.parent / "first" / "keys.json", config.parent / "second" / "keys.json")
    # as a gateway has it
    settings = read_gateway(config)
    assert settings.keys_file is not None
    file = KeyFile(settings.keys_file)
    ring = Ring(file)
    assert run("revoke", "app", "--file", str(config.parent / "second" / "keys.json")).exit_code == 0
    link.unlink()
    link.symlink_to("second/keys.json")
    ring.refresh()
    found = ring.find(digest(key))
    assert found is not None and found.state(datetime.now(UTC)) == "revoked"
    # what gateways write is beside the file that they share, whatever link each has to it
    assert file.audit_path.parent == file.refusals_path.parent == config.parent / "first"


def test_as_json_and_by_file(tmp_path: Path) -> None:
    file = str(tmp_path / "keys.json")
    made = json.loads(run("create", "ops", "--admin", "--file", file, "--json").stdout)
    assert made["admin"] is True and made["key"].startswith("sk-swarm-") and "sha256" not in made
    text = run("list", "--file", file).stdout
    assert made["id"] in text and "admin" in text and "never used" in text and made["key"] not in text
    assert json.loads(run("revoke", made["id"], "--file", file, "--json").stdout)["label"] == "ops"


@pytest.mark.parametrize(
    ("option", "train", "listed_as"), [("--train", True, " trained"), ("--no-train", False, " never trained")]
)
def test_a_key_says_whether_it_is_trained(config: Path, option: str, train: bool, listed_as: str) -> None:
    key = run("create", "app", option, "-c", str(config)).stdout.strip()
    assert KeyRing(read_gateway(config)).holder(digest(key)).caller.train is train
    [row] = listed(config)
    assert row["train"] is train and listed_as in run("list", "-c", str(config)).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["create", "app", "--route", "wirter"], r"no route 'wirter'; there are: writer, critic"),
        (["create", "app", "--route", ""], "name a route, or leave it out"),
        (["create", "app", "--rpm", "0"], "requests_per_minute"),
        (["create", "app", "--expires", "soon"], "--expires"),
        (["revoke", "nobody"], "no key 'nobody'"),
        (["list", "--file", "other.json"], "by --file or by --config"),
    ],
)
def test_mistakes_are_said(config: Path, arguments: list[str], message: str) -> None:
    result = run(*arguments, "-c", str(config))
    assert isinstance(result.exception, ConfigError)
    with pytest.raises(ConfigError, match=message):
        raise result.exception


def test_a_configuration_without_a_file_of_keys_says_what_to_add(tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text("hooks: length")
    result = run("list", "-c", str(tmp_path / "gateway.yaml"))
    assert isinstance(result.exception, ConfigError) and "keys_file: keys.json" in result.exception.message


def test_a_key_may_have_a_side(config: Path) -> None:
    text = run("create", "staff", "--side", "challenger", "-c", str(config)).stdout.strip()
    assert listed(config)[0]["side"] == "challenger"
    assert "the challenger's" in run("list", "-c", str(config)).stdout
    assert KeyRing(read_gateway(config)).holder(digest(text)).caller.side == "challenger"
