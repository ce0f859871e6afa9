"""Self-made certificates for tests of TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path

from swarm.http.serve import TLSFiles


def make_certificate(folder: Path, name: str = "server", password: str | None = None) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that is its own root, and its key, as files in ``folder``."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    protection = f"-passout pass:{password}" if password else "-nodes"
    what = f"-x509 -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1 {protection}"
    what += " -newkey ec -pkeyopt ec_paramgen_curve:prime256v1"
    subprocess.run(
        ["openssl", "req", *what.split(), "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return certificate, key


def make_tls(folder: Path) -> TLSFiles:
    """The same, ready to serve with."""
    return TLSFiles(*make_certificate(folder))
