"""Exporter: serves a run's metrics over HTTP, in the format of Prometheus.

Prometheus is a monitoring server. It fetches (*scrapes*) the metrics of programs at regular intervals. The exporter
reads the history after each round, in the thread of the run. Other threads answer the scrapes.
``docs/operating.md`` has the table of the metrics.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
import weakref
from functools import partial
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from fedsel_flwr import operating_system
from fedsel_flwr.callbacks.trackers import import_library
from fedsel_flwr.checks import parse_address
from fedsel_flwr.errors import RunError, described
from fedsel_flwr.rounds.checkpoints import Checkpoints
from fedsel_flwr.rounds.history import History, failure_reason
from fedsel_flwr.rounds.records import ClientRecord, RoundRecord

logger = logging.getLogger("fedsel_flwr")
BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""Upper bounds of the histograms' buckets, seconds."""
MOST_CONNECTIONS, CONNECTION_S = 32, 5.0
"""Largest number of connections at the same time, and the seconds after which a connection is closed."""
TIMEOUT = "timeout"
REASONS: dict[str, tuple[str, ...]] = {
    TIMEOUT: ("no answer",),
    "late": ("late",),
    "exception": ("exception", "status"),
    "unavailable": ("message unavailable", "reply unavailable", "node unavailable", "not reached"),
    "model": ("arrays", "trees", "update norm"),
    "metrics": ("metrics", "num_examples"),
    "dropout": ("lost", "crashed"),
}
"""Value of the label ``reason`` -> the kinds of problems that it counts. All other kinds count as :data:`OTHER`."""
OTHER = "other"
_REASON_OF = {kind: reason for reason, kinds in REASONS.items() for kind in kinds}


class Exporter:
    """Counts a run's rounds in metrics, and serves these over HTTP while the run lasts.

    No metric has a client's id or text. The registry belongs to this exporter alone, so that several strategies of one
    process have separate metrics. An error while the metrics are updated is logged once, and the run continues.

    Counters begin at 0 in each process, also in a resumed run: Prometheus expects that a restart resets counters.

    Args:
        address: A port, or HOST:PORT; port 0 takes a free port.
        checkpoints: The run's checkpoints, for the age of the newest one; None if there are none.

    Raises:
        ParameterError: The address has another form.
        RunError: prometheus-client is not installed.
    """

    def __init__(self, address: str | int, checkpoints: Checkpoints | None = None) -> None:
        self._host, self._port = parse_address("metrics_address", address)
        self._checkpoints = checkpoints
        # Imported here too, so that a missing package is found before the run begins.
        _prometheus_client()
        self._metrics: _Metrics | None = None
        # The server and its thread, while it runs, and what stops it when this exporter is garbage.
        self._serving: tuple[Any, threading.Thread] | None = None
        self._finalizer: Any = None
        self._url: str | None = None
        # The last round that is counted.
        self._counted = 0
        self._warned = False

    @property
    def url(self) -> str | None:
        """The address of the metrics; None if the server does not run."""
        return self._url

    def begin(self, history: History) -> None:
        """Start the server and follow a history, unless the server already runs.

        Args:
            history: The history, with the rounds of the checkpoint in a resumed run.

        Raises:
            RunError: The server cannot be bound to the address.
        """
        if self._url is not None:
            return
        if self._metrics is None:
            self._metrics = _Metrics()
        if self._checkpoints is not None:
            self._metrics.checkpoint_age(self._checkpoints)
        self._serve(self._metrics)
        self._metrics.last_round_time.set_to_current_time()
        self.follow(history)

    def follow(self, history: History) -> None:
        """Show the last round of a history, and count only its later rounds."""
        last = history.last
        self._counted = 0 if last is None else last.round
        if last is not None and self._metrics is not None:
            self._metrics.show(last)

    def update(self, history: History) -> None:
        """Count the rounds that are not counted yet, and show the last one.

        Args:
            history: The history after a round. The last round may be passed again, after its evaluation.
        """
        if self._metrics is None or self._url is None:
            return
        # Any exception: a run of hours must not end because of its metrics.
        try:
            self._update(self._metrics, history)
        except Exception as error:
            if not self._warned:
                logger.warning("the metrics could not be updated, and the run continues: %s", described(error))
            self._warned = True

    def close(self) -> None:
        """Stop the server. The counts remain for a later :meth:`begin`."""
        if self._serving is not None:
            self._finalizer.detach()
            _stop_server(*self._serving)
        self._serving = self._url = None

    def _serve(self, metrics: _Metrics) -> None:
        shown = f"[{self._host}]" if ":" in self._host else self._host
        try:
            server = _Server(self._host, self._port, _prometheus_client().make_wsgi_app(metrics.registry))
        # UnicodeError: a part of the host name is too long.
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise RunError(
                f"metrics_address '{shown}:{self._port}' cannot be used: {reason}. Use another port (0 for a free "
                "one), and a host name or address of this machine"
            ) from error
        self._serving = server, threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        self._serving[1].start()
        # The server must not outlive a strategy that nobody uses any more. Python's exit ends it in any case.
        self._finalizer = weakref.finalize(self, _stop_soon, *self._serving)
        self._finalizer.atexit = False
        self._url = f"http://{shown}:{server.server_port}/metrics"
        logger.info("metrics for Prometheus at %s", self._url)

    def _update(self, metrics: _Metrics, history: History) -> None:
        last = history.last
        if last is None:
            return
        # Rounds are numbered without a gap. Both lists are read from the end, because old rounds are in a file.
        missing = history.rounds[-(last.round - self._counted) :] if last.round > self._counted else []
        # Set first: after an error, no round may be counted twice.
        self._counted = last.round
        selected = sum(record.num_selected for record in missing)
        for record in missing:
            metrics.count(record)
        for row in history.clients[-selected:] if selected else []:
            metrics.count_client(row)
        metrics.show(last)
        if missing:
            metrics.last_round_time.set_to_current_time()


class _Handler(WSGIRequestHandler):
    """Answers a scrape, and logs nothing."""

    def log_message(self, *args: Any) -> None:
        """Log nothing."""


class _Server(ThreadingMixIn, WSGIServer):
    """Server with few connections, each for a few seconds, so that the run never lacks descriptors.

    A new connection takes the place of the oldest one, so that half-open connections do not prevent scrapes.
    """

    daemon_threads = True
    allow_reuse_address = operating_system.ports_can_be_reused()
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, host: str, port: int, app: Any) -> None:
        (self.address_family, _, _, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # Connection -> when it was accepted, in monotonic seconds; the oldest first.
        self._open: dict[Any, float] = {}
        self._changed = threading.Condition()
        super().__init__((str(address[0]), port), _Handler)
        self.set_app(app)

    def get_request(self) -> Any:
        """Accept a connection; pause if there is no descriptor for it."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(0.1)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether there is a place for a connection, and enough descriptors for everything else."""
        # A new descriptor is the lowest one that is free.
        if operating_system.free_descriptors_end(7 / 8) <= request.fileno():
            return False
        with self._changed:
            if len(self._open) >= MOST_CONNECTIONS:
                self._end(until=min(self._open.values()))
            if self._changed.wait_for(lambda: len(self._open) < MOST_CONNECTIONS, timeout=1.0):
                self._open[request] = time.monotonic()
            return request in self._open

    def shutdown_request(self, request: Any) -> None:
        """Close a connection and free its place."""
        with self._changed:
            super().shutdown_request(request)
            self._open.pop(request, None)
            self._changed.notify()

    def service_actions(self) -> None:
        """End connections that take too long; called 20 times a second and after each connection."""
        self._end(until=time.monotonic() - CONNECTION_S)

    def server_close(self) -> None:
        """Free the port, and end all connections."""
        super().server_close()
        self._end(until=math.inf)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the errors of a connection, because the run does not depend on it."""

    def _end(self, until: float) -> None:
        with self._changed:
            for request in [one for one, began in self._open.items() if began <= until]:
                # The connection's thread then closes it.
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)


class _Metrics:
    """The metrics of one exporter, in a separate registry."""

    def __init__(self) -> None:
        library = _prometheus_client()
        self.registry = library.CollectorRegistry()
        self._gauge = gauge = partial(library.Gauge, registry=self.registry)
        counter = partial(library.Counter, registry=self.registry)
        histogram = partial(library.Histogram, registry=self.registry, buckets=BUCKETS)
        self.round = gauge("fedsel_round", "Number of the last finished round.")
        self.last_round_time = gauge(
            "fedsel_last_round_timestamp_seconds", "Unix time at the end of the last round, or at the start of the run."
        )
        self.available = gauge("fedsel_last_round_available_clients", "Available clients of the last round.")
        self.selected = gauge("fedsel_last_round_selected_clients", "Selected clients of the last round.")
        self.completed = gauge("fedsel_last_round_completed_clients", "Clients of the last round with a usable update.")
        self.accuracy = gauge("fedsel_accuracy_ratio", "Accuracy of the last central evaluation, 0 to 1.")
        self.loss = gauge("fedsel_loss", "Loss of the last central evaluation.")
        self.evaluated_round = gauge("fedsel_evaluated_round", "Round of the last central evaluation.")
        self.rounds = counter("fedsel_rounds", "Finished rounds.")
        self.all_selected = counter("fedsel_selected_clients", "Selected clients, summed over rounds.")
        self.all_completed = counter("fedsel_completed_clients", "Clients with a usable update, summed over rounds.")
        self.spares = counter("fedsel_spare_clients", "Clients whose reply was not needed, summed over rounds.")
        self.failed = counter("fedsel_failed_clients", "Failed clients by reason, summed over rounds.", ["reason"])
        self.energy = counter("fedsel_energy_joules", "Energy that clients reported, and energy of probes.")
        self.duration = histogram("fedsel_round_duration_seconds", "Duration of a round on the strategy's clock.")
        self.latency = histogram("fedsel_client_latency_seconds", "Latency of clients with a usable update.")
        # Without an evaluation, 0 would be a wrong accuracy.
        for unknown in (self.accuracy, self.loss, self.evaluated_round):
            unknown.set(math.nan)
        # A counter that appears with its first failure would hide that failure from Prometheus' increase().
        for reason in (*REASONS, OTHER):
            self.failed.labels(reason)
        self._age: Any = None

    def checkpoint_age(self, checkpoints: Checkpoints) -> None:
        """Add the age of the newest checkpoint, computed at each scrape."""
        if self._age is None:
            self._age = self._gauge(
                "fedsel_checkpoint_age_seconds",
                "Age of the newest checkpoint, or of the run before its first checkpoint.",
            )
        began = time.monotonic()
        self._age.set_function(
            lambda: time.monotonic() - (began if (written := checkpoints.written_at) is None else written)
        )

    def count(self, record: RoundRecord) -> None:
        """Add a round to the counters."""
        self.rounds.inc()
        self.duration.observe(record.round_s)
        self.all_selected.inc(record.num_selected)
        self.all_completed.inc(record.num_completed)
        self.spares.inc(record.num_spares)
        if math.isfinite(record.energy_j):
            self.energy.inc(record.energy_j)

    def count_client(self, row: ClientRecord) -> None:
        """Add a client of a round to the counters."""
        # A failed client and a spare have the latency max_latency, which nobody measured.
        if row.completed:
            self.latency.observe(row.latency_s)
        elif not row.spare:
            self.failed.labels(reason_label(row)).inc()

    def show(self, record: RoundRecord) -> None:
        """Show the last round and its evaluation, if it has one."""
        self.round.set(record.round)
        self.available.set(record.num_available)
        self.selected.set(record.num_selected)
        self.completed.set(record.num_completed)
        for metric, value in ((self.accuracy, record.accuracy), (self.loss, record.loss)):
            if not math.isnan(value):
                metric.set(value)
                self.evaluated_round.set(record.round)


def reason_label(row: ClientRecord) -> str:
    """Return the label of a failed client: one of :data:`REASONS` or :data:`OTHER`, never a client's own text.

    >>> nothing = dict.fromkeys(["latency_s", "energy_j", "download_s", "compute_s", "upload_s", "train_loss"], 0.0)
    >>> reason_label(ClientRecord(round=1, client_id="a", client=0, completed=False, num_examples=0, **nothing,
    ...                           problem="arrays: expected 2, got 1"))
    'model'
    """
    if row.timed_out:
        return TIMEOUT
    kind = failure_reason(row)
    # "no answer within 30 s" has no colon.
    return TIMEOUT if kind.startswith("no answer") else _REASON_OF.get(kind, OTHER)


def _prometheus_client() -> Any:
    """Return the library; raise :class:`RunError` if it is not installed."""
    return import_library("prometheus_client", "prometheus-client", "metrics_address", "metrics")


def _stop_server(server: Any, thread: threading.Thread) -> None:
    """Stop a server and free its port."""
    server.shutdown()
    server.server_close()
    thread.join()


def _stop_soon(server: Any, thread: threading.Thread) -> None:
    """Stop a server in another thread: the garbage collector may run in the server's own, which cannot stop itself."""
    threading.Thread(target=_stop_server, args=(server, thread), daemon=True).start()
