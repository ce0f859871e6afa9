"""Which model name leads where: :class:`RouteTable`, its :class:`Route` objects, the :class:`Swarm` servers they share,
and :class:`LiveRoutes`, the table that can be exchanged while requests are under way."""
