"""Keys of applications: those of the configuration, and virtual keys that are made and revoked while a gateway runs."""

from gateway.keys.middleware import KeyMiddleware
from gateway.keys.ring import KeyRing
from gateway.keys.store import KeyFile, VirtualKey

__all__ = ["KeyFile", "KeyMiddleware", "KeyRing", "VirtualKey"]
