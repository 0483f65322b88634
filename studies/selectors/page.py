"""The page: picture and summary, a section for each world, the advice, and how to read it."""

from __future__ import annotations

from pathlib import Path

from advice import advice, summary
from effects import WINDOW_LIMIT, World
from formats import listed, table
from picture import draw, draw_curves, draw_overview
from sections import core_hours, missing_hours, section
from tuning import SEEDS
from values import Tunings, published_values, tuning_table

MACHINE = "x86-64 server, 2 cores shared with other programs, one thread per process, Python 3.11, torch on the CPU"
"""Machine of the stored rows. Change it with the rows."""
TRAINING_EXAMPLES = 60_000
"""Fashion-MNIST's training examples."""
HEAD = """# Selectors compared

Which selectors reach a target accuracy sooner than random selection, if they ask as many clients a round?

![Ratios of the time to `random` in each world]({overview})

{summary}
Written by `{command}` from the rows in [{rows}]({rows}). With `--page-only`, nothing is simulated.
[joules.md](joules.md) compares seconds with joules in world (a). Machine: {machine}.

{status}"""
READING = """
## How to read the tables

- All selectors run on the same seeds. A seed determines data, partition, devices, channels, first model and batches.
- The target is reached when the mean accuracy of {window} evaluated rounds is at least the target accuracy.
- Ratios compare a selector with `random` on the same seeds: geometric means with a 95 % interval. All of them use the
  same runs of `random`; the row `random-again` shows how much chance moves them.
- If a row missed the target on a seed, the tables show the number of seeds that reached it. The p-value is then that of
  the sign test, and the verdict has the seeds on which the row was sooner, later or undecided (within 5 %, or the run
  ended too early). A row that reached the target on fewer seeds than `random` is never called sooner.
- "Limited by the window" marks rows with fewer than {limit:g} times the rounds of the first window, before which no run
  can reach the target. Large numbers of clients are therefore underrated.
- The time ratio is the ratio of rounds times the ratio of seconds a round, until the target. The share of the ceiling
  and the list "Shorter rounds" are about the whole run. The ceiling is the saving of `sorted-groups`, which knows each
  client's mean latency and gives equal shares; a selector that prefers fast clients may pass 100 %. Its interval is a
  jackknife interval. A Jain's index of 1 means equal shares.
- "Reads" is what a selector learns from. "Sizes" are numbers of examples, and "server data" are
  {validation}. A probe is an additional message before a round.
- **FedCM also filters.** With `fedcm-ts` and `fedcm-ucb`, the strategy leaves out models that make the average worse on
  the server's examples. In world (a), the row `random-filtered` has the filter without the selection.
- The verdict is about the time only. [comparing.md](../comparing.md#statistics) explains words and Holm's correction.
  Its family is all selectors of the world; the controls are another one, and references are not corrected.
- **Compare like with like.** A selector that asks more clients a round needs fewer rounds and more joules. The first
  rows of each table ask as many clients as `random`, within 10 %. "Asked" counts clients that train, without probes.
- Rows in italics cannot be used: `genie` selects the clients with the lowest mean latency, `sorted-groups` groups of
  similar mean latency in turn, and `random-again` is `random` with other draws.

## Values of parameters

- A value that a publication has for the world's number of clients and cohort comes first. FedCor's authors had 100
  clients and 5 a round, with this data set; they may have chosen values by results. `active-fl` (in their comparison)
  and `gpfl` (in its paper) have their defaults with as many clients.
- Else the main parameter has the fastest of eight settings: the geometric mean of the time on three seeds
  ({seeds}), which are never evaluated. If no setting reaches the target on all of them, the fewest misses decide, then
  the accuracy at the end. If the chosen setting is the first or the last, a value beyond it may be faster.
- All other parameters are the defaults. In world (a), the row `bsfl-auto` has the default of a deployment ("Rows that
  separate two causes"). "sizes" stands for the clients' numbers of examples.

{published}
Seconds to the target with each setting; the chosen one is bold. If a seed missed the target, brackets have the accuracy
at the end and the number of misses.

{tuned}"""


def write_page(path: Path, worlds: list[World], tunings: Tunings, rows: str, command: str) -> None:
    """Write the page and its pictures.

    Args:
        path: The page. The pictures are in the same folder.
        worlds: The worlds, with and without rows.
        tunings: Letter of a world -> its tunings.
        rows: Name of the CSV file.
        command: The command that writes the page.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = [
        HEAD.format(
            command=command, rows=rows, machine=MACHINE, status=_status(worlds), summary=summary(worlds),
            overview=draw_overview(worlds, path.with_suffix(".png")).name,
        )
    ]  # fmt: skip
    for world in worlds:
        picture = path.with_name(f"{path.stem}-{world.scenario.name}.png")
        if world.complete and world.verdicts:
            draw(world, picture)
            draw_curves(world, picture.with_stem(f"{picture.stem}-curves"))
        parts.append(section(world, picture.name))
    reading = READING.format(
        window=worlds[0].scenario.target_rounds, limit=WINDOW_LIMIT, validation=_validation(worlds),
        seeds=listed([str(seed) for seed in SEEDS]), published=published_values(worlds, tunings),
        tuned=tuning_table(worlds, tunings),
    )  # fmt: skip
    parts += ["\n## Which selector when\n\n", advice(worlds), reading]
    path.write_text("".join(parts), encoding="utf-8")


def _validation(worlds: list[World]) -> str:
    """Return the number of examples on the server, from the share of Fashion-MNIST's training examples."""
    found = {
        round(world.scenario.data.validation_fraction * TRAINING_EXAMPLES)
        for world in worlds
        if world.scenario.data.dataset == "fashion-mnist" and not {"fedcm-ts", "fedcm-ucb"}.isdisjoint(world.rows)
    }
    return listed([f"{number:,}" for number in sorted(found) if number]) + " of Fashion-MNIST's training examples"


def _status(worlds: list[World]) -> str:
    """Return the table of finished and missing runs."""
    lines = [
        [
            f"({world.letter}) {world.scenario.description}", f"{len(world.run_seconds):,}",
            f"{core_hours(world):.1f}", f"{len(world.missing):,}", f"{sum(missing_hours(world).values()):.1f}",
        ]
        for world in worlds
    ]  # fmt: skip
    return table(["world", "runs", "their core-hours", "missing runs", "core-hours for them"], lines)
