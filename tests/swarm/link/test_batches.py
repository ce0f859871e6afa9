"""What a trainer asks for, takes and reports."""

from __future__ import annotations

from msgspec.structs import replace

from swarm.link.engine import BatchRequests
from swarm.link.messages import BatchReady, Message, RolloutReady, StepDone
from tests.swarm.server.journal.build import batch as of


class Sent(list[Message]):
    def send(self, message: Message) -> None:
        self.append(message)


def batch(batch_id: str) -> BatchReady:
    return BatchReady(batch=of(batch_id, task=["episode"]))


def test_a_request_names_the_batch_before_it() -> None:
    sent = Sent()
    requests = BatchRequests(sent)
    assert requests.batch_id == ""
    requests.ask(["127.0.0.1:1"], "m", 0, 1)
    assert requests.take(batch("one")) is not None
    requests.report(1, {"loss": 0.5})
    requests.ask(["127.0.0.1:1"], "m", 1, 2)
    first, done, second = sent
    assert isinstance(first, RolloutReady) and isinstance(second, RolloutReady) and isinstance(done, StepDone)
    assert (first.last_batch, second.last_batch) == ("", "one")
    assert (done.result.batch_id, done.result.step, done.result.metrics) == ("one", 1, {"loss": 0.5})
    assert 0 <= done.result.seconds < 10


def test_a_batch_that_was_reported_is_not_trained_again() -> None:
    requests = BatchRequests(Sent())
    assert requests.take(batch("one")) is not None
    assert requests.take(batch("one")) is not None, "its step was not done"
    requests.report(1, {})
    assert requests.take(batch("one")) is None
    assert requests.batch_id == "one"
    assert requests.take(batch("two")) is not None


def test_the_last_step_is_reported_where_its_trainer_died_behind_its_checkpoint() -> None:
    sent = Sent()
    requests = BatchRequests(sent)
    requests.report_last(0)
    assert not sent, "nothing was saved"
    requests.begin_after("a")
    requests.report_last(7)
    [done] = sent
    assert isinstance(done, StepDone) and (done.result.step, done.result.batch_id) == (7, "a")
    requests.ask(["host:1"], "m", 7, 8)
    assert isinstance(sent[-1], RolloutReady) and sent[-1].last_batch == "", "as the server expects of another trainer"


def test_a_batch_that_the_checkpoint_has_learned_from_is_reported_and_not_trained_again() -> None:
    sent = Sent()
    requests = BatchRequests(sent)
    requests.begin_after("a")
    requests.ask(["host:1"], "m", 7, 8)
    assert requests.take(batch("a")) is None
    asked, done, again = sent
    assert isinstance(done, StepDone) and (done.result.step, done.result.batch_id) == (7, "a")
    assert isinstance(asked, RolloutReady) and again == replace(asked, last_batch="a")
    assert requests.take(batch("b")) is not None
