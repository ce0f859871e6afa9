"""The configuration of a gateway: ``GatewayConfig``, ``RouteSettings`` for each route, and their YAML file."""
