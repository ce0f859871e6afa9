"""Gateway configuration: each mistake is one line that names the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.cli.sections import read_gateway
from gateway.config.gateway import read_config
from gateway.routing.plan import Plan
from swarm.errors import ConfigError
from tests.gateway.conftest import write_hooks

INCUMBENT = "incumbent: {upstream: {base_url: http://api.example/v1}}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hooks: h\nprot: 1", "unknown key 'prot' .did you mean 'port'"),
        ("port: 1", "hooks is required"),
        ("hooks: h\nport: 70000", "port: "),
        ("hooks: h\nswarm_url: http://127.0.0.1:10086/v1", "ends with /v1"),
        ("hooks: h\nswarm_token: tökén", "token"),
        ("hooks: h\ncontrol: maybe", "control: "),
        ("hooks: h\nupstream: {base_url: ftp://x}", r"upstream\.base_url: "),
        ("hooks: h\nupstream: {base_url: 'http://[::1/v1'}", r"upstream\.base_url: must be an address like http"),
        ("hooks: h\nupstream: {base_url: 'http://big:80o1/v1'}", r"upstream\.base_url: must be an address like http"),
        ("hooks: h\nupstream: {base_url: 'http://big/v1?api-version=1'}", r"base_url: must be .* without a query"),
        ("hooks: h\nserve: {incumbent: {upstream: {base_url: 'http://'}}}", r"upstream\.base_url: must be an address"),
        ("hooks: h\nhost: 0.0.0.0", "set api_keys or keys_file"),
        ("hooks: h\napi_keys: ['']", "empty key"),
        ("hooks: h\napi_keys: [' ']", "empty key"),
        ("hooks: h\napi_keys: ['sha256:nothex']", "64 hexadecimal digits"),
        ("hooks: h\napi_keys: ['sha256:" + "ä" * 64 + "']", "64 hexadecimal digits"),
        ("hooks: h\nmodel_aliases: ['']", "model_aliases"),
        ("- hooks", "must be a mapping"),
        (
            f"hooks: h\nserve: {{{INCUMBENT}, gate: {{mode: auto}}}}",
            r"gate\.mode is auto, so set gate\.trial_every",
        ),
        (
            f"hooks: h\nwhen_batch_waits: single\nserve: {{{INCUMBENT}, gate: {{trial_every: 2}}}}",
            "leave when_batch_waits at best",
        ),
        (
            f"hooks: h\nserve: {{{INCUMBENT}, canary: {{shares: [0.5, 0.2]}}}}",
            r"each is above that before it, not \[0\.5, 0\.2\]",
        ),
        (f"hooks: h\nserve: {{{INCUMBENT}, canary: {{shares: 0.5}}}}", r"serve\.canary\.shares: must be a list"),
        (f"hooks: h\nserve: {{{INCUMBENT}, stage: dark}}", r"serve\.stage: "),
        ("hooks: h\nserve: {stage: shadow}", r"serve\.incumbent: "),
        ("hooks: h\nserve: {incumbent: {policy: 0, model: m}}", "leave out upstream and model"),
        ("hooks: h\nserve: {incumbent: {policy: -1}}", r"serve\.incumbent\.policy"),
        ("hooks: h\nserve: {incumbent: {policy: best, model: m}}", r"serve\.incumbent\.policy"),
        (f"hooks: h\nserve: {{{INCUMBENT}, gate: {{margn: 0.1}}}}", "serve.gate: unknown key 'margn'"),
        (f"hooks: h\nserve: {{{INCUMBENT}, gate: {{bounds: [1, 0]}}}}", "not below the upper one"),
        (f"hooks: h\nserve: {{{INCUMBENT}}}\nupstream: {{base_url: http://x/v1}}", "exclude each other"),
        ("hooks: h\nserve: {incumbent: {}}", r"an upstream \(base_url, \.\.\.\) or a model: give one of them"),
        ("hooks: h\nserve: {incumbent: {model: m, upstream: {base_url: http://x/v1}}}", "give one of them"),
        (f"hooks: h\nserve: {{{INCUMBENT}}}\nswarm_url: null", "serve needs a swarm server"),
        (f"hooks: h\nserve: {{{INCUMBENT}, shadow_fraction: 0, gate: {{trial_every: 2}}}}", "shadow_fraction is 0"),
        (f"hooks: h\nnum_repeat: 1\nserve: {{{INCUMBENT}, gate: {{trial_every: 2}}}}", "num_repeat is 1, so nothing"),
        (f"hooks: h\nserve: {{{INCUMBENT}, watch_share: 0, gate: {{trial_every: 2}}}}", "watch_share is 0"),
        (
            f"hooks: h\nserve: {{{INCUMBENT}, gate: {{suites: {{a: a.jsonl}}}}}}",
            r"gate\.suites needs gate\.trial_every",
        ),
        (
            f"hooks: h\nserve: {{{INCUMBENT}, gate: {{trial_every: 2, suites: {{a: a.jsonl}}}}}}",
            r"gate\.suites needs incumbent\.upstream\.model",
        ),
        (f"hooks: h\nserve: {{{INCUMBENT}, gate: {{trial_every: 2, suites: {{a@b: x}}}}}}", r"serve\.gate\.suites"),
        (f"hooks: h\nserve: {{{INCUMBENT}}}\ntrain_fraction: 0.5", "shadow_fraction says which"),
        (f"hooks: h\nserve: {{{INCUMBENT}}}\nfeedback_window_seconds: 5", "rate the incumbent's answers"),
        ("hooks: h\npass_through: [{name: all}]", "the rule 'all' has no condition"),
        ("hooks: h\npass_through: [{name: all, system: null, headers: {}}]", "the rule 'all' has no condition"),
        ("hooks: [", "not valid YAML"),
        ("{1: 2, hooks: h}", "."),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        read_gateway(file)
    assert "\n" not in caught.value.message
    assert str(file) in caught.value.message


@pytest.mark.parametrize(
    "text", ["api_keys: [hush\nport: 8000", 'api_keys: ["hush]', "upstream: {api_key: hush: x}", "swarm_token: @hush"]
)
def test_what_is_no_yaml_is_named_by_its_place_and_not_quoted(tmp_path: Path, text: str) -> None:
    file = tmp_path / "gateway.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="line 1, column") as caught:
        read_gateway(file)
    assert "hush" not in caught.value.message


@pytest.mark.parametrize(
    "settings",
    [
        {"default_route": "a", "model_aliases": ["gpt"], "routes": [{"name": "a"}, {"name": "b", "models": ["gpt"]}]},
        {"default_route": "a", "model_aliases": ["b"], "routes": [{"name": "a"}, {"name": "b"}]},
        {"routes": [{"name": "a", "models": ["b"]}, {"name": "b"}]},
        {"routes": [{"name": "a", "models": ["b"]}, {"name": "b", "models": ["gpt-*"]}]},
    ],
)
def test_a_name_that_two_routes_answer_to_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"routes: '(gpt|b)' is given more than once"):
        read_config({"hooks": "h", **settings})


def test_aliases_without_a_default_route_are_refused() -> None:
    with pytest.raises(ConfigError, match="model_aliases are names of the default route: set default_route"):
        read_config({"hooks": "h", "model_aliases": ["gpt"], "routes": [{"name": "a"}, {"name": "b"}]})


def test_an_alias_may_repeat_a_name_of_the_default_route() -> None:
    routes = [{"name": "a", "models": ["gpt"]}, {"name": "b", "models": ["c"]}]
    read_config({"hooks": "h", "default_route": "a", "model_aliases": ["gpt"], "routes": routes})


def test_defaults_are_loopback_and_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_TOKEN", "from-environment")
    config = read_config({"hooks": "my.module:hooks"})
    assert (config.host, config.port, config.keepalive_seconds) == ("127.0.0.1", 8000, 3.0)
    assert config.swarm_token.get_secret_value() == "from-environment"
    assert read_config({"hooks": "h", "swarm_token": "own"}).swarm_token.get_secret_value() == "own"
    upstream = {"base_url": "http://api.example/v1", "api_key": "sk-1\n"}
    config = read_config({"swarm_url": None, "upstream": upstream})
    assert config.upstream is not None and config.upstream.api_key.get_secret_value() == "sk-1"


def test_keys_open_the_host_and_stay_secret() -> None:
    config = read_config({"hooks": "h", "host": "0.0.0.0", "api_keys": ["hush"]})
    assert "hush" not in repr(config)


def test_relative_hooks_and_suites_lie_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "hooks").mkdir()
    suites = "suites: {a: a.jsonl, b: 'hf:any/thing', c: 'my.module:prompts'}"
    serve = f"serve: {{incumbent: {{model: m}}, gate: {{hook: hooks, trial_every: 2, {suites}}}}}\n"
    (tmp_path / "gateway.yaml").write_text(f"hooks: hooks\n{serve}")
    read = read_gateway(tmp_path / "gateway.yaml")
    assert read.serve is not None
    assert read.hooks == read.serve.gate.hook == str((tmp_path / "hooks").resolve())
    assert read.serve.gate.suites == {
        "a": str((tmp_path / "a.jsonl").resolve()),
        "b": "hf:any/thing",
        "c": "my.module:prompts",
    }


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        read_gateway(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("policy", "name", "version"),
    [("promoted", "the job's model", 0), (0, "the job's model", 0), (7, "the job's model, version 7", 7)],
)
def test_a_version_of_the_job_is_asked_below_its_swarm_server(
    tmp_path: Path, policy: str | int, name: str, version: int
) -> None:
    write_hooks(tmp_path / "h")
    server = {"swarm_url": "http://swarm:1/", "swarm_token": "secret"}
    config = read_config(server | {"hooks": str(tmp_path / "h"), "serve": {"incumbent": {"policy": policy}}})
    assert config.serve is not None and config.serve.incumbent_name == name
    [route] = Plan.of(config).routes
    assert route.upstream_key is not None
    upstream = route.upstream_key[0]
    assert upstream.base_url == f"http://swarm:1/kept/{version}/v1" and upstream.api_key.get_secret_value() == "secret"


def test_the_key_of_an_incumbent_stands_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hooks(tmp_path / "h")
    upstream = {"base_url": "http://api.example/v1", "api_key_env": "INCUMBENT_KEY", "model": "gpt"}
    settings = {"hooks": str(tmp_path / "h"), "serve": {"incumbent": {"upstream": upstream}}}
    config = read_config(settings)
    monkeypatch.delenv("INCUMBENT_KEY", raising=False)
    with pytest.raises(ConfigError, match="needs its key in the environment as INCUMBENT_KEY"):
        Plan.of(config)
    # a file of secrets ends in a line's end, which no header has
    monkeypatch.setenv("INCUMBENT_KEY", "secret\n")
    [route] = Plan.of(config).routes
    assert route.upstream_key is not None and route.upstream_key[0].api_key.get_secret_value() == "secret"
    assert route.is_default and not route.answers_to_served
