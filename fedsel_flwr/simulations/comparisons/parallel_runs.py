"""Runs of a comparison side by side, each in a process of its own.

Telling, while a comparison runs, how far it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsel_flwr.checks import whole
from fedsel_flwr.clients.batched.worker_connection import packed, unpacked
from fedsel_flwr.errors import FedSelError, ParameterError, RunError, described
from fedsel_flwr.rounds.history import History, RoundRecord
from fedsel_flwr.simulations.comparisons.contenders import Contender
from fedsel_flwr.simulations.logs import log_file, logging_to
from fedsel_flwr.simulations.results import RunResult
from fedsel_flwr.simulations.scenario import Scenario

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
"""What tells the libraries of a process how many threads are theirs."""


@dataclass(frozen=True)
class Job:
    """A run of a comparison.

    Attributes:
        scenario: What is run.
        contender: Who chooses.
        place: Where it is written and what it is called: ``folder`` and ``label`` of
            :func:`~fedsel_flwr.simulations.engine.simulate`.
    """

    scenario: Scenario
    contender: Contender
    place: Mapping[str, Any] = field(default_factory=dict)


def check_jobs(scenario: Scenario, jobs: int, device: str) -> int:
    """How many runs are played at a time.

    Raises:
        ParameterError: It is below 1, or above 1 where runs share Ray or a device.
    """
    number = whole("jobs", jobs, 1)
    if number > 1 and (scenario.engine != "vectorized" or device != "cpu"):
        shared = f"the device {device!r}" if scenario.engine == "vectorized" else "Ray, which uses every core already"
        raise ParameterError(
            f"jobs = {number} runs at a time would share {shared}: leave jobs out, or use the engine 'vectorized' on "
            "the CPU"
        )
    return number


def run_in_parallel(jobs: Sequence[Job], options: Mapping[str, Any], at_a_time: int) -> Generator[RunResult]:
    """Play runs in other processes, which share the cores equally and end when the generator does.

    Args:
        jobs: The runs; they begin in this order.
        options: Arguments of :func:`~fedsel_flwr.simulations.engine.simulate` that all of them share.
        at_a_time: How many are played at a time.

    Yields:
        The results in the order of the runs.

    Raises:
        ParameterError: A run cannot be sent to another process.
        RunError: A process was killed, or the user's own code raised something in a run; says what, and in which line.
        FedSelError: Whatever else a run raises; the others are then broken off.
    """
    from loky import ProcessPoolExecutor, cpu_count
    from loky.process_executor import BrokenProcessPool

    shared = _sent(options, "what the runs share")  # once: there may be much data
    own = [_sent(job, repr(job.contender.label)) for job in jobs]
    at_a_time = min(at_a_time, len(jobs))
    threads = str(max(1, cpu_count() // at_a_time))
    workers = ProcessPoolExecutor(at_a_time, env=dict.fromkeys(THREADS, threads), initializer=_begin)
    try:
        runs = [workers.submit(_play, job, shared, log_file(), os.getpid()) for job in own]
        for run in runs:
            yield run.result()
    except BrokenProcessPool as error:
        raise RunError(f"a process that played a run was ended from outside, for want of memory perhaps: {error}"
                       ) from error  # fmt: skip
    finally:
        workers.shutdown(wait=True, kill_workers=True)


def _sent(what: Any, name: str) -> bytes:
    try:
        return packed(what)
    except Exception as error:  # pickle raises many kinds
        raise ParameterError(
            f"{name} cannot be sent to another process ({type(error).__name__}: {error}): leave jobs out, or give "
            "selector, model, data and objective as something that pickle takes"
        ) from error


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that began


def _play(own: bytes, shared: bytes, log: Path | None, parent: int) -> RunResult:
    """A run, in another process; without the one that began it there is nobody to play for."""
    from fedsel_flwr.simulations.engine import simulate

    def on_round(record: RoundRecord) -> None:
        if os.getppid() != parent:
            os._exit(1)  # its checkpoints are there

    job: Job = unpacked(own)
    options: dict[str, Any] = {**unpacked(shared), **job.place}
    with logging_to(log) if log else contextlib.nullcontext():
        try:
            return simulate(job.scenario, selector=job.contender.selector(job.scenario), on_round=on_round, **options)
        except FedSelError:
            raise
        except Exception as error:  # whatever the user's own code raises; its place is known in this process alone
            if log:
                logging.getLogger("fedsel_flwr").exception("the run broke off")
            run = f"the run of {job.contender.label!r} on seed {job.scenario.seed} broke off"
            raise RunError(f"{run}: {described(error)}") from error


StartRun = Callable[[str, int], None]
"""Told the label and the rounds of a run that starts."""
Update = Callable[[RoundRecord, int], None]
"""Told a finished round, and how many clients have failed so far."""


def report_progress(
    label: str, rounds: int, start_run: StartRun | None, update: Update | None
) -> Callable[[RoundRecord], None]:
    """Tell that a run starts; return what tells each of its rounds, together with the failed clients so far."""
    failed = 0

    def on_round(record: RoundRecord) -> None:
        nonlocal failed
        failed += record.num_selected - record.num_completed
        if update:
            update(record, failed)

    if start_run:
        start_run(label, rounds)
    return on_round


def report_last_round(history: History, update: Update) -> None:
    """Tell the last round of a run that was over before."""
    if history.rounds:
        update(history.rounds[-1], sum(record.num_selected - record.num_completed for record in history.rounds))
