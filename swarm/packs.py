"""What packs add to the core, and the command line: the one place where the core names them, beside the tables of
commands and of built-in hooks.

Invariant: a pack that is not installed adds nothing, and nothing else fails for that.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from swarm.errors import ConfigError
from swarm.importer import load_attribute

#: The module of the command line, with which a client starts a server of its own.
COMMAND_LINE = "gateway.cli"

#: place in the core -> ``module:attribute`` of what a pack puts there
_ADDED = {
    # reads the text of a job: like :func:`swarm.job.read_fields`, in one form more
    "job": "swarm.agentjet.yaml_job:read_job",
    # loads a workflow: like :func:`swarm.client.workflow.load_workflow`, in two forms more
    "workflow": "swarm.agentjet.workflow:load_workflow",
    # what the server does for clients that were written for another server: a subclass of
    # :class:`swarm.server.foreign.ForeignClients`
    "foreign_clients": "swarm.agentjet.compat:AgentJetClients",
    # what they are answered in place of "the prompt is too long": (error, job, owner of the call) -> answer, or None
    "overflow_answer": "swarm.agentjet.compat:overflow_answer",
    # what a gateway serves at /ui, of its configuration and its keys
    "page": "gateway.page.page:WebPage",
    # what is private in the texts of a route, of its patterns and finders: a :class:`gateway.data.consent.PrivacyRules`
    "redaction": "gateway.redaction.rules:rules_of",
    # a request with placeholders for what is private; and its outcome with what they stand for
    "masked": "gateway.redaction.placeholders:masked",
    "filled": "gateway.redaction.placeholders:filled",
    # the alarms of a training run, from its steps and evaluations and the rules of ``swarm.watch``
    "watch": "swarm.evidence.watch:watched",
    # what a server tells the address of its setting ``webhook``, until it is cancelled
    "webhook": "swarm.server.webhook:Webhook",
    # the hooks that a YAML file of parts makes
    "blend": "reward_hooks.compose:make_blend",
    # verl's engine for language models, as a subclass
    "shared_prefixes": "adapters.verl.tree.shared_prefix:SharedPrefixEngine",
}


def added(target: str) -> Any | None:
    """What a pack adds at ``target``; None where no installed pack does."""
    return load_optional(_ADDED[target])


def required(target: str, setting: str) -> Any:
    """What a pack adds at ``target``, which ``setting`` asks for.

    Raises:
        ConfigError: no installed pack does.
    """
    addition = added(target)
    if addition is None:
        raise ConfigError(f"{setting} needs {_ADDED[target].partition(':')[0]}, which is not installed here")
    return addition


def installed(target: str) -> bool:
    """Whether an installed pack adds something at ``target``; imports none of it."""
    return _is_there(_ADDED[target])


def load_optional(spec: str) -> Any | None:
    """``module:attribute``, or None where there is no such module.

    Raises:
        ConfigError: the module is there and does not import, or lacks the attribute.
    """
    return load_attribute(spec) if _is_there(spec) else None


def _is_there(spec: str) -> bool:
    try:
        return find_spec(spec.partition(":")[0]) is not None
    except ModuleNotFoundError:  # of a package above it
        return False
