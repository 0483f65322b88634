"""The authors' own code, run on inputs of ours, made these choices: the selectors make them too.

The traces and how they were made: tests/golden/authors. There are no failures and no spares in them. ``pytest -s``
prints the counts.
"""

from __future__ import annotations

import csv
from typing import Any

import numpy as np
import pytest

from fedsel_flwr.rounds.late import importance
from fedsel_flwr.selectors import ActiveFL, DivFL, FedCor, Oort, Pisces, PowerOfChoice, active_fl, oort
from fedsel_flwr.selectors._draws import top
from tests.golden.authors import recipe
from tests.golden.authors.recipe import Floats, Ints
from tests.selectors.rounds import report

TIE = 1e-6
"""DivFL takes sums that differ by this part for equal."""


def trace(name: str) -> list[dict[str, str]]:
    with (recipe.FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def ints(text: str) -> Ints:
    return np.array(text.split(), dtype=np.int64)


def floats(text: str) -> Floats:
    return np.array(text.split(), dtype=np.float64)


class Draws:
    """Takes the place of a module's ``draw``: the likeliest clients, and what each of them weighed."""

    def __init__(self, patch: pytest.MonkeyPatch, module: Any) -> None:
        self.clients = self.chosen = np.zeros(0, dtype=np.int64)
        self.log_weight = np.zeros(0)
        patch.setattr(module, "draw", self._draw)

    def _draw(self, generator: np.random.Generator, clients: Ints, log_weight: Floats, count: int) -> Ints:
        self.clients, self.log_weight = clients, log_weight
        self.chosen = clients[top(log_weight, count)]
        return self.chosen

    def odds(self, clients: Ints) -> Floats:
        """Chance of each of these to be drawn first, over that of the first of them."""
        weight = dict(zip(self.clients.tolist(), self.log_weight.tolist(), strict=True))
        return np.exp([weight[k] - weight[clients[0]] for k in clients.tolist()])


CASES: dict[str, Any] = {
    "oort": recipe.OORT, "fedscale": recipe.FEDSCALE, "fedcor": recipe.FEDCOR,
    "active-fl": recipe.LOSSES, "power-of-choice": recipe.LOSSES, "divfl": recipe.DIVFL,
    "pisces": recipe.PISCES, "refl": recipe.REFL,
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_inputs_are_those_that_the_authors_code_had(name: str) -> None:
    head = [line for line in (recipe.FOLDER / f"{name}.csv").read_text(encoding="utf-8").splitlines() if line[0] == "#"]
    assert f"# inputs: sha256 {recipe.inputs(CASES[name])}" in head


def oort_of(fleet: recipe.OortFleet) -> Oort:
    """The selector after a round of everybody, without exploration and pacer."""
    selector = Oort(
        clients_per_round=fleet.chosen, exploration=0.0, exploration_min=0.0, penalty=fleet.penalty, clip=fleet.clip,
        cut_off=fleet.cut_off, first_percentile=fleet.percentile, pacer_step=10**6, score_range="paper", seed=0,
    )  # fmt: skip
    selector.plan_rounds(warmup_rounds=1)
    sizes, durations, _ = fleet.clients_of()
    selector.inform(np.arange(fleet.clients), num_examples=sizes)
    everybody = selector.select(np.arange(fleet.clients))
    selector.observe(report(everybody, durations, rms_loss=fleet.losses(1)))
    return selector


@pytest.mark.parametrize(("name", "of"), [("oort", 2400), ("fedscale", 600)])
def test_oort(name: str, of: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draws, rows = Draws(monkeypatch, oort), iter(trace(name))
    equal, apart = 0, []
    for fleet in CASES[name]:
        selector, durations = oort_of(fleet), fleet.clients_of()[1]
        for number in range(2, fleet.rounds + 2):
            ours, row = selector.select(np.arange(fleet.clients)), next(rows)
            assert (row["setting"], row["seed"], row["round"]) == (fleet.setting, str(fleet.seed), str(number))
            theirs = ints(row["chosen"])  # the likeliest first
            equal += set(ours.tolist()) == set(theirs.tolist())
            if row["odds"]:
                apart.append(np.abs(draws.odds(theirs) / floats(row["odds"]) - 1.0).max())
            # both continue with their choice
            selector.observe(report(theirs, durations[theirs], rms_loss=fleet.losses(number)[theirs]))
    print(f"{name}: {equal} of {of} sets equal, odds to {max(apart):.1e}")
    assert next(rows, None) is None
    assert equal == of
    assert len(apart) == of // 10
    assert max(apart) < 1e-9


def test_fedcor() -> None:
    equal = 0
    for case, row in zip(recipe.FEDCOR, trace("fedcor"), strict=True):
        assert row["seed"] == str(case.seed)
        everybody, theirs, sets = np.arange(case.clients), ints(row["chosen"]).tolist(), []
        after_warm_up = {"round": 1, "embedding": case.embedding().T, "discount": case.discounts()}
        for count in range(1, case.chosen + 1):  # the sets of 1, 2, ... clients tell the order
            selector = FedCor(clients_per_round=count, warmup_rounds=1, interval=10, seed=0)
            selector.inform(everybody, num_examples=case.sizes())
            selector.load_state_dict(selector.state_dict() | after_warm_up)
            sets.append(set(selector.select(everybody).tolist()))
        equal += sets == [set(theirs[:count]) for count in range(1, case.chosen + 1)]
    print(f"fedcor: {equal} of 300 choices equal, order included")
    assert equal == len(recipe.FEDCOR) == 300


def test_active_fl(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = Draws(monkeypatch, active_fl)
    equal = told = 0
    for case, row in zip(recipe.LOSSES, trace("active-fl"), strict=True):
        assert row["seed"] == str(case.seed)
        everybody = np.arange(case.clients)
        options = {"dropped": case.dropped, "temperature": case.temperature, "uniform": case.uniform}
        selector = ActiveFL(clients_per_round=recipe.ACTIVE_FL_CHOSEN, seed=case.seed, **options)
        selector.inform(everybody, num_examples=case.sizes(), loss=case.losses())
        chosen = selector.select(everybody)
        kept, theirs = ints(row["kept"]), floats(row["chances"])
        weight = np.exp(draws.log_weight)
        chance = dict(zip(draws.clients.tolist(), weight / weight.sum(), strict=True))
        if chance.keys() == set(kept.tolist()):
            ours = np.array([chance[k] for k in kept.tolist()])
            ours = ours if len(theirs) == len(kept) else ours[[0, -1]]
            counts = (len(draws.chosen), len(chosen) - len(draws.chosen))
            equal += np.abs(ours - theirs).max() < 1e-12 and counts == (int(row["by_value"]), int(row["uniform"]))
        told += len(theirs)
    print(f"active-fl: {equal} of 500 equal in who is left, chances and counts")
    assert equal == len(recipe.LOSSES) == 500
    assert told == 50 * 25 + 450 * 2


def test_power_of_choice() -> None:
    equal = 0
    for case, row in zip(recipe.LOSSES, trace("power-of-choice"), strict=True):
        assert row["seed"] == str(case.seed)
        everybody, candidates, losses = np.arange(case.clients), np.sort(case.candidates()), case.losses()
        selector = PowerOfChoice(
            clients_per_round=recipe.POWER_OF_CHOICE_CHOSEN, candidates=len(candidates), seed=case.seed
        )
        selector.inform(everybody, num_examples=case.sizes())
        asked = selector.probe(candidates)  # nobody else is there yet: so they are the candidates
        assert asked is not None
        assert asked.clients.tolist() == candidates.tolist()
        # everybody's loss is known, as in their code; the candidates alone count
        selector.inform(everybody, loss=losses)
        equal += selector.select(everybody).tolist() == ints(row["chosen"]).tolist()
    print(f"power-of-choice: {equal} of 500 sets equal")
    assert equal == len(recipe.LOSSES) == 500


class Planned:
    """Takes the place of a selector's generator: the authors' number of clients to explore, and its chance of ours."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.permutation = generator.permutation
        self.planned, self.epsilon = 0, 0.0

    def binomial(self, count: int, epsilon: float) -> int:
        self.epsilon = epsilon
        return self.planned


def test_pisces() -> None:
    rows = iter(trace("pisces"))
    equal = exploiting = 0
    for fleet in recipe.PISCES:
        selector = Pisces(clients_per_round=fleet.chosen, staleness_penalty=fleet.beta, seed=fleet.seed)
        selector._generator = generator = Planned(selector._generator)  # type: ignore[assignment]
        selector.inform(np.arange(fleet.clients), num_examples=fleet.sizes())
        for number in range(1, fleet.rounds + 1):
            row = next(rows)
            assert (row["beta"], row["seed"], row["round"]) == (str(fleet.beta), str(fleet.seed), str(number))
            explored, generator.planned = selector._rms_loss >= 0, int(row["planned"])
            ours = selector.select(fleet.present(number))
            exploited, new = ints(row["exploited"]), ints(row["explored"])
            assert generator.epsilon == pytest.approx(float(row["epsilon"]), rel=1e-12)
            # the others are drawn at random on both sides: only their number can be equal
            equal += ours[explored[ours]].tolist() == exploited.tolist() and (~explored[ours]).sum() == new.size
            exploiting += exploited.size > 0
            theirs = np.concatenate([exploited, new])  # both continue with their choice
            losses, staleness = fleet.losses(number), fleet.staleness(number)
            selector.observe(report(theirs, rms_loss=losses[theirs], staleness=staleness[theirs]))
    assert next(rows, None) is None
    print(f"pisces: {equal} of 1200 sets of exploited clients equal")
    assert equal == 1200
    assert exploiting > 1100


def decided_by_ties(distances: Floats, members: Ints) -> bool:
    """Whether some order takes these clients one by one, each among those that leave the least but for a tie."""

    def complete(nearest: Floats, left: frozenset[int]) -> bool:
        if not left:
            return True
        sums = np.minimum(nearest, distances).sum(axis=1)
        sums[[k for k in members if k not in left]] = np.inf
        equal = [k for k in left if sums[k] <= sums.min() * (1.0 + TIE)]
        return any(complete(np.minimum(nearest, distances[k]), left - {k}) for k in equal)

    return complete(np.full(len(distances), np.inf), frozenset(members.tolist()))


def test_divfl() -> None:
    rows = iter(trace("divfl"))
    equal = others = 0
    for fleet in recipe.DIVFL:
        everybody, gradients = np.arange(fleet.clients), fleet.first()
        selector = DivFL(clients_per_round=fleet.chosen, seed=fleet.seed)
        selector.inform(everybody, gradient=gradients)
        for number in range(1, fleet.rounds + 1):
            row = next(rows)
            case = (fleet.kind, fleet.clients, fleet.chosen, fleet.seed, number)
            assert tuple(row.values())[:-1] == tuple(map(str, case))
            ours, theirs = selector.select(everybody), ints(row["chosen"])
            if ours.tolist() == theirs.tolist():
                equal += 1
            else:
                others += 1
                distances = np.linalg.norm(gradients[:, None] - gradients[None], axis=2)
                left, least = (distances[:, members].min(axis=1).sum() for members in (ours, theirs))
                assert abs(left / least - 1.0) <= fleet.chosen * TIE  # a tie may be lost at each step
                assert decided_by_ties(distances, ours)
                assert decided_by_ties(distances, theirs)
            gradients[theirs] = fleet.next(number, gradients[theirs])  # both continue with their choice
            selector.observe(report(theirs, gradient=gradients[theirs]))
    assert next(rows, None) is None
    assert equal + others == 720
    print(f"divfl: {equal} of 720 sets equal, {others} decided by ties")
    assert equal >= 710


def test_the_weights_of_late_updates() -> None:
    """REFL's function."""
    for case, row in zip(recipe.REFL, trace("refl"), strict=True):
        found = importance(case.fresh(), case.late(), case.staleness(), case.scale_coff)
        assert found == pytest.approx(floats(row["weights"]), rel=1e-9)
    assert len(recipe.REFL) == 80
