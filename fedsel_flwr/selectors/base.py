"""The ask/tell interface that every selector shares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedsel_flwr.checks import BoolArray, FloatArray, IntArray, column, indices, whole
from fedsel_flwr.errors import ParameterError, RunError, StateError
from fedsel_flwr.selectors.report import RoundReport

INFORM_COLUMNS = frozenset(
    {"num_examples", "energy_score", "accuracy", "loss", "local_accuracy", "rms_loss", "gradient", "sketch"}
)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A question to clients before the choice; the answers come by :meth:`Selector.inform`.

    Args:
        clients: Whom to ask, shape (n,).
        columns: What to ask for, at the current global model: columns of :meth:`Selector.inform`.
    """

    clients: IntArray
    columns: tuple[str, ...]


class Selector(ABC):
    """Chooses the clients of each round and learns from what they report.

    A subclass names the report columns it reads in :attr:`needs` and its state in :attr:`client_state` and
    :attr:`scalar_state`, and implements :meth:`_select` and :meth:`_observe`; checks, growth, the round number and
    saving come with this class. :func:`fedsel_flwr.testing.check_selector` tests a new one.

    Args:
        clients_per_round: How many clients to choose each round.
        seed: Seed of the selector's own generator; None draws one from the operating system.

    Raises:
        ParameterError: A parameter is out of its range.
    """

    name: ClassVar[str]  # the class's own name, where a subclass sets none
    needs: ClassVar[frozenset[str]] = frozenset()
    by_client: ClassVar[frozenset[str]] = frozenset()  # parameters that hold a number per client, by index
    asks_failed_for_ever: ClassVar[bool] = False  # whether a client that never answers may be chosen in every round
    client_state: ClassVar[Mapping[str, float | int | bool]] = {}  # attribute -> its value for a new client
    scalar_state: ClassVar[tuple[str, ...]] = ()  # further attributes: numbers

    clients_per_round: Any  # an int; None where the algorithm itself decides how many

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not hasattr(cls, "name"):
            cls.name = cls.__name__

    def __init__(self, *, clients_per_round: int | None, seed: int | None = None) -> None:
        self.clients_per_round = None if clients_per_round is None else whole("clients_per_round", clients_per_round, 1)
        self._generator = np.random.Generator(np.random.PCG64(seed))
        self._round = 0
        self._registered: BoolArray = np.zeros(0, dtype=np.bool_)
        for attribute, value in self.client_state.items():
            setattr(self, attribute, np.full(0, value))

    @property
    def round(self) -> int:
        """The 1-based number of the round chosen last; 0 before the first."""
        return self._round

    @property
    def num_clients(self) -> int:
        """How many clients are registered: informed about, or seen in ``available``."""
        return int(np.count_nonzero(self._registered))

    @property
    def keeps_model(self) -> bool:
        """Whether the round chosen last only measures clients, so that the global model must stay as it is."""
        return False

    def expected_count(self, num_available: int) -> int | None:
        """How many clients the next :meth:`select` returns of so many available; None if only the algorithm knows."""
        return num_available if self.clients_per_round is None else min(int(self.clients_per_round), num_available)

    def draws(self, clients: IntArray) -> IntArray:
        """How often each of ``clients``, shape (n,), was drawn in the round chosen last: once, without replacement."""
        return np.ones(len(clients), dtype=np.int64)

    def probe(self, available: IntArray) -> Probe | None:
        """Say what must be asked before the next :meth:`select`.

        Args:
            available: Indices of the clients that can take part, shape (n,).

        Returns:
            None, or whom to ask for what; probes cost simulated time and energy.

        Raises:
            ParameterError: ``available`` is not an array of unique indices.
        """
        available = np.sort(indices("available", available))
        self._register(available)
        return self._probe(available) if available.size else None

    def select(self, available: IntArray) -> IntArray:
        """Choose the clients of the next round.

        Args:
            available: Indices of the clients that can take part, shape (n,), any order.

        Returns:
            The chosen indices, ascending: min(clients_per_round, n) of ``available``.

        Raises:
            ParameterError: ``available`` is not an array of unique indices.
            RunError: The algorithm chose somebody who is not available, or twice.
        """
        available = np.sort(indices("available", available))
        self._register(available)
        self._round += 1
        self._advance()
        if available.size == 0:
            return available
        chosen = np.sort(np.asarray(self._select(available)))
        if chosen.ndim != 1 or (np.diff(chosen) == 0).any() or not np.isin(chosen, available).all():
            raise RunError(
                f"{type(self).__name__}._select must return different clients of those available, as an array of "
                f"indices, got {chosen.tolist()}"
            )
        return chosen

    def observe(self, report: RoundReport) -> None:
        """Learn from a round.

        Args:
            report: A row for each client that was selected, failed or not.

        Raises:
            ParameterError: A column named in :attr:`needs` is missing or not finite for a completed client, or a
                client was never seen.
        """
        unknown = [int(k) for k in report.clients if k >= self._registered.size or not self._registered[k]]
        if unknown:
            raise ParameterError(f"report names clients {unknown}, which were never available nor informed about")
        if not report.clients.size:
            return
        for name in sorted(self.needs - {"latency"}):
            value = getattr(report, name)
            if value is None:
                raise ParameterError(f"{self.name} needs the report column {name!r}, but it is missing")
            rows = np.asarray(value)[report.completed] if np.ndim(value) else np.asarray(value)
            if not np.isfinite(rows).all():
                raise ParameterError(f"report column {name!r} must be finite for completed clients, got {value}")
        self._observe(report)

    def inform(self, clients: IntArray, **columns: FloatArray) -> None:
        """Take in side information; ``inform(clients)`` alone registers the clients.

        Args:
            clients: Client indices, shape (n,).
            **columns: Any of num_examples, energy_score, accuracy, loss, local_accuracy, rms_loss (shape (n,)),
                gradient, sketch (shape (n, d)). Columns a selector does not use are checked and ignored.

        Raises:
            ParameterError: An unknown column, or a column of the wrong shape.
        """
        clients = indices("clients", clients)
        unknown = sorted(columns.keys() - INFORM_COLUMNS)
        if unknown:
            raise ParameterError(f"inform got unknown columns {unknown}; known are {sorted(INFORM_COLUMNS)}")
        checked = {
            name: column(name, value, len(clients), ndim=2 if name in ("gradient", "sketch") else 1)
            for name, value in columns.items()
        }
        self._register(clients)
        self._inform(clients, checked)

    def forget(self, clients: IntArray) -> None:
        """Drop what is known of ``clients``; their indices may be given to newcomers.

        Args:
            clients: Client indices, shape (n,); unknown ones are ignored.

        Raises:
            ParameterError: ``clients`` is not an array of unique indices.
        """
        clients = indices("clients", clients)
        clients = clients[clients < self._registered.size]
        self._registered[clients] = False
        for attribute, value in self.client_state.items():
            getattr(self, attribute)[clients] = value

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, generator included, as a flat dict of arrays and numbers (copies)."""
        generator: Any = self._generator.bit_generator.state
        words = [generator["state"]["state"], generator["state"]["inc"]]
        low = (1 << 64) - 1
        packed = [part for word in words for part in (word >> 64, word & low)]
        packed += [generator["has_uint32"], generator["uinteger"]]
        state: dict[str, Any] = {
            "round": self._round,
            "registered": self._registered.copy(),
            "generator": np.array(packed, dtype=np.uint64),
        }
        state |= {attribute.lstrip("_"): getattr(self, attribute).copy() for attribute in self.client_state}
        return state | {attribute.lstrip("_"): getattr(self, attribute) for attribute in self.scalar_state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`; nothing changes if it does not fit.

        Args:
            state: What :meth:`state_dict` of a selector with the same parameters returned.

        Raises:
            StateError: Keys, lengths or types differ from this selector's state.
        """
        own = self.state_dict()
        if own.keys() != state.keys():
            raise StateError(
                f"the state does not belong to {self.name}: missing {sorted(own.keys() - state.keys())}, "
                f"unexpected {sorted(state.keys() - own.keys())}"
            )
        registered = np.array(state["registered"])
        loaded: dict[str, Any] = {"_registered": registered}
        for attribute in self.client_state:
            loaded[attribute] = np.array(state[attribute.lstrip("_")])
        for attribute, array in loaded.items():
            dtype = getattr(self, attribute).dtype
            if array.shape != (registered.size,) or not np.can_cast(array.dtype, dtype, "same_kind"):
                raise StateError(
                    f"state {attribute.lstrip('_')!r} must be {dtype} of shape ({registered.size},), "
                    f"got {array.dtype} of shape {array.shape}"
                )
            loaded[attribute] = array.astype(dtype)
        packed = np.array(state["generator"])
        if packed.dtype != np.uint64 or packed.shape != (6,):
            raise StateError(f"state 'generator' must be uint64 of shape (6,), got {packed.dtype} {packed.shape}")
        for key in ("round", *(attribute.lstrip("_") for attribute in self.scalar_state)):
            if np.ndim(state[key]) != 0 or not np.isfinite(state[key]):
                raise StateError(f"state {key!r} must be a finite number, got {state[key]!r}")
        words = [int(part) for part in packed]
        self._generator.bit_generator.state = {
            "bit_generator": "PCG64",
            "state": {"state": words[0] << 64 | words[1], "inc": words[2] << 64 | words[3]},
            "has_uint32": words[4],
            "uinteger": words[5],
        }
        self._round = int(state["round"])
        for attribute, array in loaded.items():
            setattr(self, attribute, array)
        for attribute in self.scalar_state:
            setattr(self, attribute, type(own[attribute.lstrip("_")])(state[attribute.lstrip("_")]))

    def _probe(self, available: IntArray) -> Probe | None:
        """What to ask of ``available`` (ascending, not empty) before the next choice."""
        return None

    def _advance(self) -> None:  # noqa: B027
        """Begin the round whose number was just counted; called with nobody available too."""

    @abstractmethod
    def _select(self, available: IntArray) -> IntArray:
        """Choose from ``available``: ascending, unique, registered and not empty."""

    def _observe(self, report: RoundReport) -> None:  # noqa: B027 - a selector need not learn
        """Learn from a report that was checked and has at least one row."""

    def _inform(self, clients: IntArray, columns: Mapping[str, FloatArray]) -> None:  # noqa: B027
        """Take in columns that were checked."""

    def _admit(self, clients: IntArray) -> None:  # noqa: B027
        """Prepare the rows of clients that were just registered; raise to refuse them."""

    def _register(self, clients: IntArray) -> None:
        """Make room for ``clients`` and mark them as registered."""
        missing = int(clients.max(initial=-1)) + 1 - self._registered.size
        if missing > 0:
            self._registered = np.pad(self._registered, (0, missing))
            for attribute, value in self.client_state.items():
                setattr(self, attribute, np.append(getattr(self, attribute), np.full(missing, value)))
        new = clients[~self._registered[clients]]
        if new.size:
            self._admit(new)
            self._registered[new] = True

    def _largest(self, score: FloatArray, available: IntArray) -> IntArray:
        """The ``clients_per_round`` available clients of the largest score (by client index); ties at random."""
        shuffled = self._generator.permutation(available)
        order = np.argsort(-score[shuffled], kind="stable")
        return np.asarray(shuffled[order[: self.clients_per_round]])  # Xia (8), (10)
