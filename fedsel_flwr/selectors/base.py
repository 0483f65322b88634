"""Interface of every selector: probe, select, observe, inform."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedsel_flwr.checks import FloatArray, IntArray, ascending, indices, whole
from fedsel_flwr.errors import ParameterError
from fedsel_flwr.selectors._contract import (
    check_declarations,
    check_report,
    checked_choice,
    checked_needs,
    noting_declarations,
)
from fedsel_flwr.selectors._draws import top
from fedsel_flwr.selectors.columns import INFORMED, column_values
from fedsel_flwr.selectors.round_report import Probe, RoundReport
from fedsel_flwr.selectors.selector_state import SavedState

__all__ = ["Probe", "Selector", "SizedSelector"]


class Selector(SavedState, ABC):
    """Selects the clients of each round and learns from their reports.

    A subclass implements :meth:`_select` and :meth:`_observe`. It names the report columns it reads in :attr:`needs`,
    and its state in :attr:`client_state`, :attr:`scalar_state` and :attr:`free_state`
    (:class:`~fedsel_flwr.selectors.selector_state.SavedState`). This class adds checks, growth, round numbers and
    saving. :func:`fedsel_flwr.testing.check_selector` tests a subclass.

    A report has the columns that the server measures for every completed client. A column that clients report (source
    ``"reply"`` in :data:`~fedsel_flwr.selectors.columns.COLUMNS`) is NaN for clients that did not report it. The
    selector must handle these NaN. If :attr:`requires` names the column, such a client counts as failed instead.

    Attributes:
        name: Name in files and on the command line. The default is the name of the class.
        needs: Report columns that the selector reads, of :data:`~fedsel_flwr.selectors.columns.REPORTED`.
        requires: Columns among ``needs`` that clients report and that the selector cannot work without.
        asks: Columns that the selector's probes ask for, of :data:`~fedsel_flwr.selectors.columns.PROBED`. For
            documentation only.
        remembers: Maps a column of :meth:`inform` to the attribute in :attr:`client_state` that holds each client's
            latest finite value, as in ``{"num_examples": "_size"}``.
        by_client: Parameters that hold a number per client, by index.
        asks_failed_for_ever: Whether a client that never answers may be selected in every round. Strategies then
            exclude failing clients for a while by default (``cooldown="auto"``).
        may_exceed_clients_per_round: Whether a cohort may have more clients than ``clients_per_round``, and whether
            ``clients_per_round`` may be None. If False, a larger cohort is an error, because a larger cohort alone
            could win a comparison.
        buffers: Whether the selector can be used in buffered rounds, in which a report has clients of earlier
            selections (``concurrency`` of the strategies). False for an opening of its own.
        paper_options: Strategy options whose default comes from the paper, such as ``{"averaging": "mean"}``.
        waves: Whether clients share ``clients_per_round`` channels in a scenario that sets no number of channels.
        over_selection: Extra clients asked, as a share of ``clients_per_round`` (:meth:`plan_rounds`).
        max_clients: Largest number of clients, for a method whose cost grows faster than their number. None sets no
            limit.
        common_warmup: Number of first rounds in which all available clients are selected, with every selector
            (:meth:`plan_rounds`). These rounds count as rounds, and the selector learns from their reports.

    Args:
        clients_per_round: Number of clients to select each round.
        seed: Seed of the selector's own generator; None draws one from the operating system.

    Raises:
        ParameterError: A parameter is out of its range.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()
    requires: ClassVar[frozenset[str]] = frozenset()
    asks: ClassVar[frozenset[str]] = frozenset()
    remembers: ClassVar[Mapping[str, str]] = {}
    by_client: ClassVar[frozenset[str]] = frozenset()
    asks_failed_for_ever: ClassVar[bool] = False
    may_exceed_clients_per_round: ClassVar[bool] = False
    buffers: ClassVar[bool] = True
    waves: ClassVar[bool] = True
    paper_options: ClassVar[Mapping[str, str]] = {}
    citations: ClassVar[tuple[str, ...]] = ()
    """BibTeX entries of the selector's papers, which ``fedsel cite`` prints."""
    over_selection: float = 0.0
    common_warmup: int = 0
    max_clients: int | None = None

    # An int, or None if the algorithm decides how many clients it selects.
    clients_per_round: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inherited = (vars(one).get("client_state", {}) for one in reversed(cls.__mro__))
        cls.client_state = {name: value for own in inherited for name, value in own.items()}
        check_declarations(cls, Selector)
        # A subclass of BSFL is another selector: under BSFL's name a table would show the two as one.
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def __init__(self, *, clients_per_round: int | None, seed: int | None = None) -> None:
        super().__init__(seed=seed)
        if clients_per_round is None and not self.may_exceed_clients_per_round:
            raise ParameterError(
                f"clients_per_round must be a whole number of at least 1, got None. If the algorithm decides how many "
                f"it chooses, set may_exceed_clients_per_round = True in {type(self).__name__}"
            )
        self.clients_per_round = None if clients_per_round is None else whole("clients_per_round", clients_per_round, 1)

    def __repr__(self) -> str:
        """Return the class with its parameters; a long value is replaced by its type and size.

        >>> from fedsel_flwr.selectors import CSUCB
        >>> CSUCB(clients_per_round=2, max_latency=5.0)
        CSUCB(clients_per_round=2, max_latency=5.0, exploration=1.0)
        """
        names = inspect.signature(type(self)).parameters
        shown = (f"{name}={_abbreviated(getattr(self, name))}" for name in names if hasattr(self, name))
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def round(self) -> int:
        """Number of the latest round, from 1; 0 before the first."""
        return self._round

    @property
    def num_clients(self) -> int:
        """Number of registered clients: those passed to :meth:`inform`, or seen in ``available``."""
        return int(np.count_nonzero(self._registered))

    @property
    def asked_per_round(self) -> Any:
        """Number of clients to ask each round: ``clients_per_round``, and more if the strategy over-selects.

        Constants of the algorithm use ``clients_per_round``. Over-selection changes only the size of the cohort.
        """
        m = self.clients_per_round
        return None if m is None else over_selected(m, self.over_selection)

    @property
    def warming_up(self) -> bool:
        """Whether the latest round belongs to the common warm-up."""
        return 1 <= self._round <= self.common_warmup

    @property
    def own_round(self) -> int:
        """Number of the latest round, counted from the end of the common warm-up: 1 for the first round after it."""
        return self._round - self.common_warmup

    @property
    def keeps_model(self) -> bool:
        """Whether the latest round only measures clients, so that the global model must not change."""
        return False

    @property
    def takes_information(self) -> bool:
        """Whether the selector uses the columns of :meth:`inform`."""
        return bool(self.remembers) or type(self)._inform is not Selector._inform

    @property
    def done(self) -> bool:
        """Whether the run may end because no client is left to select; False unless a subclass overrides it."""
        return False

    def plan_rounds(self, *, over_selection: float = 0.0, warmup_rounds: int = 0) -> None:
        """Set the over-selection and the common warm-up of the strategy; called once, before the first round.

        Args:
            over_selection: Extra clients asked, as a share of ``clients_per_round``.
            warmup_rounds: Number of first rounds in which all available clients are selected, with every selector.
        """
        self.over_selection, self.common_warmup = over_selection, warmup_rounds

    def expected_count(self, num_available: int) -> int | None:
        """Return the number of clients that the next :meth:`select` returns; None if only the algorithm knows."""
        if self.clients_per_round is None or self._round < self.common_warmup:
            return num_available
        return min(int(self.asked_per_round), num_available)

    def draws(self, clients: IntArray) -> IntArray:
        """Return how often each of ``clients`` was drawn in the latest round, shape (n,); by default once each."""
        return np.ones(len(clients), dtype=np.int64)

    def probe(self, available: IntArray) -> Probe | None:
        """Return the columns that clients must be asked for before the next :meth:`select`.

        Args:
            available: Indices of the clients that can take part, shape (n,).

        Returns:
            The clients and columns, or None for no probe. Probes cost simulated time and energy. The common warm-up has
            no probes, because all clients are selected.

        Raises:
            ParameterError: ``available`` is not an array of unique indices.
        """
        available = ascending("available", available)
        self._register(available)
        if not available.size or self._round < self.common_warmup:
            return None
        with noting_declarations(type(self)):
            return self._probe(available)

    def select(self, available: IntArray) -> IntArray:
        """Select the clients of the next round.

        Args:
            available: Indices of the clients that can take part, shape (n,), any order.

        Returns:
            The selected indices, ascending: min(asked_per_round, n) of ``available``, or all in the common warm-up.

        Raises:
            ParameterError: ``available`` is not an array of unique indices.
            RunError: The algorithm selected an unavailable client, or a client twice. Or it selected more clients than
                ``asked_per_round`` without :attr:`may_exceed_clients_per_round`.
        """
        available = ascending("available", available)
        self._register(available)
        # A round without available clients counts too, so that the selector and the run have equal round numbers.
        self._round += 1
        with noting_declarations(type(self)):
            self._advance()
            if available.size == 0:
                return available
            if self.warming_up:
                self._join(available)
                return available
            chosen = self._select(available)
        most = None if self.may_exceed_clients_per_round else self.asked_per_round
        return checked_choice(type(self).__name__, chosen, available, most)

    def observe(self, report: RoundReport) -> None:
        """Learn from the report of a round.

        Args:
            report: A row for each selected client, failed ones included.

        Raises:
            ParameterError: A column in :attr:`needs` is missing, or infinite for a completed client. Or a column is NaN
                for a completed client, although the server measures it or :attr:`requires` names it. Or the report
                names an unknown client.
        """
        known = report.clients < self._registered.size
        known[known] = self._registered[report.clients[known]]
        if not known.all():
            unknown = report.clients[~known].tolist()
            raise ParameterError(
                f"report names clients {unknown}, which were never available and never passed to inform. Report the "
                "clients that select returned"
            )
        if not report.clients.size:
            return
        # The class was checked at its definition, but an instance may set other needs.
        needs, requires = checked_needs(type(self).__name__, self.needs, self.requires)
        check_report(self.name, report, needs, requires)
        with noting_declarations(type(self)):
            self._observe(report)

    def inform(self, clients: IntArray, **columns: FloatArray) -> None:
        """Store side information about clients; ``inform(clients)`` alone registers the clients.

        Args:
            clients: Client indices, shape (n,).
            **columns: Any of :data:`~fedsel_flwr.selectors.columns.INFORMED`: numbers of shape (n,), vectors (gradient,
                sketch) of shape (n, d); NaN if unknown. Columns that the selector does not use are checked and ignored.

        Raises:
            ParameterError: A column is unknown, has the wrong shape, or is out of its range.
        """
        clients = indices("clients", clients)
        unknown = sorted(columns.keys() - INFORMED)
        if unknown:
            raise ParameterError(f"inform got unknown columns {unknown}. Choose from {sorted(INFORMED)}")
        checked = {name: column_values(name, value, len(clients)) for name, value in columns.items()}
        self._register(clients)
        with noting_declarations(type(self)):
            self._inform(clients, checked)

    def forget(self, clients: IntArray) -> None:
        """Reset the rows of ``clients``, so that new clients can get their indices.

        Args:
            clients: Client indices, shape (n,); unknown indices are ignored.

        Raises:
            ParameterError: ``clients`` is not an array of unique indices.
        """
        clients = indices("clients", clients)
        self._reset_rows(clients[clients < self._registered.size])

    def _probe(self, available: IntArray) -> Probe | None:
        """Return the probe before the next selection; ``available`` is ascending and not empty."""
        return None

    def _advance(self) -> None:
        """Start a round; called even in rounds without available clients."""

    @abstractmethod
    def _select(self, available: IntArray) -> IntArray:
        """Select clients from ``available``: registered, unique, ascending indices, and at least one."""

    def _join(self, available: IntArray) -> None:
        """Record that a round of the common warm-up selected all clients in ``available``."""

    def _observe(self, report: RoundReport) -> None:
        """Learn from a report that was checked and has at least one row."""

    def _inform(self, clients: IntArray, columns: Mapping[str, FloatArray]) -> None:
        """Store checked columns; by default, the latest finite values of the columns in :attr:`remembers`."""
        for name in self.remembers.keys() & columns.keys():
            known = np.isfinite(columns[name])
            getattr(self, self.remembers[name])[clients[known]] = columns[name][known]

    def _admit(self, clients: IntArray) -> None:
        """Prepare the rows of newly registered clients; to refuse clients, raise an error."""

    def _cost_of(self, count: int) -> str:
        """Return the cost of ``count`` clients, for the error about ``max_clients``; may be empty."""
        return ""

    def _register(self, clients: IntArray) -> None:
        """Add rows for ``clients`` and mark them as registered; refuse more than ``max_clients``."""
        if self.max_clients is not None:
            known = clients[clients < self._registered.size]
            count = self.num_clients + clients.size - int(np.count_nonzero(self._registered[known]))
            if count > self.max_clients:
                raise ParameterError(
                    f"{self.name} takes at most max_clients = {self.max_clients} clients, got {count}. Raise "
                    f"max_clients{self._cost_of(count)}, or choose among fewer"
                )
        self._add_rows(clients)
        new = clients[~self._registered[clients]]
        if new.size:
            with noting_declarations(type(self)):
                self._admit(new)
            # Must come after _admit, which may refuse the new clients.
            self._registered[new] = True

    def _largest(self, score: FloatArray, available: IntArray) -> IntArray:
        """Return the ``asked_per_round`` available clients with the largest scores; ties are broken at random.

        Args:
            score: Score by client index, shape (num_clients,).
            available: The available clients, ascending.
        """
        # top keeps the order of equal scores, so the permutation breaks the ties.
        shuffled = self._generator.permutation(available)
        return np.asarray(shuffled[top(score[shuffled], self.asked_per_round)])  # Xia (8), (10)


class SizedSelector(Selector):
    """A selector that knows how many examples each client has."""

    remembers: ClassVar[Mapping[str, str]] = {"num_examples": "_size"}
    client_state: ClassVar[Mapping[str, npt.ArrayLike]] = {"_size": -1.0}

    # -1 if unknown.
    _size: FloatArray

    def _sizes(self) -> FloatArray:
        """Return the clients' sizes. An unknown one is the mean of the registered clients' known ones, or 1."""
        known = self._registered & (self._size >= 0)
        mean = float(self._size[known].mean()) if known.any() else 1.0
        return np.where(self._size >= 0, self._size, mean)


def over_selected(clients_per_round: int, over_selection: float) -> int:
    """Return the number of clients to ask under over-selection: ceil((1 + x) m).

    >>> over_selected(10, 0.1), over_selected(10, 0.11)
    (11, 12)
    """
    # Rounded first: 0.07 * 100 is slightly above 7, and its ceiling would be 8.
    return clients_per_round + math.ceil(round(over_selection * clients_per_round, 9))


def _abbreviated(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"<{type(value).__name__} of {np.size(value)}>"
