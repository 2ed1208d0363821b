"""The class decorator for layers that stash and pop, and the wrapper it makes."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import ClassVar, TypeVar

import torch
from torch import nn

from pipetransformer.skip.messages import pop as pop_message
from pipetransformer.skip.messages import stash as stash_message
from pipetransformer.skip.namespace import Namespace
from pipetransformer.skip.tracker import current_skip_tracker

Self = TypeVar("Self", bound="Skippable")


class Skippable(nn.Module):
    """Base of the classes that `skippable` makes; ``module`` is the layer itself.

    Args:
        *args: Arguments of the decorated class.
        **kwargs: Keyword arguments of the decorated class.
    """

    module_cls: ClassVar[type[nn.Module]]
    stashable_names: ClassVar[tuple[str, ...]] = ()
    poppable_names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)
        self.namespaces: dict[str, Namespace | None] = {}

    def __repr__(self) -> str:
        return f"@skippable({self.module})"

    def isolate(
        self: Self, ns: Namespace | None, *, only: Iterable[str] | None = None
    ) -> Self:
        """Put this layer's skip names into a namespace.

        Args:
            ns: The namespace; None is the default one.
            only: Names to move, or one name; None means all declared ones.

        Returns:
            This layer.
        """
        if not isinstance(ns, Namespace):
            raise TypeError(
                f"ns: expected a Namespace or None, got {type(ns).__name__}"
            )
        names = (*self.stashable_names, *self.poppable_names)
        for name in names if only is None else _names(only):
            self.namespaces[name] = ns
        return self

    def stashable(self) -> Iterator[tuple[Namespace | None, str]]:
        """Yield namespace and name of everything declared for stash."""
        for name in self.stashable_names:
            yield self.namespaces.get(name), name

    def poppable(self) -> Iterator[tuple[Namespace | None, str]]:
        """Yield namespace and name of everything declared for pop."""
        for name in self.poppable_names:
            yield self.namespaces.get(name), name

    def dispatch(
        self,
        input: object,
        handle_stash: Callable[[str, torch.Tensor | None], object],
        handle_pop: Callable[[str], torch.Tensor | None],
    ) -> object:
        """Call the layer, and have skip tensors taken and given by two functions.

        So a wrapper can carry them in another way, such as in tuples from layer to
        layer. Which names the class declares is not looked at.

        Args:
            input: The layer's input.
            handle_stash: Called with name and tensor of each `stash`.
            handle_pop: Called with the name of each `pop`; returns its tensor.

        Returns:
            The layer's output.

        Raises:
            TypeError: if the layer yields anything but `stash` and `pop`.
        """
        return self._drive(self.module(input), handle_stash, handle_pop)

    def forward(self, *inputs: object, **kwargs: object) -> object:
        """Call the layer; what it yields goes to and from this thread's tracker.

        Raises:
            RuntimeError: for an undeclared name, a declared one that is left out, a
                pop of something not there.
            TypeError: if the layer yields anything but `stash` and `pop`.
        """
        tracker = current_skip_tracker()
        to_stash, to_pop = set(self.stashable_names), set(self.poppable_names)

        def handle_stash(name: str, tensor: torch.Tensor | None) -> None:
            self._check_declared("stash", name, self.stashable_names)
            tracker.save(self.namespaces.get(name), name, tensor)
            to_stash.discard(name)

        def handle_pop(name: str) -> torch.Tensor | None:
            self._check_declared("pop", name, self.poppable_names)
            to_pop.discard(name)
            return tracker.load(self.namespaces.get(name), name)

        called = self.module(*inputs, **kwargs)
        output = self._drive(called, handle_stash, handle_pop)
        self._check_done(to_stash, to_pop)
        return output

    def _drive(
        self,
        called: object,
        handle_stash: Callable[[str, torch.Tensor | None], object],
        handle_pop: Callable[[str], torch.Tensor | None],
    ) -> object:
        """Run what calling the layer gave: a generator, or the output itself."""
        if not isinstance(called, Generator):
            return called
        answer: torch.Tensor | None = None
        try:
            while True:
                try:
                    message = called.send(answer)
                except StopIteration as end:
                    return end.value
                if isinstance(message, stash_message):
                    answer = None
                    handle_stash(message.name, message.tensor)
                elif isinstance(message, pop_message):
                    answer = handle_pop(message.name)
                else:
                    raise TypeError(
                        f"{self._layer()}: expected forward to yield stash or pop, got "
                        f"{type(message).__name__}"
                    )
                del message  # a stashed tensor is not held while the layer computes
        finally:
            called.close()

    def _layer(self) -> str:
        return type(self.module).__name__

    def _check_declared(self, verb: str, name: str, names: tuple[str, ...]) -> None:
        if name not in names:
            raise RuntimeError(
                f"{self._layer()}: expected to {verb} only what it declared "
                f"({list(names)}), got undeclared {name!r}"
            )

    def _check_done(self, to_stash: set[str], to_pop: set[str]) -> None:
        for verb, left in (("stashed", to_stash), ("popped", to_pop)):
            if left:
                raise RuntimeError(
                    f"{self._layer()}: expected everything declared to be {verb}, got "
                    f"{sorted(left)} not {verb}"
                )


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Declare which tensors a layer passes around the layers in between.

    The decorated class becomes a wrapper of the same name: ``.module`` is the layer,
    ``isolate`` puts its names into a `Namespace`. ``forward`` is a generator.

    Args:
        stash: Names that ``forward`` stashes, or one name.
        pop: Names that ``forward`` pops, or one name.

    Returns:
        The decorator.

    Example:
        >>> @skippable(stash="residual")
        ... class Split(nn.Module):
        ...     def forward(self, x):
        ...         yield stash("residual", x)
        ...         return self.conv(x)

        >>> @skippable(pop="residual")
        ... class Join(nn.Module):
        ...     def forward(self, x):
        ...         residual = yield pop("residual")
        ...         return x + residual
    """
    stashed, popped = _names(stash), _names(pop)

    def decorate(cls: type[nn.Module]) -> type[Skippable]:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(
                f"skippable: expected a subclass of torch.nn.Module, got {cls!r}"
            )
        wrapper = type(
            cls.__name__,
            (Skippable,),
            {
                "module_cls": cls,
                "stashable_names": stashed,
                "poppable_names": popped,
                "__module__": cls.__module__,
                "__qualname__": cls.__qualname__,
                "__doc__": cls.__doc__,
            },
        )
        if not _is_importable(cls):
            # Used with @: the wrapper takes the name, so pickle finds the class
            # itself below it.
            cls.__qualname__ = f"{cls.__qualname__}.module_cls"
        return wrapper

    return decorate


def _names(names: Iterable[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        return (names,)
    return tuple(dict.fromkeys(names))


def _is_importable(cls: type) -> bool:
    # The module's own loader cannot be waited for here: a class that is just being
    # defined is not found, and that is the answer.
    found: object = sys.modules.get(cls.__module__)
    path = cls.__qualname__.split(".")
    found = functools.reduce(lambda part, name: getattr(part, name, None), path, found)
    return found is cls
