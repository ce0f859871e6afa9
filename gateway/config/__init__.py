"""What one validated YAML file says of a gateway: :class:`GatewayConfig`, and per route :class:`RouteSettings`."""

from gateway.config.gateway import DIGEST_PREFIX, LOOPBACK_HOSTS, GatewayConfig, RouteConfig
from gateway.config.load import load_config, parse_config
from gateway.config.route import RouteSettings, UpstreamConfig

__all__ = [
    "DIGEST_PREFIX",
    "LOOPBACK_HOSTS",
    "GatewayConfig",
    "RouteConfig",
    "RouteSettings",
    "UpstreamConfig",
    "load_config",
    "parse_config",
]
