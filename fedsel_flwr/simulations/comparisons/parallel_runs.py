"""Runs in other processes: the protocol of executors, worker processes on this machine, and reports of the progress."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import pickle
import signal
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fedsel_flwr.errors import FedSelError, ParameterError, RunError, described
from fedsel_flwr.operating_system import has_lost
from fedsel_flwr.references import OWN_FILES
from fedsel_flwr.report.progress import log_file, logging_to
from fedsel_flwr.rounds.history import RoundRecord
from fedsel_flwr.selectors import Selector
from fedsel_flwr.simulations.comparisons.contenders import Contender
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.results import RunResult, has_finished
from fedsel_flwr.simulations.run_identity import code_identity
from fedsel_flwr.simulations.run_options import RunOptions
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.worlds.ingredients import OwnParts

Given = TypeVar("Given")
Got = TypeVar("Got")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
"""Environment variables that set the number of threads of libraries."""
StartRun = Callable[[str, int], None]
"""Function called with the label and the number of rounds of a run that starts."""
Update = Callable[[RoundRecord, int], None]
"""Function called with a finished round and the number of failed clients so far."""
Report = Callable[[int], None]
"""Function called in another process with the number of rounds that are done."""


@dataclass(frozen=True)
class Job:
    """Run of a comparison that is to be done.

    Attributes:
        scenario: Scenario that is run.
        contender: Selector of the run.
        place: Arguments of :func:`~fedsel_flwr.simulations.engine.simulate` for this run: ``folder``, ``label``,
            ``checkpoint_dir`` and ``code``.
    """

    scenario: Scenario
    contender: Contender
    place: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the run in messages, for example "bsfl, seed 1"."""
        return f"{self.contender.label}, seed {self.scenario.seed}"

    def selector(self) -> Selector | None:
        """Return a new selector for the run; None if its scenario names the selector."""
        return self.contender.selector(self.scenario)

    def code(self, own: OwnParts) -> dict[str, str]:
        """Return the fingerprints of the run's code, including the caller's parts."""
        return code_identity(self.scenario, self.selector(), own)

    def is_over(self, options: RunOptions) -> bool:
        """Return whether the run is resumed and has finished, so that it only needs to be read from its folder."""
        place = self.place.get("folder")
        return bool(options.resume) and not options.replay and place is not None and has_finished(place)

    def simulate(self, options: RunOptions, on_round: Callable[[RoundRecord], None] | None = None) -> RunResult:
        """Do the run in this process, or read it if it is over.

        Args:
            options: The options that all runs share.
            on_round: Function called with each finished round.
        """
        arguments = run_arguments(options) | dict(self.place)
        result = simulate(self.scenario, selector=self.selector(), on_round=on_round, **arguments)
        # A copy is in memory. A history that reads a file keeps it open, and systems limit their number.
        return replace(result, history=copy.copy(result.history))

    def simulate_elsewhere(self, options: RunOptions, report: Report) -> RunResult:
        """Do the run in a process of an executor; the traceback of an error of the user's code goes to the log.

        Raises:
            FedSelError: The run raised this error.
            RunError: The user's code raised another error. The message names the error and its line.
        """
        try:
            return self.simulate(options, lambda record: report(record.round))
        except FedSelError:
            raise
        # The user's code may raise any error. Its traceback is logged here, because the error that comes back has none.
        except Exception as error:
            if log_file() is not None:
                logging.getLogger("fedsel_flwr").exception("the run failed")
            run = f"the run of {self.contender.label!r} on seed {self.scenario.seed} failed"
            raise RunError(f"{run}: {described(error)}") from error


def run_arguments(options: RunOptions) -> dict[str, Any]:
    """Return options as arguments of :func:`~fedsel_flwr.simulations.engine.simulate`."""
    return {one.name: getattr(options, one.name) for one in fields(RunOptions)}


class Executor(Protocol):
    """Executor of calls in other processes, on this machine (:class:`Processes`) or on a Ray cluster."""

    def map(
        self,
        call: Callable[[Given, Any, Report], Got],
        given: Sequence[Given],
        names: Sequence[str],
        shared: Any = None,
    ) -> Generator[tuple[int, Got]]:
        """Call a function of a module several times. When the generator is closed, calls that still run are ended.

        Args:
            call: The function. It gets one of ``given``, ``shared`` and a :data:`Report`.
            given: Its first argument in each call. The calls begin in this order.
            names: Name of each call in messages.
            shared: Its second argument in all calls, which is packed once.

        Yields:
            The index and the result of each call, in the order in which the calls end.

        Raises:
            ParameterError: An argument cannot be sent to another process.
            FedSelError: A call raised this error.
            RunError: A process was killed, or no machine has room for a call.
        """

    def play(self, jobs: Sequence[Job], options: RunOptions) -> Generator[tuple[int, RunResult]]:
        """Do runs, with :meth:`map`.

        Args:
            jobs: The runs, which begin in this order.
            options: The options that all runs share.

        Yields:
            The index and the result of each run, in the order in which the runs end.

        Raises:
            FedSelError: As for :meth:`map`. The other runs are then stopped.
        """


def play_in_order(
    jobs: Sequence[Job], options: RunOptions, executor: Executor | None, begin: Callable[[Job], RunReport]
) -> Generator[RunResult]:
    """Do runs, and yield their results in the order of the runs; finished runs are only read here.

    Args:
        jobs: The runs, which begin in this order.
        options: The options that all runs share.
        executor: The executor. If None, the runs follow one another in this process.
        begin: Function that reports the start of a run.
    """
    left = [] if executor is None else [number for number, job in enumerate(jobs) if not job.is_over(options)]
    ended: dict[int, RunResult] = {}
    played = executor.play([jobs[number] for number in left], options) if executor else iter(())
    # The generator is closed even if a run fails, and then ends its processes.
    with contextlib.ExitStack() as stack:
        stack.callback(getattr(played, "close", str))
        for number, job in enumerate(jobs):
            report = begin(job)
            if number not in left:
                ended[number] = job.simulate(options, report)
            while number not in ended:
                index, result = next(played)
                ended[left[index]] = result
            report.end(ended[number])
            yield ended.pop(number)


@dataclass(frozen=True)
class Processes:
    """Worker processes on this machine: an :class:`Executor`. They end with the calls.

    Args:
        number: Largest number of processes.
        threads: Number of threads of each process. If None, an equal share of the cores.
    """

    number: int
    threads: int | None = None

    def map(
        self,
        call: Callable[[Given, Any, Report], Got],
        given: Sequence[Given],
        names: Sequence[str],
        shared: Any = None,
    ) -> Generator[tuple[int, Got]]:
        """Call a function several times, see :meth:`Executor.map`."""
        # loky, not concurrent.futures, because it sets the environment of its workers, and can kill them.
        from loky import ProcessPoolExecutor, as_completed, cpu_count
        from loky.process_executor import BrokenProcessPool

        # Packed once for all calls, because the caller's data may be large.
        common = _packed((call, shared), "what the runs share")
        own = [_packed(one, repr(name)) for one, name in zip(given, names, strict=True)]
        number = max(1, min(self.number, len(given)))
        threads = str(self.threads or max(1, cpu_count() // number))
        # Set in the environment, because libraries read it when they load, before any of our code runs in the worker.
        # By default, loky replaces a worker that keeps 300 MB after a run, as a data set may be.
        environment = dict.fromkeys(THREADS, threads) | {"LOKY_MAX_MEMORY_LEAK_SIZE": "1e15"}
        # The terminal sends Ctrl-C to all processes. Workers ignore it, and the parent ends them.
        ignored = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_IGN)}
        workers = ProcessPoolExecutor(number, env=environment, **ignored)
        try:
            calls = {workers.submit(_call, one, common, os.getpid()): index for index, one in enumerate(own)}
            for ended in as_completed(calls):
                yield calls[ended], ended.result()
        except BrokenProcessPool as error:
            raise RunError(
                f"a worker process was killed, perhaps because memory ran out: {error}. Use fewer jobs, and resume"
            ) from error
        finally:
            # Workers are killed, because after an error or Ctrl-C the rounds of the other runs are of no use.
            workers.shutdown(wait=True, kill_workers=True)

    def play(self, jobs: Sequence[Job], options: RunOptions) -> Generator[tuple[int, RunResult]]:
        """Do runs, see :meth:`Executor.play`."""
        return self.map(_play, jobs, [job.contender.label for job in jobs], (options, log_file()))


def _packed(what: Any, name: str) -> bytes:
    """Pickle an object for another process, with the code that a script, a notebook or a user's file defines."""
    # Not pickle, because it cannot send such code.
    import cloudpickle

    files = [module for key, module in list(sys.modules.items()) if key.startswith(OWN_FILES)]
    for module in files:
        cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(what))
    except Exception as error:
        # Pickling raises errors of many kinds, including errors of the user's code.
        raise unsendable(name, "another process", "jobs", error) from error
    finally:
        for module in files:
            cloudpickle.unregister_pickle_by_value(module)


def unsendable(what: str, where: str, option: str, error: Exception) -> ParameterError:
    """Return the error that says what cannot be sent, where to, and which option sends it there."""
    # Ray's message has several lines. Its cause is the error of pickling.
    cause = error.__cause__ or error
    return ParameterError(
        f"{what} cannot be sent to {where} ({type(cause).__name__}: {' '.join(str(cause).split()):.300}). Leave "
        f"{option} out, or use a selector, model, data and objective that pickle supports"
    )


def _call(own: bytes, common: bytes, parent: int) -> Any:
    """Make a call in a worker process, which ends if its parent is gone."""

    def report(rounds: int) -> None:
        # A killed parent cannot end its workers, so the worker ends here. The run can be resumed from its checkpoints.
        if has_lost(parent):
            os._exit(1)

    call, shared = pickle.loads(common)
    return call(pickle.loads(own), shared, report)


def _play(job: Job, shared: tuple[RunOptions, Path | None], report: Report) -> RunResult:
    """Do a run in a worker process, with the log of the parent."""
    options, log = shared
    with logging_to(log) if log else contextlib.nullcontext():
        return job.simulate_elsewhere(options, report)


class RunReport:
    """Report of a run: its start, each round with the failures so far, and the last round if no round was reported."""

    def __init__(self, label: str, rounds: int, start_run: StartRun | None, update: Update | None) -> None:
        self._update, self._failed, self._reported = update, 0, False
        if start_run:
            start_run(label, rounds)

    def __call__(self, record: RoundRecord) -> None:
        """Report a round."""
        self._failed, self._reported = self._failed + record.num_failed, True
        if self._update:
            self._update(record, self._failed)

    def end(self, result: RunResult) -> None:
        """Report the last round, unless rounds were reported."""
        rounds = result.history.rounds
        if self._update and rounds and not self._reported:
            self._update(rounds[-1], sum(record.num_failed for record in rounds))
