"""Contenders of a comparison: selectors by name, reference, class or callable, or all selectors that can run."""

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

ALL = "all"
"""Keyword for every selector that can run, on the command line and in ``compare``."""
SelectorLike = str | type[Selector] | Callable[..., Selector]


@dataclass(frozen=True)
class Contender:
    """Selector in a comparison.

    Args:
        label: Name of the selector in tables, pictures and folders.
        name: Name of the selector in a scenario; None for a selector that only Python code can make.
        make: Function that makes the selector if ``name`` is None.
    """

    label: str
    name: str | None = None
    make: Callable[..., Selector] | None = None

    def scenario(self, scenario: Scenario, seed: int) -> Scenario:
        """Return the scenario of a run on a seed; its ``selector`` is the label if no file can name the selector."""
        return scenario.model_copy(update={"selector": self.name or self.label, "seed": seed})

    def selector(self, scenario: Scenario) -> Selector | None:
        """Return a new selector for a scenario; None if the scenario names the selector.

        Raises:
            ParameterError: The selector cannot be made, or the object is not a selector.
        """
        if self.make is None:
            return None
        try:
            made = self.make(**common_params(scenario, self.make) | scenario.selectors.get(self.label, {}))
        except FedSelError:
            raise
        except Exception as error:
            # The user's code may raise any error.
            raise ParameterError(f"selector {self.label!r} cannot be made: {described(error)}") from error
        if not isinstance(made, Selector):
            raise ParameterError(
                f"selector {self.label!r} must be a fedsel_flwr.selectors.Selector, but the given callable made a "
                f"{type(made).__name__}. Return a selector"
            )
        return made


def read_contenders(
    selectors: SelectorLike | Sequence[SelectorLike] | Mapping[str, SelectorLike],
) -> list[Contender]:
    """Read the selectors of a comparison.

    Args:
        selectors: Names, references ("./mine.py:Fastest"), classes, or callables that make a selector. To set labels,
            use a mapping, label -> selector. A class or callable receives the parameters that it accepts among
            ``clients_per_round``, ``seed``, ``max_latency``, ``total_rounds`` and ``channels``.

    Returns:
        At least one contender. All labels are different.

    Raises:
        ParameterError: There is no selector, two selectors have the same label, or an entry is not a selector.

    Example:
        >>> [one.label for one in read_contenders(["bsfl", "random"])]
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
        raise ParameterError("selectors must hold at least one selector to compare, got none. Name one")
    for one in read:
        if sum(one.label == other.label for other in read) > 1:
            raise ParameterError(
                f"two selectors have the label {one.label!r}. Give each another one, as in "
                "{'label': selector, 'other label': selector}"
            )
        check_label(one.label)
    return read


def _contender(given: SelectorLike, label: str | None = None) -> Contender:
    if isinstance(given, str):
        # Called to refuse an unknown name.
        selector_class(given)
        return Contender(label or label_of(given), name=given)
    if isinstance(given, Selector):
        raise ParameterError(
            f"selector {given.name!r} is one object, but every seed needs a new one. Give the class, or a function "
            "that makes it"
        )
    if not callable(given):
        raise ParameterError(
            f"a selector must be a name, a class or a callable that makes one, got {type(given).__name__}: {given!r}"
        )
    if isinstance(given, type) and not issubclass(given, Selector):
        raise ParameterError(f"the class {given.__qualname__} must be a subclass of fedsel_flwr.selectors.Selector")
    # A functools.partial has no name, but its function has one.
    made = getattr(given, "func", given)
    own = getattr(made, "name", None) or getattr(made, "__name__", None)
    if label is None and (own is None or own == "<lambda>"):
        raise ParameterError("a callable without a name needs a label. Give {'label': callable}")
    return Contender(label or str(own), make=given)


def runnable_selectors(scenario: Scenario, own: OwnParts = OwnParts()) -> tuple[list[str], dict[str, str]]:  # noqa: B008 (frozen)
    """Find the selectors that can run in a scenario.

    Args:
        scenario: The scenario.
        own: The caller's model, data and objective.

    Returns:
        Names of the selectors that can run, and a table of the others: name -> reason.
    """
    world = world_of(own.named_in(scenario), own)
    able, left_out = [], {}
    for name in names():
        try:
            check_selectors(scenario, [name])
            world.check_validation_set(selector_class(name).needs, name)
            _check_limits(scenario, name)
        except FedSelError as error:
            left_out[name] = str(error)
        else:
            able.append(name)
    return able, left_out


def _check_limits(scenario: Scenario, name: str) -> None:
    """Refuse too many clients for a selector, and over-selection if the selector chooses the size of its cohort."""
    # The selector is made, because both limits belong to the object, and its class may refuse the parameters.
    sizes = dict.fromkeys(range(scenario.num_clients), 1)
    selector = create(name, **selector_params(scenario.model_copy(update={"selector": name}), sizes))
    resolve_settings(selector, **scenario.aggregation.options())
    if selector.max_clients is not None and scenario.num_clients > selector.max_clients:
        raise FedSelError(f"takes at most {selector.max_clients} clients, and there are {scenario.num_clients}")
