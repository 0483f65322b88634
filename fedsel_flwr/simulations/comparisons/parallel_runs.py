"""Parallel runs of a comparison in worker processes, and reports of their progress."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fedsel_flwr.errors import FedSelError, ParameterError, RunError, described
from fedsel_flwr.references import OWN_FILES
from fedsel_flwr.report.progress import log_file, logging_to
from fedsel_flwr.rounds.history import History, RoundRecord
from fedsel_flwr.selectors import Selector
from fedsel_flwr.simulations.comparisons.contenders import Contender
from fedsel_flwr.simulations.engine import simulate
from fedsel_flwr.simulations.results import RunResult
from fedsel_flwr.simulations.run_identity import code_identity
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


@dataclass(frozen=True)
class Job:
    """Run of a comparison that is to be done.

    Attributes:
        scenario: Scenario that is run.
        contender: Selector of the run.
        place: Arguments ``folder`` and ``label`` of :func:`~fedsel_flwr.simulations.engine.simulate`.
    """

    scenario: Scenario
    contender: Contender
    place: Mapping[str, Any] = field(default_factory=dict)

    def selector(self) -> Selector | None:
        """Return a new selector for the run; None if its scenario names the selector."""
        return self.contender.selector(self.scenario)

    def code(self, own: OwnParts) -> dict[str, str]:
        """Return the fingerprints of the run's code, including the caller's parts."""
        return code_identity(self.scenario, self.selector(), own)


def run_in_parallel(jobs: Sequence[Job], options: Mapping[str, Any], at_a_time: int) -> Generator[RunResult]:
    """Run jobs in worker processes, which share the cores equally and end with the generator.

    Args:
        jobs: The runs, which begin in this order.
        options: Arguments of :func:`~fedsel_flwr.simulations.engine.simulate` that are equal for all runs.
        at_a_time: Number of parallel runs.

    Yields:
        The results, in the order of the runs.

    Raises:
        ParameterError: A run cannot be sent to another process.
        RunError: A process was killed, or the user's code raised an error. The message names the error and its line.
        FedSelError: A run raised another error. The other runs are then stopped.
    """
    from loky import cpu_count

    # Packed once for all runs, because the caller's data may be large.
    shared = _packed(options, "what the runs share")
    own = [_packed(job, repr(job.contender.label)) for job in jobs]
    at_a_time = min(at_a_time, len(jobs))
    threads = str(max(1, cpu_count() // at_a_time))
    with _worker_processes(at_a_time, threads) as workers:
        runs = [workers.submit(_play, job, shared, log_file(), os.getpid()) for job in own]
        for run in runs:
            yield run.result()


def map_in_parallel(call: Callable[[Given], Got], given: Sequence[Given], at_a_time: int) -> Generator[Got]:
    """Call a function in worker processes of one thread each, which end with the generator.

    Args:
        call: A function of a module.
        given: Its argument in each call. The calls begin in this order.
        at_a_time: Number of processes.

    Yields:
        The results, in the order in which the calls end.

    Raises:
        RunError: A process was killed.
    """
    from loky import as_completed

    with _worker_processes(min(at_a_time, len(given)), "1") as workers:
        for future in as_completed([workers.submit(call, one) for one in given]):
            yield future.result()


@contextlib.contextmanager
def _worker_processes(number: int, threads: str) -> Generator[Any]:
    """Yield an executor of worker processes with this number of threads each."""
    # loky, not concurrent.futures, because it sets the environment of its workers, and can kill them.
    from loky import ProcessPoolExecutor
    from loky.process_executor import BrokenProcessPool

    # Set in the environment, because libraries read it when they load, before any of our code runs in the worker.
    workers = ProcessPoolExecutor(number, env=dict.fromkeys(THREADS, threads), initializer=_ignore_interrupts)
    try:
        yield workers
    except BrokenProcessPool as error:
        raise RunError(
            f"a worker process was killed, perhaps because memory ran out: {error}. Use fewer jobs, and resume"
        ) from error
    finally:
        # Workers are killed, because after an error or Ctrl-C the rounds of the other runs are of no use.
        workers.shutdown(wait=True, kill_workers=True)


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
        raise ParameterError(
            f"{name} cannot be sent to another process ({type(error).__name__}: {error}). Leave jobs out, or use a "
            "selector, model, data and objective that pickle supports"
        ) from error
    finally:
        for module in files:
            cloudpickle.unregister_pickle_by_value(module)


def _ignore_interrupts() -> None:
    """Ignore Ctrl-C in a worker process. The terminal sends it to all processes, and the parent ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _play(own: bytes, shared: bytes, log: Path | None, parent: int) -> RunResult:
    """Do a run in a worker process, which ends if its parent is gone."""

    def on_round(record: RoundRecord) -> None:
        # A killed parent cannot end its workers, so the worker ends here. The run can be resumed from its checkpoints.
        if os.getppid() != parent:
            os._exit(1)

    job: Job = pickle.loads(own)
    options: dict[str, Any] = {**pickle.loads(shared), **job.place}
    with logging_to(log) if log else contextlib.nullcontext():
        try:
            return simulate(job.scenario, selector=job.selector(), on_round=on_round, **options)
        except FedSelError:
            raise
        except Exception as error:
            # The user's code may raise any error. Its traceback is logged here, because the parent does not get it.
            if log:
                logging.getLogger("fedsel_flwr").exception("the run failed")
            run = f"the run of {job.contender.label!r} on seed {job.scenario.seed} failed"
            raise RunError(f"{run}: {described(error)}") from error


def report_progress(
    label: str, rounds: int, start_run: StartRun | None, update: Update | None
) -> Callable[[RoundRecord], None]:
    """Report the start of a run, and return a callback that reports each round and the failures so far."""
    failed = 0

    def on_round(record: RoundRecord) -> None:
        nonlocal failed
        failed += record.num_failed
        if update:
            update(record, failed)

    if start_run:
        start_run(label, rounds)
    return on_round


def report_last_round(history: History, update: Update) -> None:
    """Report the last round of a finished run."""
    if history.rounds:
        update(history.rounds[-1], sum(record.num_failed for record in history.rounds))
