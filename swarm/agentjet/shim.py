"""The import shim: AgentJet's module names, each with the names that its users import, found in this package.

Invariant: AgentJet itself wins wherever it can be imported. A module or a name that is not here is an ``ImportError``
that says where to look, so nothing of AgentJet is replaced by something that does less without a word.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from swarm.importer import load_attribute

_TOP = "ajet"
_JOB = {"AgentJetJob": "swarm.agentjet.job:AgentJetJob"}
_SCHEMA = {name: f"swarm.agentjet.schema:{name}" for name in ("Task", "WorkflowTask", "WorkflowOutput")}
_WORKFLOW = {"Workflow": "swarm.agentjet.workflow:Workflow"}
_TUNER = {"AjetTuner": "swarm.agentjet.workflow:Tuner", "ModelTuner": "swarm.agentjet.workflow:Tuner"}
_ENDPOINT = {"OpenaiBaseUrlAndApiKey": "swarm.agentjet.schema:OpenaiBaseUrlAndApiKey"}
_THROTTLE = {"SwarmThrottlePolicy": "swarm.protocol:SwarmThrottlePolicy"}
_EXECUTORS = {
    name: f"swarm.agentjet.executors:{name}"
    for name in ("BoundedThreadPoolExecutor", "PeriodicDrainThreadPoolExecutor")
}
_CLIENT = {
    "SwarmClient": "swarm.agentjet.client:SwarmClient",
    "run_episodes_until_all_complete": "swarm.agentjet.client:run_episodes_until_all_complete",
    "auto_train_with_dataset": "swarm.agentjet.client:auto_train_with_dataset",
    **_THROTTLE,
    **_EXECUTORS,
    **_JOB,
    **_ENDPOINT,
    "Task": _SCHEMA["Task"],
    "WorkflowOutput": _SCHEMA["WorkflowOutput"],
}
_READER_SETTINGS = {
    name: f"swarm.agentjet.readers:{name}"
    for name in ("AjetTaskReader", "HuggingfaceDatRepo", "JsonlDatasetFile", "JsonlTrainingFp")
}
_READERS = {
    name: f"swarm.agentjet.readers:{name}"
    for name in ("RouterTaskReader", "HuggingFaceTaskReader", "JsonlTaskReader", "RandomDummyTaskReader")
}

#: AgentJet's module -> its name -> where the object is. Older names of its modules are listed beside the newer ones.
_HOLDERS: dict[str, dict[str, str]] = {
    "ajet": {**_JOB, **_SCHEMA, **_WORKFLOW, **_TUNER},
    "ajet.copilot.job": _JOB,
    "ajet.default_config.ajet_config_schema": _READER_SETTINGS,
    "ajet.default_config.ajet_default": _READER_SETTINGS,
    "ajet.schema.task": _SCHEMA,
    "ajet.task_reader": _READERS,
    "ajet.task_reader.hf_dataset_reader": {"HuggingFaceTaskReader": _READERS["HuggingFaceTaskReader"]},
    "ajet.task_reader.jsonl_reader": {"JsonlTaskReader": _READERS["JsonlTaskReader"]},
    "ajet.tuner": _TUNER,
    "ajet.tuner_lib.as_oai_baseurl_apikey": _ENDPOINT,
    "ajet.tuner_lib.experimental.as_swarm_client": _CLIENT,
    "ajet.tuner_lib.experimental.interchange_utils": _THROTTLE,
    "ajet.tuner_lib.experimental.swarm_client": _CLIENT,
    "ajet.utils.message_utils": {"is_token_overflow_message": "swarm.agentjet.schema:is_token_overflow_message"},
    "ajet.utils.retry": {"retry_with_backoff": "swarm.agentjet.executors:retry_with_backoff"},
    "ajet.utils.thread_executors": _EXECUTORS,
    "ajet.workflow": _WORKFLOW,
}
#: The same, with the packages that hold them.
MODULES = {".".join(name.split(".")[:depth]): {} for name in _HOLDERS for depth in (1, 2, 3)} | _HOLDERS

_NOT_HERE = "docs/agentjet.md lists what swarm.agentjet has"


class Shim(MetaPathFinder, Loader):
    """Finds the modules of :data:`MODULES`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top = fullname.partition(".")[0]
        loaded = sys.modules.get(_TOP)
        # a path with AgentJet itself may have been added since
        if top != _TOP or (loaded is not None and getattr(loaded.__spec__, "loader", None) is not self):
            return None
        if fullname not in MODULES:
            raise ModuleNotFoundError(f"no module {fullname}: {_NOT_HERE}", name=fullname)
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        names = MODULES[module.__name__]
        module.__doc__ = f"{module.__name__} of AgentJet, as swarm.agentjet has it."
        vars(module)["__all__"] = sorted(names)
        vars(module)["__getattr__"] = partial(_attribute, module)


def _attribute(module: ModuleType, name: str) -> Any:
    """Find ``name`` when it is first asked for: an import of the shim alone loads nothing."""
    fullname = f"{module.__name__}.{name}"
    if fullname in MODULES:
        return import_module(fullname)
    if name.startswith("__"):
        raise AttributeError(f"module {module.__name__} has no attribute {name}")
    if name not in MODULES[module.__name__]:
        # of an AttributeError `from ... import` would lose the message
        raise ImportError(f"no {name} in {module.__name__}: {_NOT_HERE}", name=module.__name__)
    attribute = load_attribute(MODULES[module.__name__][name])
    setattr(module, name, attribute)
    return attribute


def install() -> bool:
    """Let ``import ajet`` find :mod:`swarm.agentjet`, unless AgentJet itself can be imported.

    Returns:
        Whether the shim answers: ``False`` where AgentJet itself is installed.
    """
    if not any(isinstance(finder, Shim) for finder in sys.meta_path):
        # last: what is installed is found first
        sys.meta_path.append(Shim())
    if (loaded := sys.modules.get(_TOP)) is not None:
        return isinstance(getattr(loaded.__spec__, "loader", None), Shim)
    spec = find_spec(_TOP)
    return spec is not None and isinstance(spec.loader, Shim)
