"""A job resolved by the engine's own code: verl's whole configuration, and where each value comes from."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from swarm.errors import ConfigError, EngineError
from swarm.job import layered
from swarm.server.engine.resolving import Resolver

resolve = pytest.importorskip("adapters.verl.resolve", reason="needs the cpu or gpu extra")

CLIP = "actor_rollout_ref.actor.clip_ratio"


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.json").write_text("{}")
    return str(tmp_path / "tiny")


def sources(tmp_path: Path, given: dict[str, Any], **layers: Any) -> tuple[dict[str, Any], dict[str, str]]:
    found = layered(given, **layers)
    answer = resolve.resolve(found.job, found.fields, found.overrides, tmp_path)
    return answer["config"], answer["sources"]


def test_each_value_says_where_it_comes_from(tmp_path: Path, model: str) -> None:
    config, told = sources(
        tmp_path,
        {
            **{"model": model, "device": "cpu", "batch_size": 4, "lr": 1e-6},
            "overrides": {"actor_rollout_ref.actor": {"clip_ratio": 0.3}},
        },
        set_={"num_repeat": 2, "+trainer.save_freq": 7, "tool_call_parser": "hermes"},
        server={"max_prompt_length": 100, "overrides": {"trainer.nnodes": 1, CLIP: 0.1}},
    )
    assert (config["actor_rollout_ref"]["rollout"]["n"], config["trainer"]["save_freq"]) == (2, 7)
    assert told[CLIP] == "job" and told["trainer.save_freq"] == "set" and told["trainer.nnodes"] == "server defaults"
    # a field that is set to what it is by default, too
    assert told["actor_rollout_ref.actor.optim.lr"] == "job: lr"
    assert told["actor_rollout_ref.rollout.n"] == "set: num_repeat"
    assert told["actor_rollout_ref.rollout.max_model_len"] == "server defaults: max_prompt_length"
    assert told["actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype"] == "job: device"
    assert told["actor_rollout_ref.rollout.engine_kwargs.vllm.tool_call_parser"] == "set: tool_call_parser"
    assert told["algorithm.rollout_correction.rollout_is"] == "swarm-gateway"
    assert told["actor_rollout_ref.actor.grad_clip"] == "verl"
    assert told["actor_rollout_ref.rollout.response_length"].startswith("verl: ${")
    assert not {"???"} & set(map(str, told.values()))


def test_environment_variables_stay_references(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "s3cret")
    overrides = {
        "trainer.project_name": "${oc.env:MY_API_KEY}",
        "trainer.experiment_name": "of ${trainer.project_name} and ${oc.env:NO_SUCH,null}",
    }
    config, _ = sources(tmp_path, {"model": model, "device": "cpu", "overrides": overrides})
    assert "s3cret" not in json.dumps(config, default=str)
    assert config["trainer"]["project_name"] == "${oc.env:MY_API_KEY}"
    assert config["trainer"]["experiment_name"] == "of ${oc.env:MY_API_KEY} and ${oc.env:NO_SUCH,null}"
    assert config["actor_rollout_ref"]["rollout"]["response_length"], "other references are resolved"
    # the engine itself gets the value
    assert OmegaConf.create({"key": "${oc.env:MY_API_KEY}"}).key == "s3cret"


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_wrong_key_is_refused_before_anything_starts(tmp_path: Path, model: str) -> None:
    resolver = Resolver(tmp_path)
    began = time.process_time()
    with pytest.raises(ConfigError, match=r"clip_ration'; did you mean actor_rollout_ref\.actor\.clip_ratio "):
        await resolver.resolve(layered({"model": model, "device": "cpu"}, set_={f"{CLIP}n": 0.3}), None)
    print(f"{time.process_time() - began:.2f} s here")
    with pytest.raises(ConfigError, match="no model folder"):
        await resolver.resolve(layered({"model": str(tmp_path / "none")}), None)
    # with synced code that cannot be imported
    (tmp_path / "code/adapters").mkdir(parents=True)
    (tmp_path / "code/adapters/__init__.py").write_text("raise SystemExit('broken by me')")
    with pytest.raises(EngineError, match="broken by me"):
        await resolver.resolve(layered({"model": model}), tmp_path / "code")
    assert json.loads(json.dumps((await resolver.resolve(layered({"model": model, "device": "cpu"}), None)).config))
