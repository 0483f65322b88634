"""MLflow: a run with metrics by round."""

from __future__ import annotations

import time
from collections.abc import Mapping

from fedsel_flwr.callbacks.recorder import Recorder, import_library


class MLflow(Recorder):
    """Logs each round's figures as metrics of one MLflow run, the round as their step.

    It has a client of its own: MLflow's active run and global settings are left alone, and rounds may come from any
    thread.

    Args:
        experiment: Name of the experiment; made if there is none.
        run_name: Name of the run; None: MLflow makes one up.
        tracking_uri: Where runs are kept, such as ``http://host:5000`` or ``sqlite:///runs.db``; None: as MLflow is
            configured.
        params: What the run's parameters are, such as selector and seed.
        run_id: A run to go on with, as after a resumption; None: a new one.

    Attributes:
        run_id: The run.

    Raises:
        RunError: mlflow is not installed.

    Example::

        with MLflow("selection", tracking_uri="sqlite:///runs.db", params={"selector": "bsfl"}) as run:
            simulate(load_scenario("smoke"), on_round=run)
    """

    def __init__(
        self,
        experiment: str = "fedsel",
        *,
        run_name: str | None = None,
        tracking_uri: str | None = None,
        params: Mapping[str, object] | None = None,
        run_id: str | None = None,
    ) -> None:
        module = import_library("mlflow", "mlflow")
        self._metric = import_library("mlflow.entities", "mlflow").Metric
        self._client = module.MlflowClient(tracking_uri=tracking_uri)
        if run_id is None:
            found = self._client.get_experiment_by_name(experiment)
            place = found.experiment_id if found else self._client.create_experiment(experiment)
            run_id = self._client.create_run(place, run_name=run_name).info.run_id
        else:
            self._client.update_run(run_id, status="RUNNING")
        self.run_id = str(run_id)
        for name, value in (params or {}).items():
            self._client.log_param(self.run_id, name, value)

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Log a metric for each figure, in one request."""
        now = int(1000 * time.time())
        self._client.log_batch(self.run_id, metrics=[self._metric(n, v, now, round) for n, v in values.items()])

    def end(self, *, failed: bool) -> None:
        """The run is finished, or failed."""
        self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")
