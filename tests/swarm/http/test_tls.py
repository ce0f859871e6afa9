"""TLS: a server that speaks it, and files that cannot serve are one clear line."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.responses import PlainTextResponse

from swarm.errors import ConfigError
from swarm.http.client import ConnectionBrokenError, HttpClient
from swarm.http.serve import TLSFiles, bind, uvicorn_config
from tests.standins.vllm import listening
from tests.swarm.http.certificates import make_certificate, make_tls


@pytest.mark.anyio
async def test_a_server_speaks_tls_to_who_trusts_its_certificate(tmp_path: Path) -> None:
    tls = make_tls(tmp_path)
    body = "x" * 200_000
    config = uvicorn_config(PlainTextResponse(body), shutdown_seconds=1, log_level="error", tls=tls)
    config.lifespan = "off"
    server = uvicorn.Server(config)
    sock = bind("127.0.0.1", 0)
    running = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        trusting = ssl.create_default_context(cafile=str(tls.certificate))
        async with httpx.AsyncClient(verify=trusting, trust_env=False, timeout=30) as http:
            assert (await http.get(f"https://{address}/")).text == body
        async with httpx.AsyncClient(verify=ssl.create_default_context(), trust_env=False, timeout=30) as http:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await http.get(f"https://{address}/")
        http = HttpClient(keepalive=60, tls=trusting)
        assert [(await http.get(f"https://{address}/", 30)).content for _ in range(2)] == [body.encode()] * 2
        await http.close()
        http = HttpClient(keepalive=60)
        with pytest.raises(ConnectionBrokenError, match="CERTIFICATE_VERIFY_FAILED") as refused:
            await http.get(f"https://{address}/", 30)
        assert refused.value.unsent
        await http.close()
    finally:
        server.should_exit = True
        await running


@pytest.mark.anyio
async def test_who_expects_tls_of_a_server_without_it_hears_so() -> None:
    async with listening(PlainTextResponse("x")) as url:
        http = HttpClient()
        with pytest.raises(ConnectionBrokenError, match=r"^127.0.0.1:\d+ does not speak TLS: .* http, not https"):
            await http.get(url.replace("http", "https"), 30)
        await http.close()


def test_files_that_cannot_serve_are_said(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    _, others_key = make_certificate(tmp_path, "other")
    protected = make_certificate(tmp_path, "protected", password="secret")
    empty = tmp_path / "empty"
    empty.write_text("")
    wrong = "must be a certificate and its key in PEM form, the key not encrypted: "
    for files, message in (
        ((tmp_path / "absent.pem", key), r"tls\.certificate: cannot read .*absent\.pem: No such file"),
        ((certificate, tmp_path / "absent.key"), r"tls\.key: cannot read .*absent\.key"),
        ((empty, key), wrong),
        ((key, key), wrong),
        ((certificate, empty), wrong),
        ((certificate, others_key), f"{wrong}KEY_VALUES_MISMATCH"),
        (protected, wrong),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            TLSFiles(*files)
        assert "\n" not in caught.value.message
