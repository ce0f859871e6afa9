"""What stands between a request and harm: places, shared retries, and upstreams whose health is known."""

from gateway.guarding.admission import Admission, Place
from gateway.guarding.breaker import Breaker, BreakerState
from gateway.guarding.intake import Intake
from gateway.guarding.joining import Joining
from gateway.guarding.upstream import Upstream

__all__ = ["Admission", "Breaker", "BreakerState", "Intake", "Joining", "Place", "Upstream"]
