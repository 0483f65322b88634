"""A worker without a framework: it sleeps for a round, or breaks off as the plan says."""

import time

import numpy as np


def main() -> None:
    from turns import Turns

    turns = Turns()
    print("what frameworks print")
    if turns.plan.get("broken") == "at once":
        raise ValueError("cannot train")
    rounds = 0
    while turns.next(training=0.5, backend="manual"):
        if rounds == turns.plan.get("broken"):
            raise ValueError("lost")
        time.sleep(turns.plan["seconds"])
        rounds += 1
    turns.end([np.full((2, 3), float(rounds))])


if __name__ == "__main__":
    main()
