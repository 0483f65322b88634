"""Threads, descriptors and memory over many rounds with interrupted uploads: ``python benchmarks/late_replies.py``.

Twenty nodes in rounds of 10 s, on a SuperLink in simulated time that behaves as Flower's does: a request for replies
claims the announced answers, and hangs for 180 s if one of them is never complete. 5 % of the uploads are interrupted,
10 % of the answers come after their round, and three nodes never answer. The threads are real ones. The table shows
this process after 1, 10, 100, 500 and 1,000 rounds. The last line shows how long an honest client stayed busy.

    python benchmarks/late_replies.py                     # this checkout
    python benchmarks/late_replies.py --package CHECKOUT  # the package of another checkout
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import sys
import threading
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Play and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--package", type=Path, default=ROOT, metavar="CHECKOUT")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    # First the package, and then the simulated SuperLink, which is always that of this checkout.
    sys.path.insert(0, str(args.package.resolve()))
    importlib.import_module("fedsel_flwr")
    sys.path.insert(0, str(ROOT))
    from tests.strategies.message.simulated_link import simulate
    from tests.strategies.message.test_late_replies import Fleet

    fleet, before = Fleet(simulate(setattr), hanging=3), threading.active_count()
    print("| rounds | threads | most threads | descriptors | memory, MB | late messages | answers a round |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    done = 0
    for number in sorted({one for one in (1, 10, 100, 500) if one < args.rounds} | {args.rounds}):
        answers = fleet.trained
        fleet.play(number - done, poll_s=0.25)
        gc.collect()
        megabytes = psutil.Process().memory_info().rss / 2**20
        print(
            f"| {number:,} | {threading.active_count() - before} | {fleet.world.most_threads} "
            f"| {len(os.listdir('/proc/self/fd'))} | {megabytes:.1f} | {len(fleet.late._owed)} "
            f"| {(fleet.trained - answers) / (number - done):.1f} |",
            flush=True,
        )
        done = number
    print(f"An honest client was busy for at most {fleet.slowest_s:.1f} s after its answer.")


if __name__ == "__main__":
    main()
