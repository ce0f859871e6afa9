"""What one validated YAML file says of a gateway: :class:`GatewayConfig`, and per route :class:`RouteSettings`."""

from gateway.config.gateway import DIGEST_PREFIX, LOOPBACK_HOSTS, ONLY_ROUTE, GatewayConfig, RouteConfig, TLSConfig
from gateway.config.load import load_config, parse_config
from gateway.config.observability import RequestLogConfig, TracingConfig
from gateway.config.route import RouteSettings, UpstreamConfig

__all__ = [
    "DIGEST_PREFIX",
    "LOOPBACK_HOSTS",
    "ONLY_ROUTE",
    "GatewayConfig",
    "RequestLogConfig",
    "RouteConfig",
    "RouteSettings",
    "TLSConfig",
    "TracingConfig",
    "UpstreamConfig",
    "load_config",
    "parse_config",
]
