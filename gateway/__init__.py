"""The gateway: answers an unmodified app like vLLM and turns its requests into swarm episodes."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        import swarm

        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return swarm.__version__
