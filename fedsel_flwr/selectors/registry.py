"""Selectors by name, for scenario files and the command line: look up, create, describe."""

from __future__ import annotations

import difflib
import importlib.metadata
import inspect
from typing import Any

from fedsel_flwr.errors import FedSelError, ParameterError, described
from fedsel_flwr.references import is_reference, load_reference
from fedsel_flwr.selectors import catalogue
from fedsel_flwr.selectors.base import Selector

_CLASSES: dict[str, type[Selector]] = {
    cls.name: cls for cls in vars(catalogue).values() if isinstance(cls, type) and issubclass(cls, Selector)
}
ENTRY_POINTS = "fedsel.selectors"
"""The entry-point group of installed packages' selectors: ``fastest = "my_package.my_file:Fastest"``."""


def names() -> tuple[str, ...]:
    """Return the names that :func:`create` knows, sorted; installed packages may add some (:data:`ENTRY_POINTS`).

    >>> {"bsfl", "random"} <= set(names())
    True
    """
    return tuple(sorted(_CLASSES.keys() | _installed().keys()))


def selector_class(name: str) -> type[Selector]:
    """Return the class behind a name.

    Args:
        name: One of :func:`names`, "package.module:Class", or "./file.py:Class" with a path.

    Returns:
        A subclass of :class:`~fedsel_flwr.selectors.Selector`.

    Raises:
        ParameterError: The name is unknown, or it refers to something that cannot be imported or is no such class.
    """
    if name in _CLASSES:
        return _CLASSES[name]
    if is_reference(str(name)):
        return _checked_class(load_reference(name, "selector"), name)
    installed = _installed()
    if name in installed:
        return _checked_class(load_reference(installed[name], f"installed selector {name!r},"), name)
    if str(name).endswith(".py"):
        raise ParameterError(
            f"selector {name!r} names a file without a class. Add the class, as in {f'{name}:MyClass'!r}"
        )
    close = difflib.get_close_matches(str(name), names(), n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ParameterError(
        f"unknown selector {name!r}{hint}. Choose one of {', '.join(names())}, or give package.module:Class or "
        "./file.py:Class"
    )


def label_of(name: str) -> str:
    """Return a selector's label in tables, folders and parameter keys: its name, or that of a reference's class.

    Raises:
        ParameterError: As :func:`selector_class` does.
    """
    return selector_class(name).name if is_reference(name) else name


def create(name: str, **params: Any) -> Selector:
    """Build a selector from its name and keyword parameters.

    Args:
        name: As :func:`selector_class` reads it.
        **params: The parameters of the selector's class.

    Returns:
        The selector.

    Raises:
        ParameterError: An unknown name or parameter, a missing parameter, or a value out of range.
    """
    cls = selector_class(name)
    accepted = inspect.signature(cls).parameters
    unknown = sorted(params.keys() - accepted.keys())
    missing = [key for key, p in accepted.items() if p.default is p.empty and key not in params]
    if unknown or missing:
        problem = f"does not know {', '.join(unknown)}" if unknown else f"needs {', '.join(missing)}"
        raise ParameterError(f"selector {name!r} {problem}. Its parameters are {', '.join(accepted)}")
    try:
        return cls(**params)
    except ParameterError as error:
        raise ParameterError(f"selector {name!r}: {error}") from error
    except FedSelError:
        raise
    except Exception as error:
        # A class of the user's own may raise anything.
        raise ParameterError(f"selector {name!r} cannot be created: {described(error)}") from error


def description(name: str) -> list[str]:
    """Return what a selector does, its paper, the columns it reads and its parameters, a line each.

    Args:
        name: As :func:`~fedsel_flwr.selectors.registry.selector_class` reads it.

    Returns:
        The lines; for an installed selector that cannot be loaded one line, with the reason.

    >>> for line in description("local-accuracy"):
    ...     print(line)
    Asks every available client for the current model's accuracy on its test data and takes the lowest m.
    paper: Xia et al., Multi-armed bandit-based client scheduling for federated learning, IEEE TWC 2020, section V-B, \
"local accuracy based scheduling".
    reads: local_accuracy (by a probe)
    parameters: clients_per_round, seed=None
    """
    try:
        cls = selector_class(name)
    except ParameterError as error:
        return [f"cannot be loaded: {error}"]
    text = inspect.cleandoc(cls.__doc__ or "-")
    return [
        text.splitlines()[0],
        f"paper: {_references(text)}",
        f"reads: {_columns(cls)}",
        f"parameters: {', '.join(map(_parameter, inspect.signature(cls).parameters.values()))}",
    ]


def _installed() -> dict[str, str]:
    """Return the names that installed packages add, with their references; they cannot replace our own."""
    # Read at each call: a package may be installed while a notebook runs.
    found = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return {point.name: point.value for point in found if point.name not in _CLASSES}


def _checked_class(found: Any, name: str) -> type[Selector]:
    if not (inspect.isclass(found) and issubclass(found, Selector)):
        kind = f"the class {found.__qualname__}" if inspect.isclass(found) else type(found).__name__
        raise ParameterError(
            f"selector {name!r} must be a subclass of fedsel_flwr.selectors.Selector, got {kind}. Name such a class"
        )
    if lacking := sorted(getattr(found, "__abstractmethods__", ())):
        raise ParameterError(
            f"selector {name!r}: the class {found.__qualname__} does not define {', '.join(lacking)}. Define it"
        )
    return found


def _references(text: str) -> str:
    """Return the section References of a docstring, on one line."""
    _, heading, after = text.partition("\nReferences:\n")
    return " ".join(after.split("\n\n")[0].split()) if heading else "-"


def _columns(cls: type[Selector]) -> str:
    needs = [] if isinstance(cls.needs, property) else sorted(cls.needs)
    return ", ".join([*needs, *(f"{name} (by a probe)" for name in sorted(cls.asks))]) or "nothing"


def _parameter(parameter: inspect.Parameter) -> str:
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}={parameter.default!r}"
