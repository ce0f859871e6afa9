"""What keeps web pages away from a server on loopback that asks for no key.

Invariant: a request that a browser sends on behalf of a foreign page, by its own origin or by a name that the page has
rebound to this machine, passes no :func:`check_loopback`.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import Scope

from swarm.errors import RequestError
from swarm.http.asgi import has_body, header
from swarm.http.client import is_loopback


def check_loopback(scope: Scope, remedy: str, origins: Collection[str] = ()) -> None:
    """Refuse a request that is not addressed to a loopback name (421) or comes from another host's page (403).

    Programs send no ``Origin``, and their ``Host`` is the address that they connect to, so they do not notice. Where
    every request must carry a key, which no foreign page has, it is not needed.

    Args:
        remedy: says to who comes by another name how to be let in.
        origins: of pages that are welcome.

    Raises:
        RequestError: the request is refused.
    """
    host = header(scope["headers"], b"host")
    # HTTP/1.0 needs no host; browsers always send one
    if host is not None and not _names_loopback(b"//" + host):
        raise RequestError(
            f"host {host.decode('latin-1')!r}: a caller without a key is answered at 127.0.0.1 and localhost only. "
            f"From a container (host.docker.internal) or another machine: {remedy}. Or use `ssh -L` to another "
            "machine, and start the container with `--network host`: both let 127.0.0.1 be used",
            code="foreign_host",
            status=421,
        )
    origin = header(scope["headers"], b"origin")
    # "null" (a file, a sandboxed frame) is anybody
    if origin is not None and origin.decode("latin-1") not in origins and not _names_loopback(origin):
        raise RequestError(
            f"origin {origin.decode('latin-1')!r}: pages of other hosts may not use a server without a key",
            code="foreign_origin",
            status=403,
        )


def check_type(scope: Scope, other: str | None = None) -> None:
    """Refuse a body whose content type is not JSON (415): a foreign page needs no preflight to send the other types.

    Args:
        other: the one type that the body has instead, in lower case; a page must need a preflight for it too.

    Raises:
        RequestError: the request is refused.
    """
    if not has_body(scope["headers"]):
        return
    media_type = header(scope["headers"], b"content-type") or b""
    if not (is_json(media_type) if other is None else _media_type(media_type) == other):
        wanted = "JSON with `content-type: application/json`" if other is None else f"`content-type: {other}`"
        message = f"content-type {media_type.decode('latin-1')!r}: send {wanted}"
        raise RequestError(message, code="unsupported_media_type", status=415)


@functools.lru_cache(maxsize=256)
def _names_loopback(url: bytes) -> bool:
    try:
        return is_loopback(urlsplit(url.decode("latin-1")).hostname or "")
    except ValueError:
        return False


@functools.lru_cache(maxsize=256)
def is_json(content_type: bytes) -> bool:
    """Whether a ``content-type`` says JSON."""
    kind = _media_type(content_type)
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _media_type(content_type: bytes) -> str:
    return content_type.decode("latin-1").partition(";")[0].strip().lower()
