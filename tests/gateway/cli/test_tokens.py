"""``swarm tokens``: what is printed where, and that a server takes what was made."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gateway.cli.credentials import parse_lifetime
from gateway.cli.root import app
from swarm.errors import AuthenticationError, ConfigError
from swarm.server.auth import TokenRing

ROOT = Path(__file__).parents[3]


def run(*arguments: str, run_dir: Path) -> Result:
    return CliRunner().invoke(app, ["swarm", "tokens", *arguments, "--run-dir", str(run_dir)])


def listed(run_dir: Path) -> list[dict[str, str]]:
    return json.loads(run("list", "--json", run_dir=run_dir).stdout)


def test_a_token_is_made_listed_and_revoked(tmp_path: Path) -> None:
    assert listed(tmp_path) == []
    assert run("list", run_dir=tmp_path).stdout == f"there is no token in {tmp_path / 'tokens.json'}\n"
    made = run("create", "ci", "--scope", "claim", "--scope", "read", "--expires", "30d", run_dir=tmp_path)
    assert made.exit_code == 0, made.output
    token = made.stdout.strip()
    ring = TokenRing(None, tmp_path)
    assert (
        TokenRing(None, tmp_path, private="of up").authenticate(b"of up").may("admin") and "restart" not in made.stderr
    )
    assert ring.authenticate(token.encode()).scopes == {"claim", "read"}
    assert "cannot be shown again" in made.stderr and token not in made.stderr
    assert "asks everyone from now on" in made.stderr
    [row] = listed(tmp_path)
    assert (row["name"], row["scopes"], row["state"]) == ("ci", ["claim", "read"], "active")
    lifetime = datetime.fromisoformat(row["expires"]) - datetime.now(UTC)
    assert timedelta(days=29, hours=23) < lifetime < timedelta(days=30)
    assert not {"sha256", "token"} & set(row)
    assert run("revoke", "ci", run_dir=tmp_path).stdout == "ci is revoked\n"
    assert listed(tmp_path)[0]["state"] == "revoked"
    with pytest.raises(AuthenticationError):
        ring.authenticate(token.encode())


def test_as_json_and_for_people(tmp_path: Path) -> None:
    done = run("create", "boss", "--scope", "admin", "--json", run_dir=tmp_path)
    made = json.loads(done.stdout)
    assert "asks everyone from now on" in done.stderr
    assert (made["name"], made["scopes"]) == ("boss", ["admin"])
    assert TokenRing(None, tmp_path).authenticate(made["token"].encode()).name == "boss"
    second = run("create", "a-day", "--scope", "claim", "--expires", "1d", run_dir=tmp_path)
    assert "asks everyone" not in second.stderr, "only the first token closes a door"
    one, other = run("list", run_dir=tmp_path).stdout.splitlines()
    assert one.split() == ["boss", "admin", "active"]
    assert other.split()[:4] == ["a-day", "claim", "active", "until"]
    gone = json.loads(run("revoke", "boss", "--json", run_dir=tmp_path).stdout)
    assert gone["name"] == "boss" and datetime.fromisoformat(gone["revoked"]) <= datetime.now(UTC)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["create", "x"], "Missing option '--scope'"),
        (["create", "x", "--scope", "root"], "'root' is not one of"),
        (["create", "a b", "--scope", "read"], "name"),
        (["create", "x", "--scope", "read", "--expires", "soon"], "such as 30m"),
        (["revoke", "nobody"], "no token 'nobody'"),
    ],
)
def test_wrong_input_is_said_and_writes_nothing(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = run(*arguments, run_dir=tmp_path)
    assert done.exit_code != 0
    assert said in done.output + str(done.exception)
    assert not (tmp_path / "tokens.json").exists()


def test_lifetimes() -> None:
    lifetimes = [parse_lifetime(text) for text in ("30m", "12h", "30d", "8w")]
    assert lifetimes == [timedelta(minutes=30), timedelta(hours=12), timedelta(days=30), timedelta(weeks=8)]
    for text in ("", "d", "0d", "-1d", "1.5h", "30", "30s", "³d", "9999999d"):
        with pytest.raises(ConfigError, match="--expires"):
            parse_lifetime(text)


def test_a_folder_that_is_misspelt_is_not_made(tmp_path: Path) -> None:
    nowhere = tmp_path / "runs" / "defualt"
    refused = CliRunner().invoke(app, ["swarm", "tokens", "revoke", "x", "--run-dir", str(nowhere)])
    assert "there is no token 'x'" in str(refused.exception)
    assert not nowhere.exists()
