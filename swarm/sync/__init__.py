"""Code snapshots: pack a folder of training code into an archive; unpack it on a server that trusts nothing in it."""

from swarm.sync.archive import CodeArchive, build_archive, left_out_lines
from swarm.sync.extract import check_and_extract
from swarm.sync.manifest import ArchiveLimits

__all__ = ["ArchiveLimits", "CodeArchive", "build_archive", "check_and_extract", "left_out_lines"]
