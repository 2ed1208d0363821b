"""Stand-ins that have what the real class has, and nothing else.

A name that the product renames makes the test that uses it fail: a method's by
`mock.create_autospec`, an attribute's because `stand_in` reads the class's source.
"""

import ast
import dataclasses
import functools
import inspect
import textwrap
from unittest import mock


@functools.cache
def attributes_of(kind):
    """Return the names that instances of a class have, by its source and its bases'."""
    names = set(dir(kind))
    if dataclasses.is_dataclass(kind):
        names |= {field.name for field in dataclasses.fields(kind)}
    for base in kind.__mro__[:-1]:
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            of_self = isinstance(node, ast.Attribute) and isinstance(
                node.ctx, ast.Store
            )
            if of_self and isinstance(node.value, ast.Name) and node.value.id == "self":
                names.add(node.attr)
    return frozenset(names)


def stand_in(kind, **attributes):
    """Return a stand-in for an instance of `kind`.

    Its methods take the arguments of the real ones, remember their calls and return
    what the test sets. Of its attributes it has those that are given.
    """
    unknown = attributes.keys() - attributes_of(kind)
    if unknown:
        raise AttributeError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
    made = mock.create_autospec(kind, instance=True)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made
