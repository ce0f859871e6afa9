"""The certificate and key with which a server speaks TLS.

Invariant: files that cannot serve are told before a port is bound, in one line that names the file at fault.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from swarm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TLSFiles:
    """Files in PEM form: the certificate with the chain that leads to a root, and its key, not encrypted.

    Raises:
        ConfigError: a file is missing, no PEM, encrypted, or the key is another certificate's.
    """

    certificate: Path
    key: Path

    def __post_init__(self) -> None:
        for what, path in (("certificate", self.certificate), ("key", self.key)):
            try:
                with path.open("rb"):
                    pass
            except OSError as exc:
                raise ConfigError(f"tls.{what}: cannot read {path}: {exc.strerror or exc}", code="tls") from exc
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # without a password OpenSSL would ask the terminal for one
            context.load_cert_chain(self.certificate, self.key, password="")
        except (ssl.SSLError, ValueError) as exc:
            raise ConfigError(f"tls: {self._wrong(exc)}", code="tls") from exc

    def _wrong(self, error: Exception) -> str:
        reason = getattr(error, "reason", None) or ""
        if reason == "KEY_VALUES_MISMATCH":
            return f"{self.key} is not the key of the certificate {self.certificate}"
        if b"ENCRYPTED" in self.key.read_bytes():
            return f"the key {self.key} is encrypted: give it decrypted, readable by the gateway alone"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(self.certificate)
        except (ssl.SSLError, ValueError):
            return f"{self.certificate} holds no certificate in PEM form"
        return f"{self.key} holds no private key in PEM form ({reason or error})"
