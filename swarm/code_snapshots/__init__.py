"""Code snapshots: pack a folder of training code into an archive; unpack it on a server that trusts nothing in it."""

from swarm.code_snapshots.archive import CodeArchive, build_archive, left_out_lines
from swarm.code_snapshots.extract import check_and_extract
from swarm.code_snapshots.manifest import ArchiveLimits

__all__ = ["ArchiveLimits", "CodeArchive", "build_archive", "check_and_extract", "left_out_lines"]
