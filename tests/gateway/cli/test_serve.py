"""``serve --check``: everything that can be wrong with a configuration, without serving."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gateway.cli.root import app
from swarm.errors import ConfigError
from tests.gateway.conftest import write_hooks
from tests.swarm.http.certificates import make_certificate

GOOD = """
hooks: hooks
keys_file: keys.json
tls: {certificate: server.pem, key: server.key}
default_route: plain
routes:
  - {name: writer, swarm_url: "http://127.0.0.1:10086"}
  - {name: plain, swarm_url: null, upstream: {base_url: "http://127.0.0.1:9/v1"}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    write_hooks(tmp_path / "hooks")
    make_certificate(tmp_path)
    path = tmp_path / "gateway.yaml"
    path.write_text(GOOD)
    return path


def run(config: Path, *flags: str) -> Result:
    return CliRunner().invoke(app, ["serve", "--check", "-c", str(config), *flags])


def test_a_configuration_that_is_right(config: Path) -> None:
    assert run(config).stdout == f"{config}: right, routes writer, plain\n"
    assert json.loads(run(config, "--json").stdout) == {"ok": True, "routes": ["writer", "plain"]}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("default_route: plain", "default_route: plian", "no route named 'plian'"),
        ("keys_file:", "keysfile:", "did you mean 'keys_file'"),
        ("hooks: hooks", "hooks: nowhere", "nowhere"),
        ("key: server.key", "key: other.key", r"tls\.key: cannot read"),
        ("keys.json", "gateway.yaml", "gateway.yaml"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(config: Path, old: str, new: str, message: str) -> None:
    config.write_text(GOOD.replace(old, new))
    config.chmod(0o600)
    result = run(config)
    assert isinstance(result.exception, ConfigError)
    with pytest.raises(ConfigError, match=message):
        raise result.exception
    as_json = run(config, "--json")
    assert as_json.exit_code == 2
    assert json.loads(as_json.stdout) == {"ok": False, "error": result.exception.message}
