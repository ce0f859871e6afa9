"""Jobs in AgentJet's form, as configurations of verl."""

from __future__ import annotations

from pathlib import Path

from adapters.verl import config
from swarm.agentjet.yaml_job import convert
from tests.swarm.agentjet.test_yaml_job import composed


def test_a_job_of_agentjets_client_names_only_keys_of_verl(tmp_path: Path) -> None:
    lora = {"lora_rank": 8, "lora_alpha": 16, "load_format": "safetensors", "layered_summon": True}
    job = convert(composed(lora=lora, trainer_common__ulysses_sequence_parallel_size=1)).job
    verl = config.verl_config(job, "/models/tiny", tmp_path, "cuda")
    actor = verl.actor_rollout_ref.actor
    assert (actor.optim.clip_grad, actor.fsdp_config.param_offload) == (20.0, True)
    assert verl.actor_rollout_ref.model.lora_rank == 8
    assert verl.actor_rollout_ref.rollout.load_format == "safetensors"
