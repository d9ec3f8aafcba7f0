"""The public names of ``hookline.guard``, each with the module it lives in."""

from hookline.guard.guard import Guard as Guard
from hookline.guard.guard import rollback as rollback
from hookline.guard.model_context import ModelDataContext as ModelDataContext

__all__: list[str]
