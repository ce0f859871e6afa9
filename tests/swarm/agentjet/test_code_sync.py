"""What AgentJet's client is told of the code that it syncs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.swarm.server.api.test_code import ZIP, app_of, client_of, zipped

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("packages", "says"), [(["ajet"], True), (["ajet", "my_reward"], False), (["verl"], False)])
async def test_code_that_nothing_imports_is_said_to_be_without_effect(
    tmp_path: Path, packages: list[str], says: bool
) -> None:
    """AgentJet's client sends its own trainer's package, and shows nothing of the answer; its monitor shows the log."""
    code = tmp_path / "mine"
    for package in packages:
        (code / package).mkdir(parents=True)
        (code / package / "__init__.py").write_text("")
    app = app_of(tmp_path)
    async with app.router.lifespan_context(app), client_of(app) as client:
        answer = (await client.post("/sync_train_code", content=zipped(code), headers=ZIP)).json()
        shown = (await client.get("/get_verbose_logs")).json()["entries"]
    assert answer["success"] and ("nothing here imports" in answer["message"]) is says
    assert ["nothing here imports" in entry["message"] for entry in shown] == [True] * says
