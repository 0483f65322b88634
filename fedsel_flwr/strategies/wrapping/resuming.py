"""Resuming a run: writing a strategy's checkpoints, and loading the one that the run resumes from.

:mod:`fedsel_flwr.rounds.checkpoints` decides which checkpoint to load, and why others are refused.

A checkpoint holds the fingerprint of its run. The fingerprint covers the selector and its parameters, the averaging,
the rules for reported numbers, and the base's class. The state depends on these, so a run with another fingerprint
refuses the checkpoint. Deadlines, waiting times and the base's parameters may change when a run is resumed.

The state of a base has a part for each of its layers: known attributes of Flower's classes, and ``state_dict`` of all
others. Values that Flower's strategies set again in every round are not saved. These are the round's arrays in DP
wrappers and QFedAvg. The state of NumPy's global generator is not saved either, because Flower's differential privacy
draws from it, and noise must not be drawn twice.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import logging
import textwrap
from collections.abc import Mapping, MutableMapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.common import Parameters

from fedsel_flwr.errors import ParameterError, RunError, StateError
from fedsel_flwr.rounds.checkpoints import JOURNAL, Checkpoint, Checkpoints, check_fingerprint, check_model
from fedsel_flwr.rounds.core import SelectionCore
from fedsel_flwr.rounds.fingerprints import text_of
from fedsel_flwr.rounds.journal import Journal
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.option_checks import set_once
from fedsel_flwr.rounds.state_dicts import State
from fedsel_flwr.selectors import Selector
from fedsel_flwr.strategies.wrapping.bases import layers

logger = logging.getLogger("fedsel_flwr")
ATTRIBUTES: Final = ("m_t", "v_t", "current_weights", "momentum_vector", "clipping_norm", "clip_norm", "global_model")
"""Attributes of Flower's strategies that outlive a round: of FedOpt's family, FedAvgM, adaptive clipping, trees."""
OF_FEDAVGM: Final = ("initial_parameters", "current_arrays")
"""Attributes that outlive a round only in FedAvgM: other strategies drop the first, and set the second each round."""

PLAIN: Final = ("builtins", "abc", "functools", "numpy")
"""Modules of callables without a state: functions and classes. Others, such as a torch module, may have one."""


class Resuming:
    """Writes a run's checkpoints, and resumes the run from one.

    Args:
        core: The strategy's core.
        base: The base strategy.
        checkpoints: The folder of the checkpoints; None writes nothing.
        total_rounds: The last round of the run; None if only the server knows it.

    Attributes:
        fingerprint: Fingerprint that a checkpoint must match: part or parameter -> its value as text. An engine adds
            more facts about the run, such as its scenario, before the run begins.
        total_rounds: The last round that chooses clients; None if only the server knows it.
        last_round: The last round of the run, which always has a checkpoint; None if it is not known.
        checkpoint: The checkpoint from which the run was resumed; None before the run began, and in a new run.
    """

    def __init__(
        self, core: SelectionCore, base: object, checkpoints: Checkpoints | None, total_rounds: int | None
    ) -> None:
        if checkpoints is not None:
            for layer in layers(base):
                _check_layer(layer)
                if held := [
                    name for name, one in vars(layer).items() if callable(one) and type(one).__module__ not in PLAIN
                ]:
                    logger.warning(
                        "checkpoints save no %s of %s. Give it state_dict() if they change", held, _class(layer)
                    )
            # A checkpoint holds the length of the journal, not the rounds themselves.
            core.parts.history.write_to(Journal(checkpoints.folder / JOURNAL))
        self._core, self._base, self._checkpoints = core, base, checkpoints
        # The parameters of the base's layers as the user set them, and the configs of Flower's loop with their values.
        self._given = [_parameters(layer) for layer in layers(base)]
        self._configs: dict[str, tuple[MutableMapping[str, Any], dict[str, Any]]] = {}
        self.total_rounds = self.last_round = total_rounds
        self.fingerprint = run_fingerprint(core, base)
        self.checkpoint: Checkpoint | None = None
        self._begun = False
        self._written = 0
        # The last round without a checkpoint, and the states of core and base after it.
        self._held: tuple[int, State, State] | None = None

    @property
    def is_over(self) -> bool:
        """Return whether the run is over: the last round was already chosen, or the run has ended before."""
        return self._core.ended or (self.total_rounds is not None and self._core.round >= self.total_rounds)

    @property
    def resume_hint(self) -> str:
        """Return how to resume a run that breaks off in this round, for messages."""
        if self._checkpoints is None:
            return "Start the run again. With checkpoint_dir set, you could resume it"
        if not self._written:
            return "Start the run again: no round had a checkpoint yet"
        folder = str(self._checkpoints.folder.absolute())
        return f"Start the run again with resume = true: it then continues after round {self._written} from {folder!r}"

    def rounds_left(self, num_rounds: int, done: int) -> int:
        """Return how many of a server's ``num_rounds`` remain after the finished ones."""
        left = max(0, num_rounds - done)
        if self.total_rounds is not None:
            left = min(left, max(0, self.total_rounds - self._core.round))
        self.last_round = self._core.round + left
        return left

    def begin(self, initial: Mapping[str, Any] | None = None) -> Checkpoint | None:
        """Resume from the newest checkpoint that can be used; later calls change nothing.

        Args:
            initial: Name -> array of the initial model of a new run; None if it is not known.

        Returns:
            The checkpoint; None in a new run.

        Raises:
            RunError: There are checkpoints, but none can be used.
        """
        if self._begun or self._checkpoints is None:
            return self.checkpoint
        self.checkpoint = self._checkpoints.newest(lambda one: self._take(one, initial))
        self._begun = True
        if self.checkpoint is not None:
            self._written = self.checkpoint.round
            # Connections that owed an answer at the checkpoint owed it to a server that no longer exists.
            self._core.parts.busy.clear()
            logger.info("resuming the run in %s after round %d", self._checkpoints.folder, self._written)
        return self.checkpoint

    def follow(self, name: str, config: MutableMapping[str, Any]) -> None:
        """Save what the base changes in a config that Flower's loop keeps from round to round, and restore it."""
        known = name in self._configs
        self._configs[name] = config, self._configs[name][1] if known else dict(config)
        if not known and self.checkpoint is not None:
            config.update(self.checkpoint.base.get("configs", {}).get(name, {}))

    def write_if_due(self, number: int, model: Arrays, names: Sequence[str] | None = None) -> None:
        """Write the checkpoint of a round, if it is due and the round is the last one in the history.

        Args:
            number: The absolute round.
            model: The global model after it.
            names: The names of its arrays; None numbers them.

        Raises:
            RunError: The checkpoint cannot be written, or the run did not begin correctly.
        """
        if not self.is_due(number) or self._checkpoints is None:
            return
        # Writing now would overwrite the checkpoints from which the user wanted to resume.
        if not self._begun and self._checkpoints.resume:
            raise RunError(
                f"round {number} ran with resume={self._checkpoints.resume!r}, but no checkpoint was loaded before it. "
                "Your own engine must read strategy.resumed before its first round"
            )
        self._write(number, model, names, *self._states())

    def hold(self, number: int) -> None:
        """Keep the states after a round without a checkpoint, in case the next round ends in an error."""
        # Copies, because the next round changes the live states before it can fail.
        if self._checkpoints is not None and number == self._core.round and number > self._written:
            self._held = (number, *copy.deepcopy(self._states()))

    def write_on_error(self, number: int, model: Arrays, names: Sequence[str]) -> Path | None:
        """Write the missing checkpoint of the last finished round, because the run ends in an error.

        Args:
            number: The absolute round.
            model: The global model after it.
            names: The names of its arrays.

        Returns:
            The path of the checkpoint; None if this round has none.

        Raises:
            RunError: The checkpoint cannot be written.
        """
        if self._checkpoints is None:
            return None
        last = self._core.parts.history.last
        # The kept states come first, because the live ones may already contain a part of the failed round.
        if number > self._written and self._held is not None and self._held[0] == number:
            self._write(number, model, names, *self._held[1:])
        elif number > self._written and number == self._core.round and last is not None and last.round == number:
            self._write(number, model, names, *self._states())
        return self._checkpoints.path(number) if number == self._written else None

    def _states(self) -> tuple[State, State]:
        """Return the states of core and base."""
        configs = {
            name: {key: value for key, value in config.items() if key not in given or given[key] != value}
            for name, (config, given) in self._configs.items()
        }
        return self._core.state_dict(), save_base(self._base, self._given) | {"configs": configs}

    def _write(self, number: int, model: Arrays, names: Sequence[str] | None, state: State, base: State) -> None:
        if self._checkpoints is None:
            return
        names = [str(i) for i in range(len(model))] if names is None else list(names)
        checkpoint = Checkpoint(
            round=number, model=list(model), names=names, state=state, base=base,
            fingerprint=self.fingerprint, total_rounds=self.last_round,
        )  # fmt: skip
        self._checkpoints.write(checkpoint)
        self._written, self._held = number, None

    def is_due(self, number: int) -> bool:
        """Return whether this absolute round must have a checkpoint."""
        if self._checkpoints is None or number != self._core.round or number <= self._written:
            return False
        return self._checkpoints.due(number) or number == self.last_round or self._core.ended

    def _take(self, checkpoint: Checkpoint, initial: Mapping[str, Any] | None) -> None:
        """Load a checkpoint; raise :class:`StateError` and change nothing if it does not fit.

        A model of trees has no fixed shapes, so its shapes are not checked.
        """
        check_fingerprint(checkpoint.fingerprint, self.fingerprint)
        if initial is not None and self._core.settings.payload != "trees":
            check_model(dict(zip(checkpoint.names, checkpoint.model, strict=True)), initial)
        before = save_base(self._base)
        load_base(self._base, checkpoint.base)
        try:
            self._core.load_state_dict(checkpoint.state)
        except StateError:
            load_base(self._base, before)
            raise


def run_fingerprint(core: SelectionCore, base: object) -> dict[str, str]:
    """Return the fingerprint of a run: part or parameter -> its value as text."""
    selector, settings = core.parts.selector, core.settings
    fingerprint = {"selector": selector.name}
    for name in inspect.signature(type(selector)).parameters:
        # A resumed run may have another seed, because the generator's state comes from the checkpoint.
        if name != "seed" and hasattr(selector, name):
            fingerprint[f"selector.{name}"] = text_of(getattr(selector, name))
    for name in ("max_latency", "averaging", "clock", "identity", "learning_rate", "momentum", "over_selection"):
        fingerprint[name] = text_of(getattr(settings, name))
    if settings.concurrency is not None:
        fingerprint["concurrency"] = text_of(settings.concurrency)
    if settings.late != "drop":
        fingerprint["late"] = text_of((settings.late, settings.late_scale_coff))
    fingerprint["filter"] = text_of(settings.filter and settings.filter.score)
    # A user's subclass is in the user's module, so the nearest Flower class decides which API it is.
    flowers = (cls.__module__ for cls in type(base).__mro__ if cls.__module__.startswith("flwr."))
    # flwr.server of the legacy API, or flwr.serverapp of the Message API: their classes have the same names.
    api = ".".join(next(flowers, "").split(".")[:2])
    return {**fingerprint, "base": f"{', '.join(type(layer).__qualname__ for layer in layers(base))} ({api})"}


def total_rounds(selector: Selector, given: int | None, checkpointing: bool) -> int | None:
    """Return the last round of a run: the given number or, with checkpoints, the selector's ``total_rounds``.

    Raises:
        ParameterError: Both numbers are set, and differ.
    """
    common = set_once("total_rounds", given, getattr(selector, "total_rounds", None))
    return common if checkpointing else given


def save_base(base: object, given: Sequence[Mapping[str, Any]] = ()) -> State:
    """Return a base's own state.

    Args:
        base: The base strategy.
        given: The parameters of each layer as the user set them. Those that the layer has changed since are saved.

    Returns:
        A state for a checkpoint, with the list of the layers' states under "layers".

    Raises:
        ParameterError: A layer has state that cannot be saved, perhaps in an attribute that it got after the start.
    """
    return {"layers": [_save_layer(*one) for one in zip(layers(base), chain(given, repeat(None)), strict=False)]}


def load_base(base: object, state: Mapping[str, Any]) -> None:
    """Load a state of :func:`save_base`.

    Raises:
        StateError: The state belongs to another strategy, or a layer refuses its part; nothing has changed.
    """
    mine, theirs = list(layers(base)), state.get("layers")
    if not isinstance(theirs, list) or [_class(layer) for layer in mine] != [one.get("class") for one in theirs]:
        names = [one.get("class") for one in theirs] if isinstance(theirs, list) else theirs
        raise StateError(f"base: the state belongs to {names}, but this base is {[_class(layer) for layer in mine]}")
    before = save_base(base)
    # A user's own load_state_dict may raise any error after outer layers were loaded, so all layers are restored.
    try:
        for layer, part in zip(mine, theirs, strict=True):
            _load_layer(layer, part)
    except Exception as error:
        for layer, part in zip(mine, before["layers"], strict=True):
            _load_layer(layer, part)
        raise StateError(f"base: {type(error).__name__}: {error}") from error


def _check_layer(layer: object) -> None:
    """Refuse a layer with attributes that are neither in Flower's code nor covered by a ``state_dict``."""
    if _has_state_dict(layer) or _is_flowers(type(layer)):
        return
    flowers = [cls for cls in type(layer).__mro__ if _is_flowers(cls)]
    known = {*_lasting(layer), *_taken(layer)}.union(*map(_assigned_by, flowers))
    slots = [name for cls in type(layer).__mro__ for name, one in vars(cls).items() if inspect.ismemberdescriptor(one)]
    own = vars(layer) | {name: getattr(layer, name) for name in slots if hasattr(layer, name)}
    unknown = sorted(name for name, value in own.items() if name not in known and not callable(value))
    if unknown:
        raise ParameterError(
            f"checkpoints cannot save {_class(layer)}, which keeps {', '.join(unknown)}. Set no checkpoint_dir, or "
            "give it state_dict(), with what outlives a round (numbers, texts, lists, arrays), and load_state_dict()"
        )


# An instance does not record whether Flower's class or the user's subclass set an attribute, so the source of Flower's
# class decides. ``__static_attributes__`` has the same names, but only from Python 3.13 on.
@functools.cache
def _assigned_by(cls: type) -> frozenset[str]:
    """Return the attributes that a class assigns in its own methods; none if its source is not installed.

    >>> from flwr.server.strategy import FedAvgM
    >>> assigned = _assigned_by(FedAvgM)
    >>> "momentum_vector" in assigned, "aggregate_fit" in assigned
    (True, False)
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    # Without the source, a user's subclass is refused and its attributes are named, so that no state is lost silently.
    except (OSError, SyntaxError):
        return frozenset()
    stored = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return frozenset(node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self")


def _lasting(layer: object) -> list[str]:
    """Return the known attributes of a layer that outlive a round."""
    is_fedavgm = any(cls.__name__ == "FedAvgM" for cls in type(layer).__mro__)
    return [name for name in (*ATTRIBUTES, *(OF_FEDAVGM if is_fedavgm else ())) if name in vars(layer)]


def _taken(layer: object) -> set[str]:
    """Return the names of the parameters of Flower's classes."""
    return {name for cls in type(layer).__mro__ if _is_flowers(cls) for name in inspect.signature(cls).parameters}


def _parameters(layer: object) -> dict[str, Any]:
    """Return the parameters of Flower's classes that are numbers or texts."""
    names = _taken(layer)
    return {name: one for name, one in vars(layer).items() if name in names and isinstance(one, str | int | float)}


def _save_layer(layer: Any, given: Mapping[str, Any] | None = None) -> State:
    _check_layer(layer)
    lasting = _lasting(layer) if any(map(_is_flowers, type(layer).__mro__)) else []
    known = {name: _to_plain(getattr(layer, name)) for name in lasting}
    known |= {} if given is None else dict(_parameters(layer).items() - given.items())
    own = layer.state_dict() if _has_state_dict(layer) else None
    part: State = {"class": _class(layer), "known": known, "own": own}
    # Differential privacy with an accountant: the spent budget must not be spent again after a restart.
    accountant = getattr(layer, "accountant", None)
    if accountant is not None:
        part["accountant"] = accountant.state_dict()
    return part


def _load_layer(layer: Any, part: Mapping[str, Any]) -> None:
    if _has_state_dict(layer) != (part["own"] is not None):
        raise StateError(
            f"{_class(layer)} {'has' if part['own'] is None else 'lacks'} state_dict, unlike its saved state"
        )
    for name, value in part["known"].items():
        setattr(layer, name, _from_plain(value))
    if part["own"] is not None:
        layer.load_state_dict(part["own"])
    if "accountant" in part:
        if getattr(layer, "accountant", None) is None:
            raise StateError(f"the state of {_class(layer)} has a privacy accountant, but this base has none")
        layer.accountant.load_state_dict(part["accountant"])


def _class(layer: object) -> str:
    return type(layer).__qualname__


def _is_flowers(cls: type) -> bool:
    return cls.__module__.startswith("flwr.")


def _has_state_dict(layer: object) -> bool:
    return callable(getattr(layer, "state_dict", None)) and callable(getattr(layer, "load_state_dict", None))


def _to_plain(value: object) -> Any:
    """Convert a Flower value into plain types."""
    if isinstance(value, Parameters):
        return {"flower": "Parameters", "tensor_type": value.tensor_type, "tensors": list(value.tensors)}
    if isinstance(value, ArrayRecord):
        return {"flower": "ArrayRecord", "arrays": {name: array.numpy() for name, array in value.items()}}
    return value


def _from_plain(value: Any) -> Any:
    """Convert the result of :func:`_to_plain` back."""
    if isinstance(value, Mapping) and value.get("flower") == "Parameters":
        return Parameters(tensors=value["tensors"], tensor_type=value["tensor_type"])
    if isinstance(value, Mapping) and value.get("flower") == "ArrayRecord":
        return ArrayRecord({name: Array(np.asarray(array)) for name, array in value["arrays"].items()})
    return value
