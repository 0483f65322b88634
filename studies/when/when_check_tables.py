"""Sections of the page of ``when.py`` on the runs that train, and on the worlds that were measured before."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from when_cells import Estimate, ratio, zone_of
from when_checks import SOURCE
from when_grid import GROUPS, RANDOM
from when_markdown import NOTHING, listed, percent, points, table

JAINS = ("training_jain", "choices_jain")
READS = {"oort": "losses", "tifl": "accuracies"}
"""Selector -> what it reads besides latencies."""
Row = Mapping[str, str]


def training_section(rows: Sequence[Row]) -> str:
    """Return the comparison with runs that train."""
    head = [
        "clients", "a round", "`compute_log_sd`", "`network_round_cv`", "selector", "seeds", "rounds",
        "training, s a round", "no training, s a round", "Jain, training", "Jain, no training",
    ]  # fmt: skip
    names = ("clients", "per_round", "spread", "noise", "selector")
    lines, largest = [], {}
    for key, own in _grouped(rows, names).items():
        means = [_mean(own, name) for name in ("training_s", "choices_s", "training_jain", "choices_jain")]
        lines.append([*key, str(len(own)), own[0]["rounds"], *(f"{one:.2f}" for one in means)])
        differences = [abs(float(row["training_s"]) / float(row["choices_s"]) - 1) for row in own]
        largest[key[-1]] = max([largest.get(key[-1], 0.0), *differences])
    same = [name for name, difference in largest.items() if difference < 1e-4]
    said = (
        "The same fleets with training: the vectorized engine, the handwritten digits in equal parts, and 30 steps on "
        "one example each. The seconds are means over the seeds. The rows of oort and tifl will change with training, "
        "because answers are charged there for other examples than they read.\n"
    )
    remarks = [f"Without training, the seconds of {listed(same)} are the same on each seed."] if same else []
    remarks += [
        f"The seconds of {name} differ by up to {100 * difference:.0f} % on a seed, because {name} reads the "
        f"{READS[name]} of the clients."
        for name, difference in largest.items()
        if name not in same
    ]
    jain = {name: [float(row[name]) for row in rows if row["selector"] == "oort"] for name in JAINS}
    trained, chosen = (f"{min(own):.2f} to {max(own):.2f}" for own in jain.values())
    remarks.append(
        f"With training, the Jain's index of oort is {trained}. Without training it is {chosen}. The tables therefore "
        f"understate how unequally Oort selects. The runs with training have {listed(sorted(_plays(rows)))} plays of "
        "each client, so the savings of Oort after more plays are not checked. The picture therefore leaves out Oort."
    )
    return "\n".join([said, table(head, lines), " ".join(remarks), ""])


def known_section(rows: Sequence[Row]) -> str:
    """Return the worlds that were measured before."""
    head = ["world", "clients", "a round", "rounds", "spread", "noise", "rule", "selector", "seeds",
            "saving without training, %", "saving with training, %"]  # fmt: skip
    by_world: dict[str, dict[str, dict[int, Row]]] = {}
    for row in rows:
        by_world.setdefault(row["world"], {}).setdefault(row["selector"], {})[int(row["seed"])] = row
    lines, between, unclear = [], [], []
    for world, own in by_world.items():
        first = next(iter(own[RANDOM].values()))
        said = [first[name] or NOTHING for name in ("clients", "per_round", "rounds")] + [NOTHING] * 3
        if first["latency_spread"]:
            spread, noise = (_mean(list(own[RANDOM].values()), name) for name in ("latency_spread", "latency_noise"))
            zone = zone_of(spread, noise)
            said[3:] = [f"{spread:.2f}", f"{noise:.2f}", zone]
            if zone == "between":
                between.append(f"{_whole(own, GROUPS, 'choices_s')} % in {world}")
        for selector in (name for name in own if name != RANDOM):
            columns = [_known_saving(own, selector, column) for column in ("choices_s", "trained_s")]
            # Without the latencies of all clients, the world has absent clients.
            unequal = selector == GROUPS and not first["latency_spread"]
            lines.append([world, *said, f"{selector}, no ceiling" if unequal else selector, str(len(own[selector])),
                          *(percent(one) if one else NOTHING for one in columns)])  # fmt: skip
            unclear += [
                f"{selector} in {world} {how} training ({percent(one)} %)"
                for how, one in zip(("without", "with"), columns, strict=True)
                if one and one.low <= 0 <= one.high
            ]
    text = (
        "Worlds a, b and c are those of the page [selectors.md](selectors.md), whose runs trained. The last column "
        "comes from the runs of an earlier version of that page: `docs/results/selectors-runs.csv` in the commit "
        f"`{SOURCE}`. [when-known.csv](when-known.csv) has their seconds a round in the column `trained_s`. World c "
        "has absent clients, which this page does not simulate. `fashion-500` is a scenario of the package. Without "
        "training, all clients have equal parts of the data.\n"
    )
    c = [percent(one) for name in ("bsfl", GROUPS) if (one := _known_saving(by_world["c"], name, "trained_s"))]
    m, rounds, clients = (int(by_world["fashion-500"][RANDOM][1][name]) for name in ("per_round", "rounds", "clients"))
    bonus = math.sqrt((m + 1) * math.log(rounds) / (rounds * m / clients))  # radius of BSFL, (12)
    remarks = []
    if between:
        remarks.append(f"The worlds between the limits of the rule have ceilings of {listed(between)}.")
    if unclear:
        remarks.append(f"These savings have an interval that contains 0, so no saving is shown: {listed(unclear)}.")
    remarks += [
        f"In `fashion-500`, BSFL's bonus sqrt((m + 1) ln t / n) is {bonus:.1f} after {rounds} rounds, and speeds are "
        "at most 1. BSFL therefore selects each client about equally often. It orders only clients with equal plays by "
        "speed.",
        f"In world c, BSFL with training saves {c[0]} %. Clients of world c are often absent, so sorted groups cannot "
        f"select them equally often. Their saving of {c[1]} % is an orientation only, not a ceiling.",
    ]
    return "\n".join([text, table(head, lines), " ".join(remarks), ""])


def _whole(own: Mapping[str, Mapping[int, Row]], selector: str, column: str) -> str:
    found = _known_saving(own, selector, column)
    return points(found.value) if found else NOTHING


def _known_saving(own: Mapping[str, Mapping[int, Row]], selector: str, column: str) -> Estimate | None:
    seeds = [seed for seed in own[selector] if own[selector][seed][column] and own[RANDOM][seed][column]]
    if not seeds:
        return None
    random, seconds = (np.array([float(own[name][seed][column]) for seed in seeds]) for name in (RANDOM, selector))
    return ratio(random - seconds, random)


def _plays(rows: Sequence[Row]) -> set[int]:
    return {int(row["rounds"]) * int(row["per_round"]) // int(row["clients"]) for row in rows}


def _grouped(rows: Sequence[Row], names: Sequence[str]) -> dict[tuple[str, ...], list[Row]]:
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    return found


def _mean(rows: Sequence[Row], name: str) -> float:
    return float(np.mean([float(row[name]) for row in rows]))
