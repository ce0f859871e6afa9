"""Which model name leads where: :class:`RouteTable`, its :class:`Route` objects, the :class:`Swarm` servers they share,
and :class:`LiveRoutes`, the table that can be exchanged while requests are under way."""

from gateway.routing.live import LiveRoutes
from gateway.routing.plan import Plan
from gateway.routing.route import Route
from gateway.routing.swarm import Swarm
from gateway.routing.table import RouteTable

__all__ = ["LiveRoutes", "Plan", "Route", "RouteTable", "Swarm"]
