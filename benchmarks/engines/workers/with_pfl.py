"""pfl-research: FederatedAveraging on its SimulatedBackend, in one process or in several over torch.distributed."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import torch
from turns import Task, Turns


def _join(plan: dict[str, Any]) -> subprocess.Popen[bytes] | None:
    """Several processes, as torchrun would start them; the first starts the others."""
    if plan.get("processes", 1) == 1:
        return None
    rank = int(os.environ.get("RANK", "0"))
    names = {"TORCHELASTIC_RUN_ID": "engines", "WORLD_SIZE": str(plan["processes"]), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= names | {"MASTER_PORT": str(plan["port"]), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    if rank + 1 == plan["processes"]:
        return None
    return subprocess.Popen([sys.executable, *sys.argv], env=os.environ | {"RANK": str(rank + 1)}, stdout=2)


def main() -> None:
    """Take rounds."""
    turns = Turns()
    plan, task = turns.plan, Task(turns.plan["task"])
    torch.set_num_threads(plan["threads"])
    os.environ["PFL_PYTORCH_DEVICE"] = plan["device"]
    other = _join(plan)
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.internal.ops import pytorch_ops
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    settings, rank = task.settings, pytorch_ops.distributed.global_rank

    class WithLoss(torch.nn.Module):
        """The model, with what pfl asks of it."""

        def __init__(self) -> None:
            super().__init__()
            self.net = task.model()

        def loss(self, x: torch.Tensor, y: torch.Tensor, **_: object) -> torch.Tensor:
            """What steps go down."""
            return torch.nn.functional.cross_entropy(self.net(x), y)

        def metrics(self, x: torch.Tensor, y: torch.Tensor, **_: object) -> dict[str, Any]:
            """Nothing that costs time."""
            return {"seen": Weighted(0.0, len(y))}

    class InTurns(TrainingProcessCallback):  # type: ignore[type-arg]
        """Waits for the turn; the other processes wait for the first."""

        def on_train_begin(self, *, model: Any) -> Metrics:
            """Before the first round."""
            self._wait()
            return Metrics()

        def after_central_iteration(self, aggregate_metrics: Any, model: Any, **_: Any) -> tuple[bool, Metrics]:
            """After a round."""
            return not self._wait(), Metrics()

        def _wait(self) -> bool:
            more = torch.tensor([int(turns.next()) if rank == 0 else 0])
            if plan.get("processes", 1) > 1:
                torch.distributed.broadcast(more, src=0)
            return bool(more)

    held: dict[int, Any] = {}

    def dataset(client: int) -> Dataset:
        if client not in held:
            x, y = task.tensors(client, plan["device"])
            held[client] = Dataset(raw_data=[x, y], user_id=client)
        return held[client]

    model = WithLoss()
    wrapped = PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0))
    data = FederatedDataset(dataset, get_user_sampler("random", list(range(settings["clients"]))))
    FederatedAveraging().run(
        NNAlgorithmParams(plan["rounds"] + 1, 10**9, settings["clients_per_round"], None),
        SimulatedBackend(data, data),
        wrapped,
        NNTrainHyperParams(
            local_num_epochs=settings["local_epochs"],
            local_learning_rate=settings["learning_rate"],
            local_batch_size=settings["batch_size"],
        ),
        callbacks=[InTurns()],
    )
    if rank == 0:
        turns.end(model.net.state_dict().values())
    if other is not None:
        other.wait(30)


if __name__ == "__main__":
    main()
