"""Checkpoints of a strategy: when they are written, what they were made for, and how a run goes on from one.

What a run is made of, in words: a checkpoint of a run that was made of something else is not taken.

Only what the state depends on counts: the selector and its parameters, how models are averaged, what is believed of
clients, the base's class. Deadlines, waiting times and the base's parameters may change when a run goes on.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsel_flwr.errors import ParameterError, RunError, StateError
from fedsel_flwr.rounds.checkpoints import JOURNAL, Checkpoint, Checkpoints, json_path
from fedsel_flwr.rounds.core import SelectionCore
from fedsel_flwr.rounds.eligibility import Busy
from fedsel_flwr.rounds.history_storage import Journal
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.roster import ClientValues
from fedsel_flwr.rounds.state_dicts import State
from fedsel_flwr.selectors import Selector
from fedsel_flwr.strategies.wrapping.bases import layers

SHOWN = 60
"""Longest value in words; longer ones are told by their kind, size and digest."""


def made_for(core: SelectionCore, base: object) -> dict[str, str]:
    """What a strategy is made of, as far as what it learns depends on it."""
    selector, settings = core.parts.selector, core.settings
    said = {"selector": selector.name}
    for name in inspect.signature(type(selector)).parameters:
        if name != "seed" and hasattr(selector, name):  # the generator is part of the state
            said[f"selector.{name}"] = _in_words(getattr(selector, name))
    for name in ("max_latency", "averaging", "clock", "identity", "learning_rate", "momentum", "over_selection"):
        said[name] = _in_words(getattr(settings, name))
    said["filter"] = _in_words(settings.filter and settings.filter.score)
    flowers = (cls.__module__ for cls in type(base).__mro__ if cls.__module__.startswith("flwr."))
    api = ".".join(next(flowers, "").split(".")[:2])  # flwr.server, or flwr.serverapp of the Message API
    return {**said, "base": f"{', '.join(type(layer).__qualname__ for layer in layers(base))} ({api})"}


def _in_words(value: object) -> str:
    """A parameter's value in words that are the same in every process."""
    if isinstance(value, ClientValues):
        value = value.given
    if isinstance(value, np.ndarray):
        return f"array of {value.size}, {_digest(value.tobytes())}"
    if value is not None and not isinstance(value, bool | int | float | str | tuple | list | Mapping):
        return type(value).__qualname__
    text = repr(dict(value) if isinstance(value, Mapping) else value)
    return text if len(text) <= SHOWN else f"{type(value).__name__}, {_digest(text.encode())}"


def _digest(content: bytes) -> str:
    return f"SHA-256 {hashlib.sha256(content).hexdigest()[:16]}"


def check_made_for(theirs: Mapping[str, str], mine: Mapping[str, str]) -> None:
    """Refuse a checkpoint of a run that was made of something else.

    Raises:
        StateError: Says what differs.
    """
    differing = [key for key in {**theirs, **mine} if theirs.get(key) != mine.get(key)]
    if differing:
        said = "; ".join(
            f"{key} = {theirs.get(key, 'none')}, this one has {mine.get(key, 'none')}" for key in differing
        )
        raise StateError(f"it was written by a run with {said}")


logger = logging.getLogger("fedsel_flwr")


class Resuming:
    """Writes a run's checkpoints, and takes one over.

    Args:
        core: The strategy's core.
        base: The base strategy.
        checkpoints: Where; None writes nothing.
        total_rounds: The last round of the run; None where only the server knows.

    Attributes:
        made_for: What the run is made of, which a checkpoint must agree with: what -> how, in words. Whoever knows more
            (a scenario) adds it before the run begins.
        total_rounds: The round after which nobody is chosen; None where only the server knows.
        last_round: The round that the run will end with, which has a checkpoint in any case; None where nobody knows.
        checkpoint: The one that the run went on from; None before it began, and where it began anew.
    """

    def __init__(
        self, core: SelectionCore, base: object, checkpoints: Checkpoints | None, total_rounds: int | None
    ) -> None:
        if checkpoints is not None:
            from fedsel_flwr.strategies.wrapping.base_state import check_base

            check_base(base)
            core.parts.history.write_to(Journal(checkpoints.folder / JOURNAL))
        self._core, self._base, self._checkpoints = core, base, checkpoints
        self.total_rounds = self.last_round = total_rounds
        self.made_for = made_for(core, base)
        self.checkpoint: Checkpoint | None = None
        self._begun = False
        self._written = 0
        self._held: tuple[int, State, State] | None = None  # round, and the states of core and base after it

    @property
    def over(self) -> bool:
        """Whether the run is over: the last round was chosen already, or the run has ended before it."""
        return self._core.ended or (self.total_rounds is not None and self._core.round >= self.total_rounds)

    @property
    def way_back(self) -> str:
        """How a run that broke off in the round chosen last can be gone on with, for messages."""
        if self._checkpoints is None:
            return "Start the run again; with a checkpoint_dir it could go on from where it broke off"
        if not self._written:
            return "Start the run again: no round had a checkpoint yet"
        folder = str(self._checkpoints.folder.absolute())
        return f"Start the run again with resume = true: it goes on after round {self._written}, from {folder!r}"

    def rounds_left(self, num_rounds: int, done: int) -> int:
        """How many rounds a server that is to run ``num_rounds`` in all has left after those that were done."""
        left = max(0, num_rounds - done)
        if self.total_rounds is not None:
            left = min(left, max(0, self.total_rounds - self._core.round))
        self.last_round = self._core.round + left
        return left

    def begin(self, initial: Mapping[str, Any] | None = None) -> Checkpoint | None:
        """Go on from the newest checkpoint that can be used, once.

        Args:
            initial: Name -> array of the model that a new run would start from; None if that is not known.

        Returns:
            The checkpoint; None where the run begins anew.

        Raises:
            RunError: There are checkpoints, but none can be used.
        """
        if self._begun or self._checkpoints is None:
            return self.checkpoint
        self.checkpoint = self._checkpoints.newest(lambda one: self._take(one, initial))
        self._begun = True
        if self.checkpoint is not None:
            self._written = self.checkpoint.round
            self._core.parts.busy.clear()  # this run of Flower has asked nobody
            logger.info("the run in %s goes on after round %d", self._checkpoints.folder, self._written)
        return self.checkpoint

    def trained(self, number: int, model: Arrays, names: Sequence[str] | None = None) -> None:
        """Write the checkpoint of a round, if it is due and the round is the last one in the history.

        Args:
            number: The absolute round.
            model: The global model after it.
            names: The names of its arrays; None counts them.

        Raises:
            RunError: It cannot be written, or the run never began as it should.
        """
        if not self.wants(number) or self._checkpoints is None:
            return
        if not self._begun and self._checkpoints.resume:
            raise RunError(
                f"round {number} was played by a run that never looked for a checkpoint to go on from: Flower's "
                "servers call initialize_parameters or start; an engine of your own asks for strategy.resumed before "
                "its first round"
            )
        self._write(number, model, names, *self._states())

    def hold(self, number: int) -> None:
        """Keep the states after a round that has no checkpoint of its own, for an error before the next one."""
        if self._checkpoints is not None and number == self._core.round and number > self._written:
            self._held = (number, *copy.deepcopy(self._states()))

    def rescued(self, number: int, model: Arrays, names: Sequence[str]) -> Path | None:
        """Write the checkpoint of the last round that ended, if it has none: the run ends in an error.

        Args:
            number: The absolute round.
            model: The global model after it.
            names: The names of its arrays.

        Returns:
            The checkpoint; None where there is none of this round.

        Raises:
            RunError: It cannot be written.
        """
        if self._checkpoints is None:
            return None
        last = self._core.parts.history.last
        if number > self._written and self._held is not None and self._held[0] == number:
            self._write(number, model, names, *self._held[1:])
        elif number > self._written and number == self._core.round and last is not None and last.round == number:
            self._write(number, model, names, *self._states())
        return json_path(self._checkpoints.folder, number) if number == self._written else None

    def _states(self) -> tuple[State, State]:
        """The states of core and base."""
        from fedsel_flwr.strategies.wrapping.base_state import save_base

        return self._core.state_dict(), save_base(self._base)

    def _write(self, number: int, model: Arrays, names: Sequence[str] | None, state: State, base: State) -> None:
        if self._checkpoints is None:
            return
        names = [str(i) for i in range(len(model))] if names is None else list(names)
        made_for = self.made_for
        self._checkpoints.write(
            Checkpoint(round=number, model=list(model), names=names, state=state, base=base, fingerprint=made_for)
        )
        self._written, self._held = number, None

    def wants(self, number: int) -> bool:
        """Whether a checkpoint is to be written after this absolute round."""
        if self._checkpoints is None or number != self._core.round or number <= self._written:
            return False
        return self._checkpoints.due(number) or number == self.last_round or self._core.ended

    def _take(self, checkpoint: Checkpoint, initial: Mapping[str, Any] | None) -> None:
        """Continue from a checkpoint; raise :class:`StateError` and change nothing if it does not fit."""
        from fedsel_flwr.strategies.wrapping.base_state import load_base, save_base

        check_made_for(checkpoint.fingerprint, self.made_for)
        if initial is not None and self._core.settings.compare_models:
            _check_model(checkpoint, initial)
        before = save_base(self._base)
        load_base(self._base, checkpoint.base)
        try:
            self._core.load_state_dict({"busy": Busy().state_dict()} | checkpoint.state)  # older versions had none
        except StateError:
            load_base(self._base, before)
            raise


def total_rounds(selector: Selector, given: int | None, checkpointing: bool) -> int | None:
    """The last round of a run: what is given, or, for a run with checkpoints, what the selector was told.

    Raises:
        ParameterError: Both are given, and differ.
    """
    own: int | None = getattr(selector, "total_rounds", None)
    if given is not None and own is not None and own != given:
        raise ParameterError(f"total_rounds is {given} for the strategy but {own} for the selector; give it once")
    return own if given is None and checkpointing else given


def _check_model(checkpoint: Checkpoint, initial: Mapping[str, Any]) -> None:
    theirs = {name: np.shape(array) for name, array in zip(checkpoint.names, checkpoint.model, strict=True)}
    mine = {name: np.shape(array) for name, array in initial.items()}
    if theirs != mine:
        raise StateError(f"its model has arrays of the shapes {_shapes(theirs)}, the initial model {_shapes(mine)}")


def _shapes(of: Mapping[str, tuple[int, ...]]) -> str:
    text = ", ".join(f"{name} {shape}" for name, shape in of.items())
    return text if len(text) <= 200 else f"{text[:200]} ..."
