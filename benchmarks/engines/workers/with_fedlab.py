"""FedLab: its FedAvg handler and serial trainer, standalone, or as a server and processes that share the clients."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import torch
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.fedavg import FedAvgServerHandler
from fedlab.core.client.manager import PassiveClientManager
from fedlab.core.network import DistNetwork
from fedlab.core.server.manager import SynchronousServerManager
from fedlab.core.standalone import StandalonePipeline
from turns import Task, Turns, batches


class Shares:
    """The clients' examples as FedLab asks for them; ``first`` is the first client of this process."""

    def __init__(self, task: Task, device: str, first: int = 0) -> None:
        self._task, self._device, self._first = task, device, first
        self._held: dict[int, Any] = {}

    def get_dataloader(self, id: int, batch_size: int) -> Any:
        """Batches in a new order."""
        client = self._first + id
        if client not in self._held:
            self._held[client] = self._task.tensors(client, self._device)
        return batches(*self._held[client], batch_size)


def _trainer(plan: dict[str, Any], task: Task, count: int, first: int = 0) -> SGDSerialClientTrainer:
    settings, cuda = task.settings, plan["device"].startswith("cuda")
    trainer = SGDSerialClientTrainer(task.model(), count, cuda=cuda, device=plan["device"] if cuda else None)
    trainer.setup_dataset(Shares(task, plan["device"], first))
    trainer.setup_optim(settings["local_epochs"], settings["batch_size"], settings["learning_rate"])
    return trainer


class Pipeline(StandalonePipeline):
    """Waits for the turn where FedLab evaluates."""

    turns: Turns

    def evaluate(self) -> None:
        """A round has ended."""
        self.turns.next()


class Server(SynchronousServerManager):
    """Waits for the turn before it wakes the clients."""

    turns: Turns

    def activate_clients(self) -> None:
        """A round begins."""
        self.turns.next()
        super().activate_clients()


def main() -> None:
    """Take rounds."""
    turns = Turns()
    logging.disable(logging.INFO)
    plan, task = turns.plan, Task(turns.plan["task"])
    torch.set_num_threads(plan["threads"])
    settings, processes = task.settings, plan.get("processes", 1)
    network = {"address": ("127.0.0.1", str(plan["port"])), "world_size": processes + 1}
    if len(sys.argv) > 2:  # a process that trains
        rank, each = int(sys.argv[2]), settings["clients"] // processes
        trainer = _trainer(plan, task, each, first=(rank - 1) * each)
        PassiveClientManager(DistNetwork(**network, rank=rank, ethernet="lo"), trainer).run()
        return
    share = (settings["clients_per_round"] + 0.5) / settings["clients"]  # FedLab rounds down
    handler = FedAvgServerHandler(task.model(), plan["rounds"], share, cuda=plan["device"].startswith("cuda"))
    others = []
    if processes == 1:
        pipeline = Pipeline(handler, _trainer(plan, task, settings["clients"]))
        pipeline.turns = turns
        turns.next()
        pipeline.main()
    else:
        for rank in range(1, processes + 1):
            others.append(subprocess.Popen([sys.executable, *sys.argv, str(rank)], stdout=2, stdin=subprocess.DEVNULL))
        server = Server(DistNetwork(**network, rank=0, ethernet="lo"), handler)
        server.turns = turns
        server.setup()
        server.main_loop()
        turns.next()
        server.shutdown()
    turns.end(handler.model.state_dict().values())
    for other in others:
        other.wait(30)


if __name__ == "__main__":
    main()
