"""The public names of ``hookline.guard``, each with the module it lives in."""

from hookline.guard.guard import Guard as Guard
from hookline.guard.model_context import ModelDataContext as ModelDataContext
from hookline.guard.undo import rollback as rollback

__all__: list[str]
