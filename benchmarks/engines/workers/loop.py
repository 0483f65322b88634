"""A plain PyTorch loop over the clients, in one process or in several that share the cohort."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from turns import Task, Turns, batches


class Trainer:
    """Trains one client after the other with one model."""

    def __init__(self, plan: dict[str, Any]) -> None:
        torch.set_num_threads(plan["threads"])
        self._task, self._device = Task(plan["task"]), plan["device"]
        self._settings = self._task.settings
        self._model = self._task.model().to(self._device)
        self.parameters = list(self._model.parameters())
        self._held: dict[int, Any] = {}

    def sum_of(self, start: list[torch.Tensor], clients: list[int]) -> list[torch.Tensor]:
        """The sum of the models of these clients."""
        sums = [torch.zeros_like(w) for w in start]
        for client in clients:
            self._train(start, client)
            for total, own in zip(sums, self.parameters, strict=True):
                total.add_(own.detach())
        return sums

    def _train(self, start: list[torch.Tensor], client: int) -> None:
        if client not in self._held:
            self._held[client] = self._task.tensors(client, self._device)
        with torch.no_grad():
            for own, received in zip(self.parameters, start, strict=True):
                own.copy_(received)
        optimizer = torch.optim.SGD(self.parameters, lr=self._settings["learning_rate"])
        for _ in range(self._settings["local_epochs"]):
            for x, y in batches(*self._held[client], self._settings["batch_size"]):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(self._model(x), y).backward()
                optimizer.step()


def _serve(plan: dict[str, Any], line: Connection) -> None:
    """Train what comes in another process."""
    trainer = Trainer(plan)
    line.send("ready")
    while (order := line.recv()) is not None:
        start, clients = order
        sums = trainer.sum_of([torch.from_numpy(w).to(plan["device"]) for w in start], clients)
        line.send([w.cpu().numpy() for w in sums])


def main() -> None:
    """Take rounds."""
    turns = Turns()
    plan = turns.plan
    trainer = Trainer(plan)
    settings = Task(plan["task"]).settings
    model = [w.detach().clone() for w in trainer.parameters]
    spawned = multiprocessing.get_context("spawn")
    lines = []
    for _ in range(plan.get("processes", 1) - 1):
        line, other = spawned.Pipe()
        spawned.Process(target=_serve, args=(plan, other), daemon=True).start()
        line.recv()
        lines.append(line)
    rng = np.random.default_rng(1)
    while turns.next():
        chosen = rng.choice(settings["clients"], settings["clients_per_round"], replace=False).tolist()
        shares = [chosen[i :: len(lines) + 1] for i in range(len(lines) + 1)]
        for line, share in zip(lines, shares[1:], strict=True):
            line.send(([w.cpu().numpy() for w in model], share))
        sums = trainer.sum_of(model, shares[0])
        for line in lines:
            for total, own in zip(sums, line.recv(), strict=True):
                total.add_(torch.from_numpy(own).to(total.device))
        model = [total / len(chosen) for total in sums]
    for line in lines:
        line.send(None)
    turns.end(model)


if __name__ == "__main__":
    main()
