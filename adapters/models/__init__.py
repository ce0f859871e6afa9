"""Model files: pull and convert them by name, and resolve the name in a job to a path. Imports nothing heavy."""

from adapters.models.cache import CachedModel, list_cached, models_home
from adapters.models.card import model_card
from adapters.models.pull import CATALOG, CatalogEntry, pull
from adapters.models.resolve import decoder, resolve_model, weight_bytes

__all__ = [
    "CATALOG",
    "CachedModel",
    "CatalogEntry",
    "decoder",
    "list_cached",
    "model_card",
    "models_home",
    "pull",
    "resolve_model",
    "weight_bytes",
]
