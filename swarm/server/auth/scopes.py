"""Which scope each control route needs, the one place where that is said, and which scopes a caller has.

Invariant: a path that is not listed here, misspelt or new, needs ``admin``; nothing is open by omission.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from swarm.credentials import TokenScope

#: Exact path -> scope. Routes with parameters in their path cannot be listed, so they need ``admin``.
ROUTE_SCOPES: Mapping[str, TokenScope] = MappingProxyType(
    {
        "/status": "read",
        "/metrics": "read",
        "/openapi.json": "read",
        "/get_engine_status": "read",
        "/get_server_experiment_dir": "read",
        "/get_verbose_logs": "read",
        "/get_current_batch_rollout_pool_information": "read",
        "/claim_episode": "claim",
        "/claim_group": "claim",
        "/withdraw_claim": "claim",
        "/end_episode": "claim",
        "/end_group": "claim",
        "/abort_episode": "claim",
        "/can_continue_episode": "claim",
        "/is_episode_claimed": "claim",
        "/agree_sync_weight": "claim",
        # the engine without an episode: whoever may run episodes can sample from it anyway
        "/v1/chat/completions": "claim",
        "/v1/completions": "claim",
        "/v1/embeddings": "claim",
        "/v1/models": "read",
        "/v1/models/{name}": "read",
        "/tokenize": "claim",
        "/detokenize": "claim",
        # it tells the ids of everyone's episodes, and whoever knows an episode's id may end it
        "/get_episode_buffer": "admin",
        "/sync_train_config": "admin",
        "/sync_train_code": "admin",
        "/start_engine": "admin",
        "/stop_engine": "admin",
        "/push_verbose_log": "admin",
        # of AgentJet's own trainer
        "/register_episode": "admin",
        "/update_engine_status": "admin",
        "/update_current_batch_rollout_pool_information": "admin",
        "/update_current_batch_rollout_pool_information_and_fetch_instruction": "admin",
    }
)

#: Paths before and below which no token is asked for: probes, and episodes' addresses, which have keys of their own.
WITHOUT_TOKEN = ("/health", "/episodes/", "/groups/")


def needed_scope(path: str) -> TokenScope:
    """The scope that ``path`` needs."""
    if path.startswith("/v1/models/"):
        path = "/v1/models/{name}"
    return ROUTE_SCOPES.get(path, "admin")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request: the name of its token, for people and for the log, and what the token allows.

    :class:`~swarm.server.auth.middleware.Admission` puts it in ``scope["caller"]``.
    """

    name: str
    scopes: frozenset[TokenScope]

    def may(self, needed: TokenScope) -> bool:
        """Whether a route that needs ``needed`` is open to this caller."""
        return "admin" in self.scopes or needed in self.scopes or (needed == "read" and bool(self.scopes))
