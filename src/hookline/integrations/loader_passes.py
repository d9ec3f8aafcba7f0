"""Follow the passes that a loop makes over its loader, without an edit in the loop.

`Follow` and the start of a followed script make a `LoaderPasses`; it calls them back at each batch and at the end of
each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

from hookline.errors import UnhookableError
from hookline.integrations.wrapped import wrapped
from hookline.messages import type_name

__all__ = ["LoaderPass", "LoaderPasses"]


class LoaderPasses:
    """Tell when ``loader`` gives a batch and when a pass over it ends, however the loop iterates it.

    Recipe::

        passes = LoaderPasses(loader, on_batch, on_end)
        for batch in loader:  # calls on_batch(each) each time, on_end(each) after the last one
            ...
        passes.remove()

    The ``__iter__`` of the loader's class is wrapped for as long as it is followed: the iterator of the loader is put
    into a `LoaderPass`, which hands everything through. Other objects of the class get their own iterator.

    Args:
        loader: A ``DataLoader``, or an object of any class in Python that can be iterated; or such a class, for all of
            its objects.
        on_batch: Called with the `LoaderPass`, which has the batch, before the loop gets it.
        on_end: Called with the `LoaderPass` when there is no batch left.
    """

    def __init__(
        self,
        loader: Any,
        on_batch: Callable[[LoaderPass], None],
        on_end: Callable[[LoaderPass], None] = lambda each: None,
    ) -> None:
        self.on_batch, self.on_end = on_batch, on_end
        self._loader = loader
        owner = _owner_of_iter(loader if isinstance(loader, type) else type(loader))
        self._end = wrapped(owner, "__iter__", self._iter)

    def _iter(self, original: Any, loader: Any) -> Any:
        is_followed = loader is self._loader or isinstance(self._loader, type)
        return LoaderPass(original(loader), self, loader) if is_followed else original(loader)

    def remove(self) -> None:
        """Follow it no more; may be called again, and while a pass is under way."""
        self._end()
        self.on_batch = self.on_end = _ignore
        self._loader = None


class LoaderPass:
    """One pass over a loader: the loader's own iterator, with its batches announced."""

    def __init__(self, iterator: Iterator[Any], passes: LoaderPasses, loader: Any) -> None:
        self._iterator = iterator
        self._passes = passes
        self.loader = loader
        """The loader that the pass goes over."""
        self.batch: Any = None
        """The batch that was given last."""
        self.count = 0
        """How many batches were given."""
        self.is_over = False
        """Whether the last batch was given."""

    def __iter__(self) -> LoaderPass:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._iterator)
        except StopIteration:
            self.batch = None
            if not self.is_over:
                self.is_over = True
                self._passes.on_end(self)
            raise
        self.batch = batch
        self.count += 1
        self._passes.on_batch(self)
        return batch

    def tell(self) -> None:
        """Announce the newest batch once more, to the one who has the pass now."""
        self._passes.on_batch(self)

    def hand_to(self, passes: LoaderPasses) -> None:
        """Announce the rest of this pass to others."""
        self._passes = passes

    def __len__(self) -> int:
        return len(self._iterator)  # type: ignore[arg-type]  # raises as the iterator itself would

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle the iterator itself, where that can be: a copy is no pass of the loop."""
        return self._iterator.__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> Any:
        if name == "_iterator":  # of an object that was made without __init__
            raise AttributeError(name)
        return getattr(self._iterator, name)


def _owner_of_iter(loader_type: type) -> type:
    """Return the class in which the ``__iter__`` of a loader is written."""
    owner = next((base for base in loader_type.__mro__ if "__iter__" in vars(base)), None)
    if owner is None or not owner.__flags__ & _HEAP_TYPE:
        raise UnhookableError(
            f"loader= is {type_name(loader_type)}, whose iteration cannot be followed: its class is not written in "
            "Python. Next: give a DataLoader (DataLoader(data, batch_size=None) gives the items of a list as they "
            "are), or leave loader= out; then everything is one epoch."
        )
    return owner


def _ignore(*_: Any) -> None:
    pass


_HEAP_TYPE: Final = 1 << 9
"""Of a class whose attributes can be set; those written in C lack it."""
