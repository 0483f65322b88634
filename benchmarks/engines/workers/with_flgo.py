"""FLGo: its FedAvg on a benchmark generated from tensors, in turn or in threads; it evaluates nothing."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from turns import Task, Turns


def main() -> None:
    """Take rounds."""
    turns = Turns()
    plan, task = turns.plan, Task(turns.plan["task"])
    os.environ["ENGINES_TASK"] = plan["task"]
    sys.argv = sys.argv[:1]  # FLGo reads the command line
    import flgo
    from flgo.algorithm import fedavg
    from flgo.benchmark.toolkits.cv.classification import FromDatasetPipe
    from flgo.benchmark.toolkits.partition import BasicPartitioner

    settings = task.settings

    def of_many(self: Any, places: list[int]) -> list[Any]:
        inputs, labels = self.dataset[[self.indices[i] for i in places]]
        return list(zip(inputs, labels, strict=True))

    FromDatasetPipe.TaskDataset.__getitems__ = of_many  # torch 2.12 refuses a subset without it

    class Given(BasicPartitioner):
        """The shares that all workers have."""

        num_clients = settings["clients"]

        def __call__(self, data: Any) -> list[list[int]]:
            return [rows.tolist() for rows in task.rows]

    class Server(fedavg.Server):  # type: ignore[misc,name-defined]
        """FedAvg's server, which waits for its turn."""

        def iterate(self) -> Any:
            """A round begins."""
            turns.next()
            return super().iterate()

    algorithm = types.ModuleType("fedavg_in_turns")
    algorithm.Server, algorithm.Client = Server, fedavg.Client  # type: ignore[attr-defined]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        name = flgo.gen_benchmark_from_file("engines_task", str(Path(__file__).with_name("flgo_config.py")))
        benchmark = importlib.import_module(name)
        benchmark.visualize = lambda *args, **kwargs: None
        flgo.gen_task_by_(benchmark, Given(), task_path="shares")
        option = {
            "num_rounds": plan["rounds"], "proportion": (settings["clients_per_round"] + 0.5) / settings["clients"],
            "num_epochs": settings["local_epochs"], "batch_size": settings["batch_size"],
            "learning_rate": settings["learning_rate"], "train_holdout": 0.0, "sample": "uniform",
            "aggregate": "uniform", "eval_interval": 0, "no_tqdm": True, "no_log_console": True,
            "gpu": [0] if plan["device"].startswith("cuda") else [], "torch_num_threads": plan["threads"],
            "num_parallels": plan.get("parallel", 1), "parallel_type": "t",
        }  # fmt: skip
        runner = flgo.init("shares", algorithm, option=option)
        runner.run()
        turns.next()
        turns.end(runner.model.model.state_dict().values())
        os.chdir("/")


if __name__ == "__main__":
    main()
