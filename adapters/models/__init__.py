"""Model files: pulling them, converting them, and turning the name in a job into a path; imports nothing heavy."""

from adapters.models.cache import CachedModel, list_cached, models_home
from adapters.models.catalog import CATALOG, CatalogEntry
from adapters.models.decoding import decoder
from adapters.models.pull import pull
from adapters.models.resolve import resolve_model

__all__ = ["CATALOG", "CachedModel", "CatalogEntry", "decoder", "list_cached", "models_home", "pull", "resolve_model"]
