"""Both clients offer the same, under the same names and with the same arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import swarm.client
from swarm.client import AsyncSwarmClient, SwarmClient

#: AgentJet's client, as AGENTJET's users know it.
AGENTJET = {
    "begin_episode",
    "end_episode",
    "abort_episode",
    "can_continue_episode",
    "get_episode_buffer",
    "get_engine_status",
    "get_global_step",
    "get_rollout_stat",
    "print_rollout_stat",
    "sync_train_config",
    "sync_train_code",
    "sync_train_code_from_dir",
    "start_engine",
    "stop_engine",
    "auto_sync_train_config_and_start_engine",
    "agree_sync_weight",
    "async_and_start_multi_engine",
    "add_entering_weight_sync_callback",
    "run_episodes_until_all_complete",
}
#: Where the facade keeps its asynchronous client.
ONLY_SYNC = {"connection"}
#: For the gateway, whose work is on the event loop.
ONLY_ASYNC = {"run_tracked", "record_pair", "record_rating", "follow_stages"}


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def parameters(function: Callable[..., Any]) -> dict[str, Any]:
    return {one.name: (one.default, one.kind) for one in inspect.signature(function).parameters.values()}


def test_both_offer_the_same_names_and_arguments() -> None:
    shared = public(AsyncSwarmClient) - ONLY_ASYNC
    assert public(SwarmClient) - ONLY_SYNC == shared >= AGENTJET
    for name in shared - {"client_uuid", "server_url", "started_server"}:
        assert parameters(getattr(SwarmClient, name)) == parameters(getattr(AsyncSwarmClient, name)), name
    ours = parameters(AsyncSwarmClient.__init__)
    del ours["http"]
    assert parameters(SwarmClient.__init__) == ours


def test_what_is_exported_is_there() -> None:
    assert all(hasattr(swarm.client, name) for name in swarm.client.__all__)
    assert {"SwarmThrottlePolicy", "auto_train_with_dataset"} <= set(swarm.client.__all__)
