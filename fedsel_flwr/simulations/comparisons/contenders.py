"""Who is compared: selectors by name or reference, classes, and callables that make one.

Every selector there is, as far as a scenario can run it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedsel_flwr.errors import FedSelError, ParameterError, described
from fedsel_flwr.rounds.settings import resolve_settings
from fedsel_flwr.selectors import Selector, create
from fedsel_flwr.selectors.registry import label_of, names, selector_class
from fedsel_flwr.simulations.on_flower.building import (
    check_selectors,
    common_params,
    selector_params,
)
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.untrusted_folders import check_label
from fedsel_flwr.simulations.worlds.ingredients import OwnParts
from fedsel_flwr.simulations.worlds.world import world_of

Given = str | type[Selector] | Callable[..., Selector]


@dataclass(frozen=True)
class Contender:
    """A selector to compare.

    Args:
        label: What tables, pictures and folders call it.
        name: What a scenario calls it; None for a selector that only Python code can make.
        make: Makes it where ``name`` is None.
    """

    label: str
    name: str | None = None
    make: Callable[..., Selector] | None = None

    def scenario(self, scenario: Scenario, seed: int) -> Scenario:
        """The scenario of its run on a seed; ``selector`` is the label where no file can name the selector."""
        return scenario.model_copy(update={"selector": self.name or self.label, "seed": seed})

    def selector(self, scenario: Scenario) -> Selector | None:
        """A new selector for a scenario; None where the scenario itself names it.

        Raises:
            ParameterError: What was made is no selector.
        """
        if self.make is None:
            return None
        try:
            made = self.make(**common_params(scenario, self.make) | scenario.selectors.get(self.label, {}))
        except FedSelError:
            raise
        except Exception as error:  # whatever the user's own code raises
            raise ParameterError(f"selector {self.label!r} cannot be made: {described(error)}") from error
        if not isinstance(made, Selector):
            raise ParameterError(
                f"selector {self.label!r} must be a fedsel_flwr.selectors.Selector, but what was given made a "
                f"{type(made).__name__}"
            )
        return made


def contenders(selectors: Given | Sequence[Given] | Mapping[str, Given]) -> list[Contender]:
    """Read what a user wants to compare.

    Args:
        selectors: Names, references ("./mine.py:Fastest"), classes, or callables that make a selector; with labels of
            one's own as a mapping, label -> selector. A class or callable is given ``clients_per_round`` and ``seed``,
            ``max_latency``, ``total_rounds`` and ``channels``, of which it gets those that it takes.

    Returns:
        At least one, each with a label of its own.

    Raises:
        ParameterError: There is none, two have one label, or something is no selector.

    Example:
        >>> [one.label for one in contenders(["bsfl", "random"])]
        ['bsfl', 'random']
    """
    if isinstance(selectors, str) or callable(selectors):
        selectors = [selectors]
    if not isinstance(selectors, Iterable):
        raise ParameterError(
            f"selectors must be names, classes or callables, or a mapping of labels to them, got "
            f"{type(selectors).__name__}"
        )
    if isinstance(selectors, Mapping):
        read = [_contender(given, str(label)) for label, given in selectors.items()]
    else:
        read = [_contender(given) for given in selectors]
    if not read:
        raise ParameterError("there must be at least one selector to compare, got none")
    for one in read:
        if sum(one.label == other.label for other in read) > 1:
            raise ParameterError(
                f"two selectors are called {one.label!r}: give each a label of its own, as in "
                "{'label': selector, 'other label': selector}"
            )
        check_label(one.label)
    return read


def _contender(given: Given, label: str | None = None) -> Contender:
    if isinstance(given, str):
        selector_class(given)
        return Contender(label or label_of(given), name=given)
    if isinstance(given, Selector):
        raise ParameterError(
            f"selector {given.name!r} is one object, but every seed needs a new one: give the class, or a function "
            "that makes it"
        )
    if not callable(given):
        raise ParameterError(
            f"a selector must be a name, a class or a callable that makes one, got {type(given).__name__}: {given!r}"
        )
    if isinstance(given, type) and not issubclass(given, Selector):
        raise ParameterError(f"the class {given.__qualname__} must be a subclass of fedsel_flwr.selectors.Selector")
    made = getattr(given, "func", given)  # functools.partial
    own = getattr(made, "name", None) or getattr(made, "__name__", None)
    if label is None and (own is None or own == "<lambda>"):
        raise ParameterError("a callable without a name needs a label: give {'label': callable}")
    return Contender(label or str(own), make=given)


ALL = "all"
"""What stands for them on the command line, and in :func:`~fedsel_flwr.simulations.comparisons.comparing.compare`."""


def runnable_selectors(scenario: Scenario, own: OwnParts = OwnParts()) -> tuple[list[str], dict[str, str]]:  # noqa: B008 (frozen)
    """Find out who can run in a scenario.

    Args:
        scenario: The scenario.
        own: Model, data and objective of the caller's.

    Returns:
        The names of those that can, and for each of the others why it cannot.
    """
    world = world_of(own.named_in(scenario), own)
    able, left_out = [], {}
    for name in names():
        try:
            check_selectors(scenario, [name])
            world.check_validation_set(selector_class(name).needs, name)
            _check_fleet(scenario, name)
        except FedSelError as error:
            left_out[name] = str(error)
        else:
            able.append(name)
    return able, left_out


def _check_fleet(scenario: Scenario, name: str) -> None:
    """Refuse a fleet that the selector's algorithm is too slow for, and over-selection where it decides how many."""
    sizes = dict.fromkeys(range(scenario.num_clients), 1)
    selector = create(name, **selector_params(scenario.model_copy(update={"selector": name}), sizes))
    resolve_settings(selector, over_selection=scenario.aggregation.over_selection)
    most = getattr(selector, "max_clients", None)
    if most is not None and scenario.num_clients > most:
        raise FedSelError(f"takes at most {most} clients, and there are {scenario.num_clients}")
