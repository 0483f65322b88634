"""Contenders of a comparison: selectors by name, reference, class or callable, or all selectors that can run.

A sweep replaces a contender with several: the same selector with different values of its parameters.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, Field

from fedsel_flwr.errors import FedSelError, ParameterError, refusing_faults
from fedsel_flwr.report.summary import setting_label, value_texts
from fedsel_flwr.selectors import Selector
from fedsel_flwr.selectors.registry import label_of, names, selector_class
from fedsel_flwr.simulations.on_flower.building import check_selector, common_params, make_strategy
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import check_label, check_selector_tables
from fedsel_flwr.simulations.scenario_tables import Table
from fedsel_flwr.simulations.worlds.ingredients import OwnParts
from fedsel_flwr.simulations.worlds.world import world_of

ALL = "all"
"""Keyword for every selector that can run, on the command line and in ``compare``."""
SelectorLike = str | type[Selector] | Callable[..., Selector]
Label = Annotated[str, AfterValidator(check_label)]


class Contender(Table):
    """Selector in a comparison, and in the file of its plan.

    Attributes:
        label: Name of the selector in tables, pictures and folders.
        name: Name of the selector in a scenario; None for a selector that only Python code can make.
        params: Parameters that replace those of the scenario.
        make: Function that makes the selector if ``name`` is None. No file can hold it.
    """

    label: Label
    name: Annotated[str, Field(min_length=1)] | None = None
    params: dict[str, Any] = Field(default_factory=dict)
    make: Callable[..., Any] | None = Field(default=None, exclude=True)

    @property
    def table(self) -> str:
        """Name of the selector's table of parameters in a scenario."""
        return label_of(self.name) if self.name else self.label

    def scenario(self, scenario: Scenario, seed: int) -> Scenario:
        """Return the scenario of a run on a seed; its ``selector`` is the label if no file can name the selector."""
        changed: dict[str, Any] = {"selector": self.name or self.label, "seed": seed}
        if self.params:
            own = scenario.selectors.get(self.table, {}) | self.params
            changed["selectors"] = scenario.selectors | {self.table: own}
        return scenario.model_copy(update=changed)

    def selector(self, scenario: Scenario) -> Selector | None:
        """Return a new selector for a scenario; None if the scenario names the selector.

        Raises:
            ParameterError: The selector cannot be made, or the object is not a selector.
        """
        if self.make is None:
            return None
        with refusing_faults(f"selector {self.label!r} cannot be created"):
            made = self.make(**common_params(scenario, self.make) | scenario.selectors.get(self.label, {}))
        if not isinstance(made, Selector):
            raise ParameterError(f"selector {self.label!r} must be a Selector, but its callable returned {made!r:.80}")
        return made


def read_contenders(
    selectors: SelectorLike | Sequence[SelectorLike | Contender] | Mapping[str, SelectorLike],
) -> list[Contender]:
    """Read the selectors of a comparison.

    Args:
        selectors: Names, references ("./mine.py:Fastest"), classes, or callables that make a selector. To set labels,
            use a mapping, label -> selector. A class or callable receives the parameters that it accepts among
            ``clients_per_round``, ``seed``, ``max_latency``, ``total_rounds`` and ``channels``. Contenders are returned
            unchanged.

    Returns:
        The contenders.

    Raises:
        ParameterError: An entry is not a selector, or its label cannot name a folder.

    Example:
        >>> [one.label for one in read_contenders(["bsfl", "random"])]
        ['bsfl', 'random']
    """
    if isinstance(selectors, str) or callable(selectors):
        selectors = [selectors]
    if not isinstance(selectors, Iterable):
        raise ParameterError(f"selectors must be names, classes, callables or a mapping to them, got {selectors!r:.80}")
    if isinstance(selectors, Mapping):
        return [_contender(given, check_label(str(label))) for label, given in selectors.items()]
    return [_contender(given) for given in selectors]


def _contender(given: SelectorLike | Contender, label: str | None = None) -> Contender:
    if isinstance(given, Contender):
        return given
    if isinstance(given, str):
        # Called to refuse an unknown name.
        selector_class(given)
        return Contender(label=label or check_label(label_of(given)), name=given)
    # One object cannot be the selector of several runs.
    if not callable(given) or (isinstance(given, type) and not issubclass(given, Selector)):
        raise ParameterError(
            f"a selector must be a name, a class or a callable that makes one, got {type(given).__name__}: {given!r}"
        )
    # A functools.partial has no name, but its function has one.
    made = getattr(given, "func", given)
    own = getattr(made, "name", None) or getattr(made, "__name__", None)
    if label is None and (own is None or own == "<lambda>"):
        raise ParameterError("a callable without a name needs a label. Give {'label': callable}")
    return Contender(label=label or check_label(str(own)), make=given)


def sweep_contenders(
    contenders: Sequence[Contender], sweep: Mapping[str, Sequence[Any]], scenario: Scenario
) -> list[Contender]:
    """Replace each contender that a sweep names with one contender per setting.

    Args:
        contenders: The selectors that are compared.
        sweep: "selectors.NAME.PARAMETER" -> the values to try. Several parameters of a selector give every combination.
        scenario: The scenario, which may set other parameters of the selectors.

    Returns:
        The contenders in the same order. The label of a setting is the selector's label and the values.

    Raises:
        ParameterError: A key does not name a parameter of a compared selector. Also raised if values are missing or
            repeated, or cannot be written to a file.

    Example:
        >>> from fedsel_flwr.simulations import load_scenario
        >>> both = read_contenders(["bsfl", "random"])
        >>> [one.label for one in sweep_contenders(both, {"selectors.bsfl.alpha": [0.3, 1]}, load_scenario("smoke"))]
        ['bsfl alpha=0.3', 'bsfl alpha=1', 'random']
    """
    if not isinstance(sweep, Mapping):
        raise ParameterError(
            f"sweep must map keys to values, as in {{'selectors.bsfl.alpha': [0.3, 1, 3]}}, got {type(sweep).__name__}"
        )
    # Table of a selector -> parameter -> pairs of value and text.
    tried: dict[str, dict[str, list[tuple[Any, str]]]] = {}
    known = dict.fromkeys(one.table for one in contenders)
    for key, given in sweep.items():
        table, parameter = _swept_parameter(key, known)
        values = _swept_values(key, given)
        tried.setdefault(table, {})[parameter] = list(zip(values, value_texts(values), strict=True))
    swept: list[Contender] = []
    for one in contenders:
        parameters = tried.get(one.table)
        if parameters is None:
            swept.append(one)
            continue
        # If the selector has no name, its table in the scenario has its label, which the settings do not keep.
        common = one.params if one.name else scenario.selectors.get(one.table, {})
        for setting in itertools.product(*parameters.values()):
            params = {name: value for name, (value, _) in zip(parameters, setting, strict=True)}
            texts = {name: text for name, (_, text) in zip(parameters, setting, strict=True)}
            label = check_label(setting_label(one.label, texts))
            swept.append(one.model_copy(update={"label": label, "params": common | params}))
    return swept


def _swept_parameter(key: str, known: Collection[str]) -> tuple[str, str]:
    """Return the selector and the parameter that a key of a sweep names."""
    beginning, _, parameter = str(key).rpartition(".")
    first, _, table = beginning.partition(".")
    if first != "selectors" or not table or not parameter:
        raise ParameterError(
            f"a sweep tries values of selectors.NAME.PARAMETER, got {key!r}. Run one comparison for each of its values"
        )
    if table not in known:
        raise ParameterError(f"a sweep tries values of compared selectors ({', '.join(known)}), got {key!r}")
    return table, parameter


def _swept_values(key: str, given: Any) -> list[Any]:
    """Return the values of a sweep's key in types that a file can hold."""
    values = given.tolist() if isinstance(given, np.ndarray) else given
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise ParameterError(f"sweep[{key!r}] must be a list of at least one value, got {given!r}. List the values")
    plain = [_plain(value) for value in values]
    for value in plain:
        parts = value if isinstance(value, list) else [value]
        if not all(isinstance(one, bool | int | float | str) for one in parts):
            raise ParameterError(
                f"sweep[{key!r}] must hold numbers, texts, booleans or lists, got {value!r}. Compare functions instead"
            )
        if plain.count(value) > 1:
            raise ParameterError(f"sweep[{key!r}] holds {value!r} twice. Give each value once")
    return plain


def _plain(value: Any) -> Any:
    """Convert NumPy's numbers and arrays, and tuples, to Python's numbers and lists."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def check_parameters(scenario: Scenario, contenders: Sequence[Contender]) -> None:
    """Refuse parameters of the named selectors that are unknown, missing or out of range.

    Args:
        scenario: The scenario of the comparison.
        contenders: The selectors.

    Raises:
        ParameterError: A parameter cannot be used. The error names it.
    """
    for one in contenders:
        if one.name:
            own = one.scenario(scenario, scenario.seed)
            if one.params:
                # Only the parameters of the sweep are checked, because reading the scenario checked its tables.
                swept = own.model_copy(update={"selectors": {one.table: dict(one.params)}})
                check_selector_tables(scenario.name, swept, [one.name])
            check_selector(own)


def runnable_selectors(scenario: Scenario, own: OwnParts = OwnParts()) -> tuple[list[str], dict[str, str]]:  # noqa: B008 (frozen)
    """Find the selectors that can run in a scenario.

    Args:
        scenario: The scenario.
        own: The caller's model, data and objective.

    Returns:
        Names of the selectors that can run, and a table of the others: name -> reason.
    """
    scenario = own.named_in(scenario)
    world = world_of(scenario, own)
    able, left_out = [], {}
    for name in names():
        named = scenario.model_copy(update={"selector": name})
        try:
            check_selector(named)
            # Made, because a parameter may change the selector's limits and its columns.
            most = make_strategy(world.with_scenario(named)).selector.max_clients
            if most is not None and scenario.num_clients > most:
                raise FedSelError(f"takes at most {most} clients, and there are {scenario.num_clients}")
        except FedSelError as error:
            left_out[name] = str(error)
        else:
            able.append(name)
    return able, left_out
