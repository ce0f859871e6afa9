import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.app import check
from gateway.cli.checks import check_plan
from gateway.cli.parts import run_dirs
from gateway.cli.sections import (
    parse_server,
    read_gateway,
    read_plan,
    read_server,
    read_train,
)
from gateway.config.gateway import read_config
from gateway.launch.plan import UpPlan
from swarm.data import located
from swarm.errors import ConfigError
from swarm.kept_adapters import MOST_KEPT, adapter_folder


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SWARM_TOKEN", raising=False)


def project(folder: Path, text: str) -> Path:
    """A folder with a model, a hook and the ``up`` file ``text``."""
    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text("{}")
    (folder / "hooks").mkdir()
    (folder / "hooks" / "on_compute_relative_reward.py").write_text(
        "def on_compute_relative_reward(task, candidates, context):\n    return [0.0 for _ in candidates]\n"
    )
    path = folder / "up.yaml"
    path.write_text(text)
    return path


def test_every_path_of_the_file_starts_from_the_file(tmp_path: Path) -> None:
    text = "job: {model: tiny, checkpoint_dir: kept}\n"
    text += "swarm: {run_dir: runs/a, job_defaults: defaults.yaml, port: 1, boot_timeout: 50}\n"
    text += "gateway: {hooks: hooks, keys_file: keys.yaml, request_log: {path: requests.jsonl}}"
    (tmp_path / "defaults.yaml").write_text("lr: 1.0e-5")
    plan = read_plan(project(tmp_path, text))
    [server] = plan.servers
    assert (server.job.model, server.job.model_name) == (str(tmp_path / "tiny"), "tiny")
    assert server.job.checkpoint_dir == str(tmp_path / "kept")
    assert server.run_dir == tmp_path / "runs" / "a"
    assert server.swarm_section["run_dir"] == str(tmp_path / "runs" / "a")
    assert server.swarm_section["job_defaults"] == str(tmp_path / "defaults.yaml")
    assert plan.gateway_section == {
        "hooks": str(tmp_path / "hooks"),
        "keys_file": str(tmp_path / "keys.yaml"),
        "request_log": {"path": str(tmp_path / "requests.jsonl")},
    }
    assert plan.addresses == [("127.0.0.1", 1), ("127.0.0.1", 8000)]
    assert server.boot_timeout > 50, "the server gives up a boot before we do"


def test_a_tilde_is_the_home_in_every_path_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "site").mkdir()
    (tmp_path / "lr.yaml").write_text("lr: 1.0e-5")
    text = "job: {model: ~/site/tiny, checkpoint_dir: ~/kept}\nswarm: {run_dir: ~/run, job_defaults: ~/lr.yaml}\n"
    text += "gateway: {hooks: ~/site/hooks, keys_file: ~/keys.json, request_log: {path: ~/log}, ui: {judgements: ~/j}}"
    path = project(tmp_path / "site", text)
    plan = read_plan(path)
    [server] = plan.servers
    assert (server.job.model, server.job.checkpoint_dir) == (str(tmp_path / "site" / "tiny"), str(tmp_path / "kept"))
    assert server.job.lr == 1e-5 and [server.run_dir] == run_dirs(path) == [tmp_path / "run"]
    assert plan.gateway_section == {
        "hooks": str(tmp_path / "site" / "hooks"),
        "keys_file": str(tmp_path / "keys.json"),
        "request_log": {"path": str(tmp_path / "log")},
        "ui": {"judgements": str(tmp_path / "j")},
    }
    assert located("~/a.jsonl", tmp_path / "site") == tmp_path / "a.jsonl"


def test_up_goes_by_the_servers_defaults_of_its_job_too(tmp_path: Path) -> None:
    text = "job: {model: tiny, lr: 2.0e-5}\nswarm: {job_defaults: defaults.yaml}\ngateway: {hooks: hooks}"
    (tmp_path / "defaults.yaml").write_text("{checkpoint_dir: kept, total_training_steps: 3, lr: 1.0e-5}")
    [server] = read_plan(project(tmp_path, text)).servers
    # with others, a second start would find no checkpoint, and begin the run anew
    assert (server.job.checkpoint_dir, server.job.total_training_steps) == (str(tmp_path / "kept"), 3)
    assert server.job.lr == 2e-5


def test_incumbents_that_are_models_are_planned_and_shared_by_routes(tmp_path: Path) -> None:
    # an override is what clients are told, and what the job's own engine takes
    length = "actor_rollout_ref.rollout.max_model_len: 900"
    job = f"{{model: tiny, max_prompt_length: 300, max_response_length: 20, overrides: {{{length}}}}}"
    routes = ["a", "b"]
    serve = "serve: {incumbent: {model: tiny, port: 8101, vllm: [--swap-space, '1']}}"
    text = "jobs:\n" + "".join(
        f"  {name}:\n    job: {job}\n    swarm: {{port: {port}}}\n" for port, name in enumerate(routes, 1)
    )
    text += "gateway:\n  routes:\n" + "".join(f"  - {{name: {name}, hooks: hooks, {serve}}}\n" for name in routes)
    plan = read_plan(project(tmp_path, text))
    [incumbent] = plan.incumbents
    assert (incumbent.model, incumbent.name, incumbent.port) == (str(tmp_path / "tiny"), "tiny", 8101)
    assert (incumbent.context_tokens, incumbent.answer_tokens) == (900, 20)
    assert incumbent.arguments == ("--swap-space", "1")
    assert plan.addresses[-1] == ("127.0.0.1", 8101)
    assert incumbent.routes == ("a", "b") and not plan.successions
    file = tmp_path / "up.yaml"
    follows = file.read_text().replace("incumbent: {model: tiny", "incumbent: {policy: promoted, model: tiny", 1)
    file.write_text(follows)
    [succession] = read_plan(file).successions
    assert (succession.route, succession.server) == ("a", plan.servers[0])
    assert succession.first == "tiny at 127.0.0.1:8101" and succession.name == "tiny"
    assert succession.template.arguments == ("--swap-space", "1")
    file.write_text(file.read_text().replace("{model: tiny, max", "{model: tiny, lora: {rank: 4}, max", 1))
    [succession] = read_plan(file).successions
    assert not succession.beside, "its engine may not serve while it trains"
    file.write_text(file.read_text().replace("{rank: 4}, max", "{rank: 4}, serving: always, max", 1))
    [succession] = read_plan(file).successions
    assert succession.beside and succession.name == "the job's model"
    assert succession.folder(7) == adapter_folder(plan.servers[0].run_dir, 7)
    file.write_text(file.read_text().replace("model: tiny, port: 8101", "model: gone, port: 8101"))
    with pytest.raises(ConfigError, match="there is no model folder"):
        read_plan(file)


def test_what_stands_above_routes_is_none_of_them(tmp_path: Path) -> None:
    serve = "serve: {incumbent: {policy: promoted, model: tiny}}"
    text = "job: {model: tiny}\nswarm: {run_dir: run}\n"
    text += f"gateway: {{hooks: hooks, {serve}, routes: [{{name: a}}, {{name: b}}]}}"
    plan = read_plan(project(tmp_path, text))
    assert [succession.route for succession in plan.successions] == ["a", "b"]
    assert [incumbent.routes for incumbent in plan.incumbents] == [("a", "b")]


def test_the_engine_of_a_job_answers_as_an_incumbent_also_where_its_server_takes_any_free_port(tmp_path: Path) -> None:
    job = "job: {model: tiny, lora: {rank: 4}, serving: always}\nswarm: {port: 0}\n"
    path = project(tmp_path, f"{job}gateway: {{hooks: hooks, serve: {{incumbent: {{policy: promoted}}}}}}")
    plan = read_plan(path)
    assert plan.successions and plan.servers[0].address == ("127.0.0.1", 0)
    # as `serve --check` reads it
    assert check(read_gateway(path)) == ["default"]


def test_an_incumbent_may_be_a_version_of_the_job_that_its_engine_answers_as(tmp_path: Path) -> None:
    job = "job: {model: tiny, lora: {rank: 4}, serving: always}\nswarm: {run_dir: run}\n"
    path = project(tmp_path, f"{job}gateway: {{hooks: hooks, serve: {{incumbent: {{policy: promoted}}}}}}")
    plan = read_plan(path)
    [succession], [beside] = plan.successions, plan.beside
    assert not plan.incumbents and succession.first == beside.name == "the job's model"
    text = path.read_text()
    path.write_text(text.replace("policy: promoted", "policy: 3"))
    with pytest.raises(ConfigError, match=r"models export --step 3 --out .*adapter-3 --run-dir "):
        read_plan(path)
    folder = adapter_folder(tmp_path / "run", 3)
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").touch()
    plan = read_plan(path)
    assert not plan.successions and plan.beside[0].name == "the job's model, version 3"
    for job in ("model: tiny", "model: tiny, lora: {rank: 4}, serving: between_steps"):
        path.write_text(text.replace("model: tiny, lora: {rank: 4}, serving: always", job))
        with pytest.raises(ConfigError, match="which only an engine can answer that trains an adapter"):
            read_plan(path)


def test_an_engine_is_spared_where_users_of_a_route_before_it_are_answered_without_it(tmp_path: Path) -> None:
    def spared(
        gateway: str, jobs: str = "jobs: {one: {job: {model: tiny}}, other: {job: {model: tiny}}}"
    ) -> list[bool]:
        path.write_text(f"{jobs}\ngateway: {{hooks: hooks, {gateway}}}")
        return [server.is_spared for server in read_plan(path).servers]

    path = project(tmp_path, "")
    upstream = "upstream: {base_url: 'http://127.0.0.1:1/v1'}"
    shadowed = f"serve: {{incumbent: {{{upstream}}}}}"
    assert spared(f"routes: [{{name: one}}, {{name: other, {shadowed}}}]") == [False, True]
    # what routes have from the top level is theirs
    assert spared(f"{shadowed}, routes: [{{name: one}}, {{name: other, serve: null}}]") == [True, False]
    assert spared(f"routes: [{{name: more, {upstream}}}]") == [True, False], "it is before the first"
    lora = "job: {model: tiny, lora: {rank: 4}, serving: always}"
    alone = "serve: {incumbent: {policy: promoted}}"
    for gateway, expected in ((alone, False), (upstream, True), (shadowed, True), ("routes: []", False)):
        assert spared(gateway, lora) == [expected]


def test_no_version_of_a_server_elsewhere_becomes_an_incumbent(tmp_path: Path) -> None:
    serve = "serve: {incumbent: {policy: promoted, model: tiny}}, swarm_url: 'http://elsewhere:10086'"
    path = project(tmp_path, f"job: {{model: tiny}}\ngateway: {{hooks: hooks, {serve}}}")
    with pytest.raises(ConfigError, match="the incumbent of the route default has policy: promoted, and its swarm_url"):
        read_plan(path)
    own = path.read_text().replace("http://elsewhere:10086", "http://localhost:10086/")
    path.write_text(path.read_text().replace("policy: promoted, ", ""))
    assert not read_plan(path).successions
    path.write_text(own)
    assert read_plan(path).successions, "it is the server of this file itself"
    route = f"{{name: one, {serve.partition(', swarm_url')[0]}}}"
    path.write_text(
        "jobs: {one: {job: {model: tiny}, swarm: {}}}\n"
        f"gateway: {{hooks: hooks, swarm_url: 'http://elsewhere:10086', routes: [{route}, {{name: others}}]}}"
    )
    assert read_plan(path).successions, "a route with the name of a job is before its server"


def test_routes_of_jobs_have_their_servers_although_none_is_named_above_them(tmp_path: Path) -> None:
    path = project(tmp_path, JOBS.replace("hooks: hooks", "hooks: hooks, swarm_url: null"))
    assert [server.name for server in read_plan(path).servers] == ["planner", "solver"]
    path.write_text(path.read_text().replace("[{", "[{name: nobody}, {"))
    with pytest.raises(ConfigError, match=r"routes\.0: set swarm_url, upstream or both: nothing would answer"):
        read_plan(path)


def test_no_more_versions_answer_than_an_engine_holds(tmp_path: Path) -> None:
    def plan(policies: Sequence[int | str]) -> UpPlan:
        text = "job: {model: tiny, lora: {rank: 4}, serving: always}\nswarm: {run_dir: run}\ngateway:\n  routes:\n"
        for number, policy in enumerate(policies):
            text += f"  - {{name: r{number}, hooks: hooks, serve: {{incumbent: {{policy: {policy}}}}}}}\n"
        path.write_text(text)
        return read_plan(path)

    path = project(tmp_path, "")
    for version in range(1, MOST_KEPT + 2):
        folder = adapter_folder(tmp_path / "run", version)
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").touch()
    fit = list(range(1, MOST_KEPT + 1))
    assert len(plan([*fit, 1]).beside) == MOST_KEPT + 1, "two routes may have one version"
    assert plan([*fit[2:], "promoted"]).successions
    for policies in ([*fit, MOST_KEPT + 1], [*fit[1:], "promoted"]):
        with pytest.raises(ConfigError, match="more incumbents are versions than its engine holds: 6"):
            plan(policies)


def test_the_swarm_section_may_be_missing(tmp_path: Path) -> None:
    path = project(tmp_path, "job: {model: tiny}\ngateway: {hooks: hooks}")
    first, second = read_plan(path), read_plan(path)
    assert first.servers[0].run_dir.is_relative_to(tmp_path)
    assert first.servers[0].token is None
    assert first.private_token != second.private_token and len(first.private_token) >= 43
    assert first.private_token not in repr(first)


def test_the_token_of_ups_own_processes_is_not_the_files(tmp_path: Path) -> None:
    path = project(tmp_path, "job: {model: tiny}\nswarm: {private_token: mine}\ngateway: {hooks: hooks}")
    with pytest.raises(ConfigError, match=r"up\.yaml, swarm: private_token is .* leave it out"):
        read_plan(path)


def test_hooks_that_do_not_load_are_found_before_anything_starts(tmp_path: Path) -> None:
    path = project(tmp_path, "job: {model: tiny}\ngateway: {hooks: hooks}")
    (tmp_path / "hooks" / "on_compute_relative_reward.py").write_text("def on_compute(\n")
    with pytest.raises(ConfigError, match=r"on_compute_relative_reward\.py"):
        read_plan(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("tls: {certificate: none.pem, key: none.key}", r"tls\.certificate: cannot read .*none\.pem"),
        ("request_log: {path: hooks}", "request_log: .*hooks is a folder"),
        ("keys_file: keys.json", "keys.json"),
        ("session_idle_seconds: 1200", r"session_idle_seconds .* is not below session_window_seconds"),
    ],
)
def test_what_the_gateway_would_refuse_is_found_before_anything_starts(
    tmp_path: Path, settings: str, message: str
) -> None:
    path = project(tmp_path, f"job: {{model: tiny}}\ngateway: {{hooks: hooks, {settings}}}")
    (tmp_path / "hooks" / "on_session_end.py").write_text("def on_session_end(session, context):\n    return 0.0\n")
    (tmp_path / "keys.json").write_text("{")
    (tmp_path / "keys.json").chmod(0o600)
    with pytest.raises(ConfigError, match=message):
        read_plan(path)


def test_hooks_of_a_route_that_gets_its_server_from_up_are_found_too(tmp_path: Path) -> None:
    settings = "swarm_url: null, upstream: {base_url: 'http://u/v1'}, hooks: hooks, routes: [{name: plain}]"
    path = project(tmp_path, f"jobs: {{solver: {{job: {{model: tiny}}}}}}\ngateway: {{{settings}}}")
    (tmp_path / "hooks" / "on_compute_relative_reward.py").write_text("def on_compute(\n")
    with pytest.raises(ConfigError, match=r"on_compute_relative_reward\.py"):
        read_plan(path)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["up", "train"])
def test_a_wrong_key_of_verl_is_refused_before_anything_starts(tmp_path: Path, command: str) -> None:
    pytest.importorskip("verl", reason="needs the cpu or gpu extra")
    job = "job: {model: tiny, device: cpu, overrides: {KEY: 0.3}}\nswarm: {run_dir: run}\n"
    own = {"up": "gateway: {hooks: hooks}", "train": "workflow: 'builtins:print'\ntasks: {train: tasks.jsonl}"}
    (tmp_path / "tasks.jsonl").write_text('{"question": "1 + 1?"}\n')
    path = project(tmp_path, job.replace("KEY", "actor_rollout_ref.actor.clip_ration") + own[command])

    def check() -> None:
        check_plan(read_plan(path) if command == "up" else read_train(path).up)

    with pytest.raises(ConfigError, match=r"clip_ration'; did you mean actor_rollout_ref\.actor\.clip_ratio "):
        check()
    assert not (tmp_path / "run").exists()
    path.write_text(path.read_text().replace("clip_ration", "clip_ratio"))
    check()


def test_an_empty_journal_is_a_new_one_unless_checkpoints_are_beside_it(tmp_path: Path) -> None:
    pytest.importorskip("verl", reason="needs the cpu or gpu extra")
    path = project(tmp_path, "job: {model: tiny}\nswarm: {run_dir: run, port: 0}\ngateway: {hooks: hooks, port: 0}\n")
    saved = tmp_path / "run" / "checkpoints" / "global_step_3"
    saved.mkdir(parents=True)
    # as a kill or a full disk leaves it before it has tables
    (tmp_path / "run" / "journal.db").touch()
    check_plan(read_plan(path))
    (saved / "score.json").write_text("{}")
    for early in ("go_on", "resume"):
        with pytest.raises(
            ConfigError, match=r"run/checkpoints holds checkpoints, and no .*journal\.db says .* restore"
        ):
            check_plan(replace(read_plan(path), earlier_run=early))


def test_the_token_comes_from_the_environment_unless_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_TOKEN", "from-env")
    assert parse_server({}, "flags", None).token == "from-env"
    assert parse_server({"token": "given"}, "flags", None).token == "given"


def test_a_misspelt_server_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'prot' \(did you mean 'port'\?\)"):
        parse_server({"prot": 1}, "flags", None)


def test_the_served_name_survives_the_resolution(tmp_path: Path) -> None:
    job_of = "{model: tiny, served_model_name: assistant}"
    [server] = read_plan(project(tmp_path, f"job: {job_of}\ngateway: {{hooks: hooks}}")).servers
    job = server.job
    assert (job.model, job.model_name) == (str(tmp_path / "tiny"), "assistant")
    assert "checkpoint_dir" not in job.model_fields_set, "a server's default is left to it"


def test_hooks_may_be_a_module_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    hooks = "def on_compute_relative_reward(task, candidates, context):\n    return [0.0 for _ in candidates]\n"
    (tmp_path / "rewards_of_a_test.py").write_text(f"import sys\n{hooks}\nhooks = sys.modules[__name__]\n")
    plan = read_plan(project(tmp_path, "job: {model: tiny}\ngateway: {hooks: 'rewards_of_a_test:hooks'}"))
    assert plan.gateway_section == {"hooks": "rewards_of_a_test:hooks"}
    assert plan.file is not None and plan.file.parent == tmp_path


JOBS = """
jobs:
  planner: {job: {model: tiny}}
  solver: {job: {model: tiny, lr: 1.0e-4}, swarm: {port: 7}}
gateway: {hooks: hooks, routes: [{name: solver, policy: first}]}
"""


def test_the_name_of_a_job_may_be_a_number(tmp_path: Path) -> None:
    plan = read_plan(project(tmp_path, "jobs: {7: {job: {model: tiny}}}\ngateway: {hooks: hooks}\n"))
    assert plan.gateway_section is not None and plan.gateway_section["routes"] == [{"name": "7"}]
    assert plan.servers[0].run_dir == tmp_path / "runs" / "7"


def test_several_jobs_have_ports_run_folders_and_routes_of_their_own(tmp_path: Path) -> None:
    plan = read_plan(project(tmp_path, JOBS))
    assert [server.name for server in plan.servers] == ["planner", "solver"]
    assert [server.run_dir for server in plan.servers] == [tmp_path / "runs" / name for name in ("planner", "solver")]
    assert plan.addresses == [("127.0.0.1", 10086), ("127.0.0.1", 7), ("127.0.0.1", 8000)]
    hooks = {"hooks": str(tmp_path / "hooks")}
    assert plan.gateway_section == {**hooks, "routes": [{"name": "solver", "policy": "first"}, {"name": "planner"}]}
    assert [route.hooks for route in read_config(plan.gateway_section).routes] == [hooks["hooks"]] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("swarm: {port: 7}", "swarm: {run_dir: runs/planner}"), "two jobs have one run folder"),
        (("{model: tiny", "{checkpoint_dir: kept, model: tiny"), "two jobs have one checkpoint_dir"),
        (("planner:", "a/b:"), "jobs has names .*'a/b'"),
        (("{job: {model: tiny}}", "{job: {model: tiny}, gateway: {}}"), "jobs.planner: unknown section 'gateway'"),
        (("lr: 1.0e-4", "learning: 1"), r"jobs\.solver\.job.*unknown key 'learning'"),
        (("gateway:", "job: {model: tiny}\ngateway:"), "unknown section 'job'"),
        (("[{name: solver, policy: first}]", "{solver: {}}"), "gateway.*routes"),
    ],
)
def test_what_is_wrong_with_several_jobs_is_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    assert change[0] in JOBS
    with pytest.raises(ConfigError, match=message):
        read_plan(project(tmp_path, JOBS.replace(*change)))


@pytest.mark.parametrize("routes", ["[{models: [a]}]", "[a]", "{name: a}", "a", "null"])
def test_routes_that_are_none_are_told_by_every_command_that_reads_the_file(routes: str, tmp_path: Path) -> None:
    path = project(tmp_path, f"job: {{model: tiny}}\ngateway: {{hooks: hooks, routes: {routes}}}\n")
    for read in (read_gateway, read_plan):
        with pytest.raises(ConfigError, match=r"up.yaml, gateway: routes"):
            read(path)


@pytest.mark.parametrize(
    ("host", "url"),
    [("::1", "http://[::1]:5"), ("::", "http://[::1]:5"), ("0.0.0.0", "http://127.0.0.1:5"), ("gpu", "http://gpu:5")],
)
def test_a_gateway_alone_finds_the_server_of_the_file(host: str, url: str, tmp_path: Path) -> None:
    path = project(tmp_path, f"job: {{model: tiny}}\nswarm: {{host: '{host}', port: 5}}\ngateway: {{hooks: hooks}}\n")
    assert read_gateway(path).swarm_url == url


def test_an_option_that_no_route_would_heed_is_refused(tmp_path: Path) -> None:
    path = project(tmp_path, "hooks: hooks\nroutes: [{name: one}, {name: two, num_repeat: 4}]\n")
    assert [route.num_repeat for route in read_gateway(path, {"num_repeat": 8}).routes] == [8, 4]
    assert read_gateway(path, {"port": 1}).port == 1
    path.write_text(JOBS)
    with pytest.raises(ConfigError, match=r"up\.yaml, gateway: --swarm-url changes nothing: solver, planner have"):
        read_gateway(path, {"swarm_url": "http://elsewhere:1"})


def test_a_file_that_is_a_link_is_read_again_as_it_was_read(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "mounted").mkdir()
    link = project(tmp_path / "site", "job: {model: tiny}\ngateway: {hooks: hooks}\n")
    target = link.rename(tmp_path / "mounted" / "up.yaml")
    link.symlink_to(target)
    plan = read_plan(link)
    assert plan.file is not None
    again = read_gateway(plan.file, servers={"": "http://127.0.0.1:1"})
    assert plan.gateway_section is not None and again.hooks == plan.gateway_section["hooks"]


def test_job_defaults_of_a_file_are_beside_it_whatever_the_flags_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "server.yaml").write_text("{job_defaults: defaults.yaml, run_dir: runs/a}\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config = read_server(tmp_path / "server.yaml", {"run_dir": "runs/b"})
    assert config.job_defaults == tmp_path / "defaults.yaml"
    assert config.run_dir.absolute() == tmp_path / "elsewhere" / "runs" / "b"
