"""The first round on Ray, plain Flower's and ours in turn: ``python benchmarks/first_round.py --data-dir DIR``.

Plain Flower is its own FedAvg, which draws the clients itself; ours is the scenario's selection strategy around that
same FedAvg. Nodes, clients, training, data, server and test set are the same, and every measurement is a process of
its own; the sides take turns. Two times are printed: from the start of the server's loop to the end of round 1's
aggregation, and to that same moment from the start of the process. Other work on the machine counts, so that the ratio
of each turn says more than the seconds; ``--spans`` shows where they went ("configured": the clients are chosen, on our
side after the roll call).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SIDES = ("flower", "ours")
APIS = ("legacy", "message")
MARK = "measured: "


def main() -> None:
    """Measure in turn, and print; or, asked so, be one of the measured processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default="fashion-500")
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--selector", help="instead of the scenario's")
    parser.add_argument("--clients", type=int, help="instead of the scenario's")
    parser.add_argument("--passes", type=int, default=5, help="measurements of each side and API (default: 5)")
    parser.add_argument("--apis", nargs="*", default=list(APIS), choices=APIS)
    parser.add_argument("--spans", action="store_true", help="print the times of each measurement")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        measure(args)
        return
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores; seconds to the end of round 1's aggregation")
    for api in args.apis:
        turns = [{side: started(args, api, side) for side in SIDES} for _ in range(args.passes)]
        for since in ("loop", "process"):
            seconds = {side: [turn[side]["aggregated"] - turn[side][since] for turn in turns] for side in SIDES}
            ratios = [ours / flower for flower, ours in zip(seconds["flower"], seconds["ours"], strict=True)]
            figures = ", ".join(f"{side} {spread(values)}" for side, values in seconds.items())
            print(f"{api}, from the start of the {since}: {figures}, ratio {spread(ratios)}", flush=True)


def started(args: argparse.Namespace, api: str, side: str) -> dict[str, float]:
    """One measurement, in a process of its own; event -> seconds since the epoch."""
    argv = [sys.executable, __file__, "--side", side, "--apis", api, "--scenario", args.scenario]
    for name in ("data_dir", "selector", "clients"):
        if value := getattr(args, name):
            argv += [f"--{name.replace('_', '-')}", str(value)]
    root = str(Path(__file__).resolve().parent.parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    begun = time.time()
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        raise SystemExit(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    events: dict[str, float] = {"process": begun, **json.loads(lines[-1].removeprefix(MARK))}
    if args.spans:
        print(f"  {api} {side}: " + ", ".join(f"{k} {t - begun:.2f}" for k, t in events.items()), flush=True)
    return events


def measure(args: argparse.Namespace) -> None:
    """Run two rounds of one side in this process, and print when what happened."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("FLWR_LOG_LEVEL", "ERROR")
    from flwr.common import Context
    from flwr.server import ServerApp
    from flwr.serverapp import Grid

    from fedsel_flwr.operating_system import adopt_orphans
    from fedsel_flwr.simulations import engine
    from fedsel_flwr.simulations.on_flower import building
    from fedsel_flwr.simulations.on_flower.app import ScenarioApp, wait_for_nodes
    from fedsel_flwr.simulations.on_flower.building import make_strategy
    from fedsel_flwr.simulations.on_flower.ray_resources import RayResources
    from fedsel_flwr.simulations.on_flower.ray_session import RaySession
    from fedsel_flwr.simulations.scenario_files import load_scenario
    from fedsel_flwr.simulations.shutdown import end_descendants
    from fedsel_flwr.simulations.worlds.world import World, world_of

    api = args.apis[0]
    overrides = {"api": api, "data.data_dir": args.data_dir, "num_clients": args.clients, "rounds": 2}
    scenario = load_scenario(args.scenario, overrides | {"selector": args.selector})
    events: dict[str, float] = {"imported": time.time()}

    def flower(world: World) -> Any:
        """Flower's own FedAvg, as many clients a round as the scenario has."""
        base, cohort = building.APIS[api].make_base(world), scenario.clients_per_round
        names = ("fraction_fit", "min_fit_clients") if api == "legacy" else ("fraction_train", "min_train_nodes")
        for name, value in zip(names, (cohort / scenario.num_clients, cohort), strict=True):
            setattr(base, name, value)
        return base

    world = world_of(scenario)
    strategy: Any = flower(world) if args.side == "flower" else make_strategy(world)
    events["world"] = time.time()
    kind = "fit" if api == "legacy" else "train"
    note_first_end(strategy, f"configure_{kind}", events, "configured")
    note_first_end(strategy, f"aggregate_{kind}", events, "aggregated")
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        events["loop"] = time.time()
        if args.side == "ours":
            wait_for_nodes(grid, scenario)
        building.APIS[api].run(grid, world, strategy)

    adopt_orphans()
    try:
        app = ScenarioApp(engine.SameScenario(scenario))
        session = RaySession(RayResources(), quiet=True)
        engine.run_simulation(
            session=session, server_app=server_app, client_app=app, num_supernodes=scenario.num_clients
        )
    finally:
        end_descendants()
    print(MARK + json.dumps(events))


def note_first_end(strategy: Any, method: str, events: dict[str, float], event: str) -> None:
    """Have the end of the first call of a strategy's method noted."""
    original = getattr(strategy, method)

    def noting(*given: Any, **named: Any) -> Any:
        result = original(*given, **named)
        events.setdefault(event, time.time())
        return result

    setattr(strategy, method, noting)


def spread(values: list[float]) -> str:
    """Median, and the least and the most."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
