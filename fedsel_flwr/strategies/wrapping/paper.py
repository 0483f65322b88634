"""Papers as strategies: one call takes the selector's parameters and the strategy's.

Each paper has a class per API, each in its file: ``fedsel_flwr/strategies/bsfl.py`` for the legacy API and
``fedsel_flwr/strategies/message/bsfl.py`` for the Message API. The former says what the paper asks for, and the latter
names it as its twin.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

from fedsel_flwr.checks import AUTO, real
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.roster import ClientValues, Roster
from fedsel_flwr.selectors import Selector
from fedsel_flwr.strategies.wrapping.adapter import Adapter


class PaperStrategy(Adapter):
    """A strategy that builds its own selector; stands before ``SelectionStrategy`` of either API among the bases.

    Parameters are the selector's and the strategy's, all by keyword. If both have ``max_latency``, a number sets both;
    "auto" concerns the selector alone, and ``longest_wait`` is then the strategy's. Parameters that hold a number per
    client (:attr:`Selector.by_client`) take an array if the client ids are 0..K-1, else a mapping from client id.

    Args:
        base: Any Flower strategy of the same API; FedAvg without federated evaluation if None.
        **params: Parameters of the selector's class, and the options of :class:`fedsel_flwr.rounds.settings.Options`.
            If the selector has ``max_latency``, also ``longest_wait``: longest wait for a client, seconds; None takes
            ``max_latency``, or 60 if that is "auto".

    Attributes:
        selector_class: The paper's selector; a subclass sets it.
        auto_on_server_clock: Parameters of the selector that may be left out on the server's clock, and are then
            "auto": the observed times decide. A subclass may set it.

    Raises:
        ParameterError: An unknown or missing parameter, or a value out of range.
    """

    selector_class: ClassVar[type[Selector]]
    auto_on_server_clock: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, twin: type[PaperStrategy] | None = None, **kwargs: Any) -> None:
        """Show the whole signature in ``help()`` and editors; a ``twin`` says what the paper asks for."""
        super().__init_subclass__(**kwargs)
        if twin is not None:
            cls.selector_class, cls.auto_on_server_clock = twin.selector_class, twin.auto_on_server_clock
        cls.__signature__ = inspect.Signature(list(_parameters(cls).values()))  # type: ignore[attr-defined]

    def __init__(self, base: Any = None, **params: Any) -> None:
        accepted = _parameters(type(self))
        unknown = sorted(params.keys() - accepted.keys())
        missing = sorted(k for k, p in accepted.items() if p.default is p.empty and k not in params)
        if unknown or missing:
            problem = f"does not know {', '.join(unknown)}" if unknown else f"needs {', '.join(missing)}"
            raise ParameterError(f"{type(self).__name__} {problem}. Its parameters are {', '.join(accepted)}.")
        params = params | self._observed(params)
        roster = Roster()
        own = inspect.signature(self.selector_class).parameters
        selector_params = {key: value for key, value in params.items() if key in own}
        values = {
            key: ClientValues(key, selector_params[key], roster)
            for key in self.selector_class.by_client
            if selector_params.get(key) is not None
        }
        if values:
            # The roster is empty, so that a ClientValues shows the selector no number yet. A selector that is thrown
            # away reads all of them, and refuses a wrong number before round 1.
            self.selector_class(**selector_params | {k: dict(enumerate(v.given.values())) for k, v in values.items()})
        selector = self.selector_class(**selector_params | values)
        rest = {key: value for key, value in params.items() if key not in own}
        if "max_latency" in own:
            # None lets the strategy take the selector's number, or 60 s if that is "auto"
            wait = rest.pop("longest_wait", None)
            rest["max_latency"] = None if wait is None else real("longest_wait", wait, above=0.0)
        super().__init__(selector, base, roster=roster, client_values=tuple(values.values()), **rest)

    def _observed(self, params: Mapping[str, Any]) -> dict[str, str]:
        """Return "auto" for the parameters that were not given; refuse it on the virtual clock, which times nobody."""
        left_out = {name: AUTO for name in self.auto_on_server_clock if params.get(name) is None}
        if left_out and params.get("clock") != "server":
            raise ParameterError(
                f'{type(self).__name__} needs {", ".join(left_out)} on the virtual clock. Give seconds, or "auto" to '
                'learn it from the reported times; with clock="server" it may be left out.'
            )
        return left_out


def _parameters(strategy: type[PaperStrategy]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a strategy's selector and those of every strategy, each once."""
    selector_class = strategy.selector_class
    common = inspect.signature(Adapter.__init__).parameters
    hidden = ("self", "selector", "roster", "client_values")
    merged = dict(inspect.signature(selector_class).parameters)
    if "max_latency" in merged:
        merged["longest_wait"] = common["max_latency"].replace(name="longest_wait")
    for name in strategy.auto_on_server_clock:
        merged[name] = merged[name].replace(default=None)
    # The selector's parameters come first, and win: its max_latency is a reward's, with "auto"
    merged |= {k: p for k, p in common.items() if k not in merged and k not in hidden}
    averaging = selector_class.paper_options.get("averaging")
    merged["averaging"] = merged["averaging"].replace(default=averaging)
    return {k: p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for k, p in merged.items()}
