"""One stack for all tests of a module, what each of them is held to, and which cells of the table they make true."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest

pytest.register_assert_rewrite("tests.clients.stack")

from tests.clients import table  # noqa: E402
from tests.clients.stack import Stack, stack  # noqa: E402

#: Row, cells, and whether the test passed, of all tests that ran.
_OUTCOMES: list[tuple[str, tuple[str, ...], bool]] = []


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "covers(client, cells): cells of the table in docs/clients.md")


def pytest_runtest_setup(item: pytest.Item) -> None:
    item.user_properties += [("covers", mark.args) for mark in item.iter_markers("covers")]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.failed:
        for name, value in report.user_properties:
            if name == "covers":
                client, cells = cast("tuple[str, tuple[str, ...]]", value)
                _OUTCOMES.append((client, cells, report.passed))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _OUTCOMES:
        table.note(_OUTCOMES)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("stack")) as running:
        yield running
