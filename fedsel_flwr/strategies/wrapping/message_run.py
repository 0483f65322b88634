"""A run of the Message API: its rounds in Flower's loop, or in that of a base's own ``start``.

A strategy may have a ``start`` that does more around ``super().start``, or that has its own loop over
``self.configure_train``, ``grid.send_and_receive`` and ``self.aggregate_train``. :func:`with_own_start` runs this
``start`` on an object like the base. The rounds of this object are the wrapper's. Its ``super().start`` is the
wrapper's loop (:class:`MessageRun`).
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Concatenate, ParamSpec

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.rounds.checkpoints import Checkpoint
from fedsel_flwr.rounds.history import History
from fedsel_flwr.rounds.run_length import check_should_stop
from fedsel_flwr.strategies.wrapping.adapter import Adapter
from fedsel_flwr.strategies.wrapping.arrivals import Arrivals
from fedsel_flwr.strategies.wrapping.grids import TimedGrid
from fedsel_flwr.strategies.wrapping.message_records import names_and_arrays, record_of, renumber_rounds

logger = logging.getLogger("fedsel_flwr")
P = ParamSpec("P")
ROUNDS = frozenset({"configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate"})
"""Methods that go through the wrapper."""


def own_start(base: Strategy) -> Callable[..., Any] | None:
    """Return the function of a base's own ``start``; None if it has Flower's.

    Raises:
        ParameterError: ``start`` was replaced by a function that does not take the base as ``self``.
    """
    function = getattr(base.start, "__func__", None)
    if function is None:
        raise ParameterError(
            f"start of {type(base).__name__} is a {type(base.start).__name__}, not a method. Define it in the class"
        )
    return None if function is Strategy.start else function


def with_own_start(loop: Callable[Concatenate[MessageRun, P], Result]) -> Callable[Concatenate[MessageRun, P], Result]:
    """Decorate a wrapper's ``start``, which is Flower's loop: a base's own ``start`` runs first, around this loop."""

    @functools.wraps(loop)
    def start(self: MessageRun, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        function = own_start(self.base)
        if function is None:
            return loop(self, *args, **kwargs)
        # Flower's ``start`` does not have it up to 1.42, and a loop that takes any keywords may not read it.
        named = "should_stop" in inspect.signature(function).parameters
        should_stop = None if named else kwargs.pop("should_stop", None)
        driver, before = _driver(self.base, self, loop), self.core.round

        def call(swapped: Mapping[int, Any]) -> Any:
            own = {key: swapped.get(id(value), value) for key, value in kwargs.items()}
            return function(driver, *[swapped.get(id(value), value) for value in args], **own)

        result = self._run_own_start(call, _flowers_arguments(function, args, kwargs), should_stop)
        if self.core.round == before and not self.core.ended:
            logger.warning("start of %s never called configure_train, so no client trained", type(self.base).__name__)
        return result

    return start


def _flowers_arguments(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the given arguments of Flower's ``start``, by the order of Flower's and the names of the base's own."""
    found: dict[str, Any] = {}
    for signature in (inspect.signature(Strategy.start), inspect.signature(function)):
        try:
            bound = signature.bind(None, *args, **kwargs)
        # The call itself raises the same error, with the base's own text.
        except TypeError:
            continue
        for name, value in bound.arguments.items():
            found |= value if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    values = [*args, *kwargs.values()]
    for name, kind in (("grid", Grid), ("initial_arrays", ArrayRecord)):
        if not isinstance(found.get(name), kind):
            found[name] = next((value for value in values if isinstance(value, kind)), None)
    return found


def _driver(base: Strategy, strategy: MessageRun, loop: Callable[..., Result]) -> Any:
    """Return an object like ``base`` whose rounds are the strategy's, and whose ``super().start`` is the loop."""
    kind: Any = type(base)

    class OfTheBase(type(kind)):  # type: ignore[misc]
        """A class whose attributes are set on the base's class, as by ``type(self).runs += 1``."""

        def __setattr__(cls, name: str, value: object) -> None:
            # Python itself sets these while it makes the class.
            type.__setattr__(cls if name.startswith(("__", "_abc_")) else kind, name, value)

    class Through:
        """Rounds of the strategy; all other attributes are the base's, those in ``__slots__`` too."""

        def __getattribute__(self, name: str) -> Any:
            return (
                _checked(kind.__name__, getattr(strategy, name)) if name in ROUNDS else super().__getattribute__(name)
            )

        def __getattr__(self, name: str) -> Any:
            return getattr(base, name)

        def __setattr__(self, name: str, value: object) -> None:
            setattr(base, name, value)

        def __delattr__(self, name: str) -> None:
            delattr(base, name)

    class FlowersStart(Strategy):
        """Flower's ``start``, after the base's own in the order of methods; without deriving it would come last."""

        def start(self, *args: Any, **kwargs: Any) -> Result:
            return loop(strategy, *args, **kwargs)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    driver: Any = object.__new__(OfTheBase(kind.__name__, (Through, kind, FlowersStart), names))
    object.__setattr__(driver, "__dict__", vars(base))
    return driver


def _checked(base: str, method: Callable[P, Any]) -> Callable[P, Any]:
    """Return a method that names the base if it gets other arguments than Flower's."""

    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        try:
            inspect.signature(method).bind(*args, **kwargs)
        except TypeError as error:
            name = getattr(method, "__name__", "")
            raise RunError(
                f"start of {base} calls self.{name} with other arguments than Flower's: {error}. It cannot be wrapped"
            ) from None
        return method(*args, **kwargs)

    return call


class MessageRun(Adapter, Strategy):
    """The run of a strategy of the Message API, from its ``start`` to the end of its last round."""

    strategy_type: ClassVar[type] = Strategy
    _named = staticmethod(names_and_arrays)
    _timed: TimedGrid | None = None
    _arrivals: Arrivals | None = None
    _evaluates = False
    # The run's own, for probes.
    _evaluate_config: ConfigRecord | None = None
    # While the base's own ``start`` runs: the grid that it got, which it may pass on in a grid of its own.
    _grid: Grid | None = None
    # While the base's own ``start`` runs: how often it has called Flower's loop; else None.
    _loops: int | None = None
    # The last absolute round that the base does not count, because its own ``start`` has begun another loop.
    _shown_from = 0
    _checkpoint: Checkpoint | None = None
    # The server's number of the round that is not closed yet.
    _open: int | None = None
    _recording_now = False
    # Loss and accuracy of the open round, from an evaluation that a base's function has called.
    _evaluated: tuple[object, ...] = ()
    _signals: list[Callable[[int, Result], bool]]
    # The result that ``should_stop`` gets. Flower's own result does not leave its ``start`` before the run ends.
    _result_so_far: Result | None = None

    @with_own_start
    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        should_stop: Callable[[int, Result], bool] | None = None,
    ) -> Result:
        """Run the rounds, and time the nodes on the server's clock; see ``flwr.serverapp.strategy.Strategy.start``.

        ``should_stop`` works with every version of flwr, although ``start`` does not have it up to 1.42. The strategy's
        own option applies too, with absolute rounds.

        A base's own ``start`` is called with the same arguments, and may call this one by ``super().start``. If it
        has its own loop, the run cannot be resumed.

        A resumed run starts from the checkpoint's arrays instead of ``initial_arrays``. It runs ``num_rounds`` minus
        the finished rounds. The rounds in its result are absolute, and the result has no metrics of earlier rounds.

        Raises:
            RunError: There are checkpoints, but none can be used. Or a checkpoint cannot be written. Or the run
                should be resumed, but the base has its own loop.
        """
        check_should_stop(should_stop)
        if self._loops is None:
            self._begin(initial_arrays, should_stop)
        elif should_stop is not None:
            self._signals.append(should_stop)
        if self._loops:
            # One more loop of a base's own ``start``, in which Flower counts from 1 again.
            self._close_open_round()
            self._checkpoint, self._shown_from = None, self.core.round
            self.core.begin_run(self.core.round, self._signal)
        self._loops = None if self._loops is None else self._loops + 1
        self._timeout, self._evaluates, checkpoint = timeout, evaluate_fn is not None, self._checkpoint
        self._evaluate_config = evaluate_config
        done = 0 if checkpoint is None else checkpoint.round
        num_rounds = self._resuming.rounds_left(num_rounds, done)
        if checkpoint is not None:
            initial_arrays = record_of(checkpoint)
        recording = None if evaluate_fn is None else self._recording(evaluate_fn)
        start = partial(
            super().start, self._timed_grid(grid), initial_arrays, num_rounds, timeout, train_config, evaluate_config
        )
        # From flwr 1.43 on. Older versions count the remaining rounds, which choose no clients.
        if "should_stop" in inspect.signature(Strategy.start).parameters:
            start = partial(start, should_stop=lambda number, result: self.core.ended)
        # A base's own start goes on. It may evaluate the last model, or catch an error.
        result = start(recording) if self._loops else self._guarded(lambda: start(recording))
        if checkpoint is not None:
            renumber_rounds(result, done)
            result.arrays = result.arrays or initial_arrays
        return result

    def _save(self, number: int, model: Any) -> None:
        """Write the checkpoint of a round; its replies are then needed no more."""
        super()._save(number, model)
        if self._arrivals is not None:
            self._arrivals.clear()

    def _kept_arrivals(self) -> Arrivals | None:
        """Return what keeps the replies of the round in progress; None if nothing does."""
        folder = self.core.settings.checkpoint_dir
        if self._arrivals is None and self.core.settings.keep_arrivals and folder is not None:
            self._arrivals = Arrivals(Path(folder), self.fingerprint)
        return self._arrivals

    def _begin(self, initial_arrays: ArrayRecord | None, should_stop: Callable[[int, Result], bool] | None) -> None:
        """Begin a run, and load the checkpoint from which it is resumed."""
        self._result_so_far, self._shown_from = Result(), 0
        self._signals = [] if should_stop is None else [should_stop]
        initial = None if initial_arrays is None else {name: one.numpy() for name, one in initial_arrays.items()}
        self._checkpoint = self._begin_run(initial, self._signal)
        arrays = initial_arrays if self._checkpoint is None else record_of(self._checkpoint)
        self._result_so_far.arrays = ArrayRecord() if arrays is None else arrays
        # A resumed run closes the checkpoint's round once more.
        self._open, self._model = 0, arrays

    def _signal(self, number: int, history: History) -> bool:
        """Return whether a signal that ``start`` got ends the run."""
        # A list, because every signal is called: each may count rounds.
        return any([stop(number, self._result_so_far or Result()) for stop in self._signals])

    def _run_own_start(self, start: Callable[..., Result], given: Mapping[str, Any], should_stop: Any) -> Result:
        """Run a base's own ``start``.

        Args:
            start: Calls it with replacements of some arguments, by the ids of these.
            given: Its arguments that Flower knows.
            should_stop: The stop signal, if its own ``start`` does not take one.
        """
        check_should_stop(should_stop)
        grid, initial_arrays, evaluate_fn = given["grid"], given["initial_arrays"], given.get("evaluate_fn")
        self._begin(initial_arrays, should_stop)
        self._loops, self._evaluates, self._timeout = 0, evaluate_fn is not None, given.get("timeout")
        self._evaluate_config = given.get("evaluate_config")
        self._grid = self._timed_grid(grid)
        swapped = {id(initial_arrays): self._model, id(grid): self._grid}
        if evaluate_fn is not None:
            swapped[id(evaluate_fn)] = self._recording(evaluate_fn)
        try:
            return self._guarded(lambda: start(swapped))
        finally:
            self._loops = self._grid = None

    def _guarded(self, play: Callable[[], Result]) -> Result:
        """Play all rounds of a run, and end it."""
        with self.saving_on_error():
            result = play()
            self._close_open_round()
        self.end_metrics()
        return result

    def _timed_grid(self, grid: Any) -> Any:
        """Return a grid that times nodes, on the server's clock."""
        if self.core.settings.clock != "server" or grid is None or self._loops:
            return grid
        if not isinstance(grid, TimedGrid):
            grid = TimedGrid(grid)
            grid.late = self._late
        self._timed = grid
        return grid

    def _close_open_round(self) -> None:
        """Close the round that no central evaluation has closed, if there is one."""
        if (server_round := self._open) is not None:
            self._open = None
            self._evaluate_and_finish(server_round, self._model, lambda number: self._evaluated or None, tuple)

    def _check_own_loop(self) -> None:
        """Refuse what a base's own loop of rounds cannot do."""
        base = type(self.base).__name__
        if self.core.settings.resume:
            raise RunError(
                f"start of {base} has its own loop, so it cannot be resumed. Leave resume out, or call super().start"
            )
        if self._dispatched:
            raise RunError(
                f"start of {base} did not call self.aggregate_train after self.configure_train. Call it in each round"
            )

    def _recording(
        self, evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None]
    ) -> Callable[[int, ArrayRecord], MetricRecord | None]:
        """Return a central evaluation that also writes the checkpoint and records its results in the history."""

        def recording(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            # A base may wrap the function that it gets, and Flower's loop records the outer one. Or it evaluates twice.
            if self._recording_now or server_round != self._open:
                inner = evaluate_fn(server_round, arrays)
                self._evaluated = _loss_and_accuracy(inner)
                return inner

            def evaluate(number: int) -> MetricRecord | None:
                metrics = evaluate_fn(number - self._shown_from, arrays)
                self._record_metrics("evaluate_metrics_serverapp", number, metrics)
                return metrics

            self._recording_now = True
            try:
                found: MetricRecord | None
                found = self._evaluate_and_finish(server_round, arrays, evaluate, _loss_and_accuracy)
                self._open = None
            finally:
                self._recording_now = False
            return found

        return recording

    def _record_metrics(self, kind: str, number: int, metrics: MetricRecord | None) -> None:
        """Add the metrics of a round to the result that ``should_stop`` gets."""
        if self._result_so_far is not None and metrics is not None:
            getattr(self._result_so_far, kind)[number] = metrics


def _loss_and_accuracy(metrics: MetricRecord | None) -> tuple[object, ...]:
    return () if metrics is None else (metrics.get("loss"), metrics.get("accuracy"))
