"""The swarm: episodes, groups and the server that turns their rewards into training batches."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        # looked up when it is asked for: reading it takes longer than importing the package
        if name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("swarm-gateway")
        except PackageNotFoundError:
            return "0+unknown"
