"""Registry of selectors by name, for scenario files and the command line: look up, create, describe."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import re
from importlib import resources
from typing import Any

from fedsel_flwr.checks import did_you_mean
from fedsel_flwr.errors import ParameterError, refusing_faults
from fedsel_flwr.references import is_reference, load_reference
from fedsel_flwr.selectors import catalogue
from fedsel_flwr.selectors.base import Selector

_CLASSES: dict[str, type[Selector]] = {
    cls.name: cls for cls in vars(catalogue).values() if isinstance(cls, type) and issubclass(cls, Selector)
}
ENTRY_POINTS = "fedsel.selectors"
"""Entry-point group for selectors of installed packages: ``fastest = "my_package.my_file:Fastest"``."""


def names() -> tuple[str, ...]:
    """Return the sorted names that :func:`create` knows; installed packages may add names (:data:`ENTRY_POINTS`).

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
        ParameterError: The name is unknown, cannot be imported, or does not refer to a class of selectors.
    """
    if name in _CLASSES:
        return _CLASSES[name]
    if is_reference(str(name)):
        return _checked_class(load_reference(name, "selector"), name)
    installed = _installed()
    if name in installed:
        return _checked_class(load_reference(installed[name], f"installed selector {name!r},"), name)
    if str(name).endswith(".py"):
        raise ParameterError(f"selector {name!r} lacks the name of a class. Add it, as in {f'{name}:MyClass'!r}")
    raise ParameterError(
        f"unknown selector {name!r}{did_you_mean(str(name), names())}. Choose one of {', '.join(names())}, or give "
        "package.module:Class or ./file.py:Class"
    )


def label_of(name: str) -> str:
    """Return a selector's label in tables, folders and parameter keys: its name, or for a reference the class's name.

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
        problem = f"does not know {', '.join(unknown)}" if unknown else f"needs the parameter {', '.join(missing)}"
        raise ParameterError(f"selector {name!r} {problem}. All its parameters are {', '.join(accepted)}")
    try:
        with refusing_faults("it cannot be created"):
            return cls(**params)
    except ParameterError as error:
        raise ParameterError(f"selector {name!r}: {error}") from error


def description(name: str) -> list[str]:
    """Describe a selector in four lines: summary, paper, columns it reads, parameters.

    Args:
        name: As :func:`~fedsel_flwr.selectors.registry.selector_class` reads it.

    Returns:
        The lines; for an installed selector that cannot be loaded, one line with the reason.

    >>> for line in description("local-accuracy"):
    ...     print(line)
    Selects the m clients on whose test data the current model has the lowest accuracy.
    paper: Xia et al., Multi-armed bandit-based client scheduling for federated learning, IEEE TWC 2020, section V-B, \
"local accuracy based scheduling".
    reads: local_accuracy (by a probe)
    parameters: clients_per_round, seed=None
    """
    facts = describe(name)
    if "problem" in facts:
        return [f"cannot be loaded: {facts['problem']}"]
    columns = [*facts["reads"], *(f"{column} (by a probe)" for column in facts["probes"])]
    parameters = [
        one["name"] if one["required"] else f"{one['name']}={one['default']!r}" for one in facts["parameters"]
    ]
    return [
        facts["summary"],
        f"paper: {facts['paper']}",
        f"reads: {', '.join(columns) or 'nothing'}",
        f"parameters: {', '.join(parameters)}",
    ]


def example(name: str) -> dict[str, Any]:
    """Return example values of a selector's parameters without a default, other than ``clients_per_round``.

    >>> create("bsfl", clients_per_round=2, **example("bsfl")).min_latency
    0.1
    """
    return dict(catalogue.EXAMPLES.get(name, {}))


def describe(name: str) -> dict[str, Any]:
    """Return the facts about a selector, by name.

    Args:
        name: As :func:`~fedsel_flwr.selectors.registry.selector_class` reads it.

    Returns:
        ``name``, ``summary``, ``paper``, ``avoid``, ``reads``, ``probes`` and ``parameters``. ``avoid`` lists the cases
        in which another selector is better. ``reads`` and ``probes`` are names of columns. A parameter has ``name``,
        ``required`` and, if there is one, ``default``. For an installed selector that cannot be loaded only ``name``
        and ``problem``.

    >>> describe("round-robin")["parameters"]
    [{'name': 'clients_per_round', 'required': True}, {'name': 'seed', 'required': False, 'default': None}]
    >>> describe("fedcs")["avoid"][0]
    'Slow clients have other labels than fast clients. Slow clients are not selected.'
    """
    try:
        cls = selector_class(name)
    except ParameterError as error:
        return {"name": name, "problem": str(error)}
    text = inspect.cleandoc(cls.__doc__ or "-")
    parameters: list[dict[str, Any]] = []
    for parameter in inspect.signature(cls).parameters.values():
        required = parameter.default is parameter.empty
        parameters.append({"name": parameter.name, "required": required})
        if not required:
            parameters[-1]["default"] = parameter.default
    return {
        "name": name,
        "summary": text.splitlines()[0],
        "paper": " ".join(section(cls, "References").split()) or "-",
        "avoid": _items(section(cls, "When not to use")),
        # What it remembers comes before a selection, what it needs after one; a property is up to the instance.
        "reads": sorted({*(() if isinstance(cls.needs, property) else cls.needs), *cls.remembers} - {*cls.asks}),
        "probes": sorted(cls.asks),
        "parameters": parameters,
    }


def section(cls: type, heading: str) -> str:
    """Return a section of a class's docstring.

    Args:
        cls: The class.
        heading: Heading of the section, such as "Deviations".

    Returns:
        The section in reStructuredText, without its heading and indentation. Empty if there is no such section.

    >>> section(selector_class("random"), "Deviations")
    'none.'
    """
    text = inspect.cleandoc(cls.__doc__ or "")
    # A section is either indented, or one paragraph that begins on the line of the heading.
    found = re.search(rf"^{re.escape(heading)}:(?:\n((?:[ ].*\n?|\n)+)| (.+(?:\n.+)*))", text, re.MULTILINE)
    return inspect.cleandoc("\n" + (found[1] or found[2])) if found else ""


def parameter_texts(cls: type) -> dict[str, str]:
    """Return the description of each parameter of a class, from the section Args of its docstring.

    >>> parameter_texts(catalogue.CSUCB)["clients_per_round"]
    "m, the paper's N."
    """
    # Indented lines continue an entry.
    entries = re.findall(r"^(\w+): (.*(?:\n +.*)*)", section(cls, "Args"), re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def citations(name: str) -> tuple[str, ...]:
    """Return the BibTeX entries of a selector's papers.

    Args:
        name: As :func:`~fedsel_flwr.selectors.registry.selector_class` reads it.

    Returns:
        The entries, at least one.

    Raises:
        ParameterError: The selector is unknown, or its class names no paper.

    >>> print(citations("active-fl")[0].splitlines()[2])
      title         = {Active Federated Learning},
    """
    cls = selector_class(name)
    if not cls.citations:
        raise ParameterError(
            f"selector {name!r} names no paper. Set {cls.__name__}.citations to a tuple of BibTeX entries"
        )
    # A text would otherwise be taken for a tuple of letters.
    cited = (cls.citations,) if isinstance(cls.citations, str) else cls.citations
    return tuple(papers().get(one, one) for one in cited)


@functools.cache
def papers() -> dict[str, str]:
    """Return the BibTeX entries of ``papers.bib`` by their keys.

    The file is read only by ``fedsel cite``: it is not in Flower's app bundle.
    """
    text = resources.files("fedsel_flwr.selectors").joinpath("papers.bib").read_text("utf-8")
    return {entry[2]: entry[1] for entry in re.finditer(r"^(@\w+\{([\w-]+),\n.*?^\})", text, re.MULTILINE | re.DOTALL)}


def package_entry() -> str:
    """Return the BibTeX entry of this package.

    >>> print(package_entry().splitlines()[1])
      author  = {{The fedsel-flwr authors}},
    """
    from fedsel_flwr import __version__

    return f"""@software{{fedsel_flwr,
  author  = {{{{The fedsel-flwr authors}}}},
  title   = {{fedsel-flwr: client selection for federated learning as {{Flower}} strategies}},
  version = {{{__version__}}},
}}"""


def _installed() -> dict[str, str]:
    """Return the names that installed packages add, with their references; they cannot replace our names."""
    # Read at each call, because a package may be installed while a notebook runs.
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


def _items(text: str) -> list[str]:
    """Return the items of a list in reStructuredText, or its only paragraph, in plain text."""
    plain = re.sub(r":\w+:`~?([^`]+)`|``([^`]+)``", r"\1\2", text)
    return [" ".join(item.split()) for item in re.split(r"^\* ", plain, flags=re.MULTILINE) if item.strip()]
