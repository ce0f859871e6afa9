"""The table of all routes: what each takes, answers and needs.

Invariant: every route of the app is in it (a test compares), and its models are the ones that the routes use; the
OpenAPI document and the names of routes in metrics are made from it. A route is opened by a ``token`` with a scope (see
:mod:`swarm.server.auth.scopes`), by the key of an ``episode`` or a group, or by anyone (``none``).
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field

from swarm import protocol
from swarm.http.openapi import OpenAIBody, Operation, Query
from swarm.protocol import EngineStatus, ServerStatus
from swarm.server.api.agentjet import TRAINER_PATHS
from swarm.server.api.dialects import MessagesRequest, ResponsesRequest
from swarm.server.api.serving import RELAYED_PATHS
from swarm.states import EngineState


class ChatCompletionRequest(OpenAIBody):
    """As OpenAI's, with vLLM's extras; ``model`` may be left out."""

    messages: list[dict[str, Any]]


class CompletionRequest(OpenAIBody):
    """As OpenAI's legacy one, with vLLM's extras; ``model`` may be left out. The prompt is text, or token ids."""

    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class ModelList(OpenAIBody):
    """The one model that is served."""

    data: list[dict[str, Any]]


class Health(BaseModel):
    """The server answers; its engine may be in any state."""

    status: str


_STATUS_QUERY = (
    Query("wait_state", "wait for this state, or OFFLINE", {"type": "string", "enum": [str(s) for s in EngineState]}),
    Query("after_change", "wait until `engine_changes` is another number", {"type": "integer"}),
    Query("wait_seconds", "for at most so long", {"type": "number", "minimum": 0, "maximum": 60}),
    Query("steps", "at most so many recent steps", {"type": "integer", "minimum": 0, "maximum": 1000}),
    Query("episodes", "at most so many running episodes", {"type": "integer", "minimum": 0, "maximum": 10_000}),
)
_NO_JOB = (409, "there is no training job yet")
_BACKLOG = (503, "the journal or the engine cannot take it now; `retry-after` says when to come back")
_NOT_YOURS = (404, "no such episode, or it is another client's")

_CALL_REFUSALS = (
    (409, "the episode is over; the code says how it ended"),
    (422, "the engine refuses the request"),
    (429, "too many calls at once"),
    (502, "the engine failed the call, and so did its repetitions"),
    (503, "no engine serves now; `retry-after` says when to come back"),
    (504, "the call took longer than the server allows"),
)

CONTROL: tuple[Operation, ...] = (
    Operation("GET", "/status", "Everything that a monitor shows", answer=ServerStatus, query=_STATUS_QUERY),
    Operation("GET", "/metrics", "Counters for Prometheus", media_type="text/plain"),
    Operation("GET", "/openapi.json", "This document", answer=OpenAIBody),
    Operation(
        "GET",
        "/get_engine_status",
        "State of the engine, for AgentJet's clients: WEIGHT_SYNCING for some seconds after clients agreed to it",
        answer=EngineStatus,
        query=(Query("exact", "`1`: the state as it is", {"type": "string"}),),
    ),
    Operation(
        "POST",
        "/sync_train_config",
        "Take a training job (ours or AgentJet's, as YAML) for the next start",
        request=protocol.SyncTrainConfigRequest,
        answer=protocol.SuccessResponse,
        refused=protocol.RefusedResponse,
        refusals=(_BACKLOG,),
    ),
    Operation(
        "POST",
        "/sync_train_code",
        "Take code, as a zip, that the next engine imports first",
        answer=protocol.SyncTrainCodeResponse,
        refused=protocol.RefusedResponse,
        upload="application/zip",
    ),
    Operation(
        "POST",
        "/start_engine",
        "Start the engine with the synced job",
        answer=protocol.StartEngineResponse,
        refusals=((409, "no job, or the engine is not OFFLINE"), _BACKLOG),
    ),
    Operation("POST", "/stop_engine", "Stop the engine", answer=protocol.SuccessResponse, refusals=(_BACKLOG,)),
    Operation(
        "POST",
        "/claim_episode",
        "Claim an episode",
        request=protocol.ClaimEpisodeRequest,
        answer=protocol.ClaimEpisodeResponse,
        refusals=((409, "an idempotency key of another claim"), _BACKLOG),
    ),
    Operation(
        "POST",
        "/claim_group",
        "Claim several episodes of one task, all or none",
        request=protocol.ClaimGroupRequest,
        answer=protocol.ClaimGroupResponse,
        refusals=((409, "an idempotency key of another claim"), _BACKLOG),
    ),
    Operation(
        "POST",
        "/end_episode",
        "End an episode with its reward",
        request=protocol.EndEpisodeRequest,
        answer=protocol.SuccessResponse,
        refused=protocol.LateEndResponse,
        refusals=(_NOT_YOURS, (409, "too late: the code says how the episode had ended"), _BACKLOG),
    ),
    Operation(
        "POST",
        "/end_group",
        "End several episodes of one task in one transition",
        request=protocol.EndGroupRequest,
        answer=protocol.SuccessResponse,
        refusals=(_NOT_YOURS, (409, "too late: the code says how an episode had ended"), _BACKLOG),
    ),
    Operation(
        "POST",
        "/withdraw_claim",
        "Let a claim that waits go; always succeeds",
        request=protocol.WithdrawClaimRequest,
        answer=protocol.SuccessResponse,
    ),
    Operation(
        "POST",
        "/abort_episode",
        "Give an episode up; always succeeds",
        request=protocol.AbortEpisodeRequest,
        answer=protocol.SuccessResponse,
        refusals=(_BACKLOG,),
    ),
    Operation(
        "POST",
        "/can_continue_episode",
        "Whether an episode is still this client's to run",
        request=protocol.EpisodeRequest,
        answer=protocol.CanContinueResponse,
        refusals=(_NO_JOB,),
    ),
    Operation(
        "POST",
        "/agree_sync_weight",
        "Say that this client has no more for the current batch",
        request=protocol.AgreeSyncWeightRequest,
        answer=protocol.AgreeSyncWeightResponse,
        refusals=(_NO_JOB, _BACKLOG),
    ),
    Operation(
        "GET",
        "/get_current_batch_rollout_pool_information",
        "What the current batch has and still needs",
        answer=protocol.PoolInformation,
    ),
    Operation("POST", "/get_episode_buffer", "The running episodes", answer=protocol.EpisodeBufferResponse),
    Operation(
        "POST",
        "/is_episode_claimed",
        "Whether an episode runs",
        request=protocol.IsEpisodeClaimedRequest,
        answer=protocol.BoolResponse,
    ),
    Operation("GET", "/get_server_experiment_dir", "The run folder", answer=protocol.ServerExperimentDirResponse),
    Operation(
        "POST",
        "/push_verbose_log",
        "Show a line in the monitor for half a minute",
        request=protocol.PushVerboseLogRequest,
        answer=protocol.SuccessResponse,
    ),
    Operation("GET", "/get_verbose_logs", "The lines that the monitor shows now", answer=protocol.VerboseLogsResponse),
    *(
        Operation("POST", path, "Refused: for AgentJet's own trainer", refusals=((409, "always"),))
        for path in TRAINER_PATHS
    ),
    Operation(
        "POST",
        "/v1/chat/completions",
        "The engine without an episode: as vLLM's, recorded and trained never",
        request=ChatCompletionRequest,
        answer=OpenAIBody,
        refusals=_CALL_REFUSALS,
        stream=True,
    ),
    *(
        Operation(
            "POST",
            path,
            "As vLLM's, but for the name of the model",
            request=OpenAIBody,
            answer=OpenAIBody,
            refusals=((404, "the engine has no such address"), *_CALL_REFUSALS),
            stream=path == "/v1/completions",
        )
        for path in RELAYED_PATHS
    ),
    Operation(
        "GET", "/v1/models", "The model that is served", answer=ModelList, refusals=((503, "there is no training job"),)
    ),
    Operation(
        "GET",
        "/v1/models/{name}",
        "The same by its name",
        answer=OpenAIBody,
        refusals=((404, "another is served"), (503, "there is no training job")),
    ),
)

DATA: tuple[Operation, ...] = (
    *(
        Operation(
            "POST",
            f"/episodes/{{episode_uuid}}/v1/{path}",
            f"The same chat in the form of {form}, errors included",
            request=request,
            answer=OpenAIBody,
            refusals=(*refusals, *_CALL_REFUSALS),
            stream=True,
            key="episode",
        )
        for path, form, request, refusals in (
            ("completions", "OpenAI's legacy Completions, of a raw prompt", CompletionRequest, ()),
            ("messages", "Anthropic's Messages", MessagesRequest, ()),
            ("responses", "OpenAI's Responses", ResponsesRequest, ((404, "an item is referred to that is not here"),)),
        )
    ),
    *(
        operation
        for base, noun in (("/episodes/{episode_uuid}", "an episode"), ("/groups/{group_uuid}", "a group"))
        for operation in (
            Operation(
                "POST",
                f"{base}/v1/chat/completions",
                f"Chat within {noun}: as vLLM's, and recorded for training",
                request=ChatCompletionRequest,
                answer=OpenAIBody,
                refusals=_CALL_REFUSALS,
                stream=True,
                key="episode",
            ),
            Operation(
                "GET",
                f"{base}/v1/models",
                "The model that is served",
                answer=ModelList,
                refusals=(_NO_JOB, (503, "no engine serves now")),
                key="episode",
            ),
        )
    ),
)

OPERATIONS: tuple[Operation, ...] = (
    Operation("GET", "/health", "Whether the server answers", answer=Health, key="none"),
    *CONTROL,
    *DATA,
)
