"""The small world of the selectors' gallery: one scenario, played by every selector, and the numbers of its choices."""

from __future__ import annotations

import hashlib
import io
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import fedsel_flwr
from fedsel_flwr.clients.device import mean_latencies
from fedsel_flwr.errors import FedSelError
from fedsel_flwr.selectors.registry import example, selector_class
from fedsel_flwr.simulations import load_scenario, simulate
from fedsel_flwr.simulations.run_identity import scenario_fingerprint
from fedsel_flwr.simulations.scenario import Scenario
from fedsel_flwr.simulations.scenario_files import own_parameters
from fedsel_flwr.simulations.worlds.world import world_of

SCENARIO = Path(__file__).parent / "small_world.toml"
TOO_LATE = "missed the client deadline"


@dataclass(frozen=True)
class Played:
    """A run in the small world, the phones in the order of their mean latency, the fastest first.

    Attributes:
        chosen: Whether a phone was chosen in a round, shape (phones, rounds).
        completed: Whether its update was usable and arrived in time, same shape.
        latency: Mean latency of each phone, capped at the client deadline, seconds.
        examples: Number of training examples of each phone.
        late: Whether a phone would miss that deadline in a round if it only trained and sent its update, same shape.
    """

    chosen: npt.NDArray[np.bool_]
    completed: npt.NDArray[np.bool_]
    latency: npt.NDArray[np.float64]
    examples: npt.NDArray[np.int64]
    late: npt.NDArray[np.bool_]

    @cached_property
    def times(self) -> npt.NDArray[np.int64]:
        """How often each phone was chosen."""
        return np.asarray(self.chosen.sum(axis=1), dtype=np.int64)

    @property
    def thirds(self) -> list[slice]:
        """Rows of the fastest third, the middle third and the slowest third."""
        third = len(self.latency) // 3
        return [slice(0, third), slice(third, len(self.latency) - third), slice(len(self.latency) - third, None)]

    def share(self, rows: slice, rounds: slice = slice(None)) -> float:
        """Share of the choices that went to some phones in some rounds."""
        return float(self.chosen[rows, rounds].sum() / self.chosen[:, rounds].sum())

    @property
    def jain(self) -> float:
        """Jain's index of the numbers of choices."""
        return float(self.times.sum() ** 2 / (self.times.size * (self.times**2).sum()))


def scenario(name: str) -> Scenario:
    """The small world with a selector; a parameter that the file does not give has its example's value."""
    given = tomllib.loads(SCENARIO.read_text("utf-8"))["selectors"].get(name, {})
    needed = set(own_parameters(selector_class(name))) - set(given)
    examples = {f"selectors.{name}.{key}": value for key, value in example(name).items() if key in needed}
    return load_scenario(SCENARIO, {"selector": name} | examples)


def play(name: str) -> Played:
    """Play the small world with a selector.

    Raises:
        FedSelError: The selector lacks a parameter, or cannot play.
    """
    world = scenario(name)
    try:
        history = simulate(world, quiet=True).history
    except FedSelError as error:
        raise type(error)(f"the small world cannot be played with {name!r} ({SCENARIO.name}): {error}") from error
    phones = world_of(world)
    latency = mean_latencies(phones.system)
    order = np.argsort(latency, kind="stable")
    chosen = np.zeros((world.num_clients, world.rounds), dtype=bool)
    completed = chosen.copy()
    for record in history.clients:
        # Rows of the selector follow the partitions, because the ids are 0 ... num_clients - 1.
        chosen[record.client, record.round - 1] = True
        completed[record.client, record.round - 1] = record.completed
    draws = [phones.system.draws(range(world.num_clients), number) for number in range(1, world.rounds + 1)]
    seconds = np.array([[one.download_s + one.compute_s + one.upload_s for one in row] for row in draws])
    late = (seconds >= world.wireless.max_latency_s).T
    return Played(chosen[order], completed[order], latency[order], phones.sizes[order], late[order])


def played(name: str, cache: Path) -> Played:
    """Return a run of the small world, from the cache if the same code has already played it.

    Args:
        name: Name of the selector.
        cache: Folder of the cache; created if needed.
    """
    world = scenario(name)
    parts = (scenario_fingerprint(world), repr(world.selectors.get(name)), str(world.seed), fedsel_flwr.__version__)
    key = hashlib.sha256("\n".join((*parts, source_digest())).encode()).hexdigest()[:24]
    file = cache / f"{name}-{key}.npz"
    if (kept := _read(file)) is not None:
        return kept
    run = play(name)
    cache.mkdir(parents=True, exist_ok=True)
    for old in cache.glob(f"{name}-{'?' * 24}.npz"):
        old.unlink()
    packed = io.BytesIO()
    np.savez_compressed(packed, **{one.name: getattr(run, one.name) for one in fields(run)})
    file.write_bytes(packed.getvalue())
    return run


def source_digest() -> str:
    """Digest of the package's code and of this file."""
    package = Path(fedsel_flwr.__file__).parent
    digest = hashlib.sha256()
    for file in [Path(__file__), *sorted(package.rglob("*.py"))]:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def sentences(run: Played) -> Iterator[str]:
    """Yield what a run shows, a sentence each; every number is computed from the run."""
    phones, rounds = run.chosen.shape
    fast, middle, slow = (f"{100 * run.share(rows):.0f} %" for rows in run.thirds)
    third = run.thirds[0].stop
    yield (
        f"Of all {run.times.sum():,} choices, the {third} fastest phones got {fast}, "
        f"the {phones - 2 * third} phones in the middle {middle}, and the {third} slowest phones {slow}."
    )
    half = rounds // 2
    before, after = (run.share(run.thirds[2], part) for part in (slice(0, half), slice(half, None)))
    yield (
        f"The share of the {third} slowest phones was {100 * before:.0f} % in rounds 1 to {half}, and "
        f"{100 * after:.0f} % in rounds {half + 1} to {rounds}."
    )
    even = np.ptp(run.times) <= 1
    if even:
        counts = " or ".join(map(str, np.unique(run.times)))
        yield f"Every phone was chosen {counts} times."
    else:
        yield f"Jain's index of the numbers of choices is {run.jain:.2f}, and 1 would mean equal numbers."
    never = int((run.times == 0).sum())
    if never:
        yield f"{number(never).capitalize()} {'phone was' if never == 1 else 'phones were'} never chosen."
    else:
        last = int(run.chosen.argmax(axis=1).max()) + 1
        yield f"After round {last}, every phone had been chosen at least once."
    failing = np.flatnonzero(run.late.mean(axis=1) > 0.5)
    if failing.size:
        counts = " and ".join(map(str, run.times[failing]))
        one = failing.size == 1
        yield (
            f"{number(failing.size).capitalize()} {'phone misses' if one else 'phones miss'} the client deadline in "
            f"most rounds. {'It was' if one else 'They were'} chosen {counts} times, and an equal share would be "
            f"{run.times.sum() / phones:.0f} times."
        )
    more = int((run.chosen & ~run.completed & ~run.late).sum())
    if more:
        yield (
            f"In {number(more)} {'choice' if more == 1 else 'choices'}, a phone {TOO_LATE} only because of "
            "what the selector asks for in addition to the update."
        )
    if not even:
        examples, latency = (signed(rank_correlation(run.times, one)) for one in (run.examples, run.latency))
        yield (
            f"The rank correlation of the numbers of choices is {examples} with the numbers of examples, and {latency} "
            "with the mean latencies."
        )
    cohort = run.chosen.sum(axis=0)
    if cohort.min() < cohort.max():
        yield f"A round had {cohort.mean():.1f} phones on average, at least {cohort.min()} and at most {cohort.max()}."


def rank_correlation(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> float:
    """Spearman's rank correlation; 0 if one of the two is constant."""
    one, other = _ranks(first), _ranks(second)
    if np.ptp(one) == 0 or np.ptp(other) == 0:
        return 0.0
    # Adding 0 turns -0.0 into 0.0.
    return round(float(np.corrcoef(one, other)[0, 1]), 2) + 0.0


def signed(value: float) -> str:
    """A correlation with two decimals and a typographic minus."""
    return f"{value:.2f}".replace("-", "\N{MINUS SIGN}")


def number(count: int) -> str:
    """A number in words, up to ten."""
    words = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    return words[count] if count < len(words) else str(count)


def _ranks(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Ranks, equal values with their mean rank."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[inverse], dtype=np.float64)


def _read(file: Path) -> Played | None:
    """Read a run of the cache; None if there is none, or if the file is damaged."""
    try:
        with np.load(io.BytesIO(file.read_bytes()), allow_pickle=False) as kept:
            return Played(**{one.name: kept[one.name] for one in fields(Played)})
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
