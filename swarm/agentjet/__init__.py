"""What AgentJet's users bring: their job files, and their scripts, which import ``ajet``.

``python -m swarm.agentjet script.py`` runs a script with an import shim under AgentJet's module names;
:func:`install` puts the shim into this process. Importing this package does neither.
"""

from __future__ import annotations

__all__ = ["install"]


def install() -> bool:
    """Let ``import ajet`` find :mod:`swarm.agentjet`, unless AgentJet itself can be imported.

    Returns:
        Whether the shim answers: ``False`` where AgentJet itself is installed.
    """
    from swarm.agentjet.shim import install

    return install()
