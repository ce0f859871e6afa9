"""On PYTHONPATH of a test's processes: the swarm server they start runs the stand-in engine instead of verl.

``sys.argv`` is not there yet when Python imports this, ``sys.orig_argv`` is.
"""

import sys
import types

if {"up", "train"} & set(sys.orig_argv):
    import swarm.server.engine.changes

    async def nothing(config: object, job: object) -> None:
        """verl's adapter would check the job; there may be no verl."""

    swarm.server.engine.changes.check_job = nothing
if {"swarm", "start"} <= set(sys.orig_argv):
    import swarm.server.engine.supervisor
    from tests.tutorial.pupil import COMMAND

    swarm.server.engine.supervisor.ENGINE_COMMAND = COMMAND
    # verl would resolve a job; without verl there is nothing to resolve
    import swarm.server.engine.resolving

    swarm.server.engine.resolving.Resolver = lambda run_dir: None
if {"models", "serve"} <= set(sys.orig_argv):
    from tests.tutorial.incumbent import serve_model

    sys.modules["adapters.verl.serving"] = types.ModuleType("adapters.verl.serving")
    vars(sys.modules["adapters.verl.serving"])["serve_model"] = serve_model
