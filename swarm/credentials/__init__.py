"""Keys and tokens: what is kept of them, the files they are kept in, and how a running server looks them up."""

from swarm.credentials.ring import Ring, matching
from swarm.credentials.store import Credential, CredentialFile, digest
from swarm.credentials.tokens import Token, TokenFile, TokenScope

__all__ = [
    "Credential",
    "CredentialFile",
    "Ring",
    "Token",
    "TokenFile",
    "TokenScope",
    "digest",
    "matching",
]
