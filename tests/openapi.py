"""schemathesis against a live server of ours, from the server's own document."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.generation import GenerationMode
from starlette.applications import Starlette
from starlette.routing import Route

#: A request that takes longer hangs, also one that is kept alive meanwhile.
SECONDS = 120.0
#: Statuses, types and bodies of answers. Whether invalid data is refused is not asked, because our bodies are tolerant
#: of what foreign clients add.
_CONFORMANCE = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")


class Caller:
    """Sends cases to ``url``; ``statuses`` are what each route has answered."""

    def __init__(self, url: str) -> None:
        load_all_checks()
        self.url = url
        self.session = requests.Session()
        self.session.trust_env = False
        self.statuses: dict[str, set[int]] = {}
        #: whether the next case is to be about something that there is
        self.turn = itertools.cycle((True, False))
        self._checks = [CHECKS.get_one(name) for name in _CONFORMANCE]
        # the timeout of a call is one of each read, which a keep-alive ends
        self._pool = ThreadPoolExecutor(1)

    def close(self) -> None:
        self.session.close()
        self._pool.shutdown(wait=False)

    def prepare(self, case: Any) -> None:
        """Change a case before it is sent."""

    def sent(self, case: Any) -> requests.Response:
        """The answer, which conforms to the document and is no undocumented failure."""
        self.prepare(case)
        calling = self._pool.submit(case.call, base_url=self.url, session=self.session, timeout=SECONDS)
        answer: requests.Response = calling.result(SECONDS)
        self.statuses.setdefault(case.operation.label, set()).add(answer.status_code)
        assert answer.status_code < 500 or answer.status_code == 503, f"{case.as_curl_command()}: {answer.text}"
        case.validate_response(answer, checks=self._checks)
        return answer

    def ask(self, operation: Any, examples: int, headers: st.SearchStrategy[dict[str, str]]) -> None:
        """Send ``examples`` cases that fit the document, and where there is a JSON body as many that do not."""
        for mode in _modes(operation):

            @settings(
                max_examples=examples,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode), headers=headers)
            def ask(case: Any, headers: dict[str, str]) -> None:
                case.headers = {**(case.headers or {}), **headers}
                self.sent(case)

            ask()


def _modes(operation: Any) -> Iterator[GenerationMode]:
    yield GenerationMode.POSITIVE
    # every byte string is a body of an upload: there is no wrong one
    if any(body.media_type == "application/json" for body in operation.body):
        yield GenerationMode.NEGATIVE


def operations_of(url: str) -> list[Any]:
    """Of the document of the server at ``url``."""
    with contextlib.closing(requests.Session()) as session:
        session.trust_env = False
        document = session.get(f"{url}/openapi.json", timeout=SECONDS).json()
    return [result.ok() for result in schemathesis.openapi.from_dict(document).get_all_operations()]


def routes_of(app: Starlette, without: Callable[[Route], bool] = lambda route: False) -> set[str]:
    """The routes of ``app`` as schemathesis names them."""
    return {
        f"{method} {route.path_format}"
        for route in app.routes
        if isinstance(route, Route) and not without(route)
        for method in (route.methods or set()) - {"HEAD"}
    }
