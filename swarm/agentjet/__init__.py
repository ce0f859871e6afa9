"""What AgentJet's users bring: their job files, and their scripts, which import ``ajet``.

``python -m swarm.agentjet script.py`` runs a script with an import shim under AgentJet's module names;
:func:`install` puts the shim into this process. Importing this package does neither.
"""

from swarm.agentjet.shim import install

__all__ = ["install"]
