"""Options that contradict each other, or the selector: each is refused with what to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from fedsel_flwr.errors import ParameterError
from fedsel_flwr.rounds.untrusted import to_float
from fedsel_flwr.selectors import Selector

if TYPE_CHECKING:
    from fedsel_flwr.rounds.settings import Options

Number = TypeVar("Number", int, float)


def check_buffered(selector: Selector, given: Options) -> None:
    """Refuse options of buffered rounds without these rounds, and with them what assumes rounds that wait."""
    if given.concurrency is None:
        if given.buffer is not None:
            raise ParameterError("buffer is for buffered rounds. Set concurrency too, or leave it out")
        if given.max_staleness is not None and given.late == "drop":
            raise ParameterError(
                "max_staleness is for buffered rounds and late updates. Set concurrency or late too, or leave it out"
            )
        if given.weighting != "examples":
            raise ParameterError("weighting is for buffered rounds. Set concurrency too, or use averaging = 'mean'")
        return
    m, number = selector.clients_per_round, given.concurrency
    if not selector.buffers or m is None:
        raise ParameterError(
            f"{selector.name} needs rounds that wait for all clients. Leave concurrency out, or use another selector"
        )
    if given.buffer not in (None, m):
        raise ParameterError(f"buffer = {given.buffer} must be clients_per_round = {m}. Leave buffer out")
    if number % m:
        raise ParameterError(f"concurrency = {number} must be a multiple of the {m} clients_per_round")
    if given.channels is not None and given.channels < number:
        raise ParameterError(f"channels = {given.channels} is below concurrency = {number}. Leave channels out")
    for name in ("warmup_rounds", "over_selection", "wait_for", "round_deadline_s", "late"):
        if getattr(given, name) not in (None, 0, "drop"):
            raise ParameterError(f"{name} belongs to rounds that wait for their clients. Leave it or concurrency out")
    if given.compare_models is False:
        raise ParameterError("concurrency compares updates with the model that was sent. Leave compare_models out")
    if given.weighting == "uniform" and given.averaging not in (None, "mean"):
        raise ParameterError(f"weighting = 'uniform' contradicts averaging = {given.averaging!r}. Set one of them")


def check_wait_for(given: Options, clients_per_round: int | None) -> None:
    """Refuse a number of replies that no round can have, or that contradicts another option."""
    if (wanted := given.wait_for) is None:
        return
    if given.over_selection:
        raise ParameterError("wait_for and over_selection both say when a round ends. Leave one of them out")
    for name, low, high in (
        ("clients_per_round", wanted, clients_per_round or wanted), ("min_completed", given.min_completed, wanted),
    ):  # fmt: skip
        if low > high:
            raise ParameterError(f"wait_for = {wanted} does not fit {name} = {getattr(given, name, high)}. Change one")


def check_late(selector: Selector, given: Options, payload: str) -> None:
    """Refuse late updates in rounds that wait for all, and where each update is judged in its own round."""
    if given.late == "drop":
        if given.late_scale_coff != 1.0:
            raise ParameterError("late_scale_coff is for late updates. Set late = 'use' too, or leave it out")
        return
    if given.round_deadline_s is None and given.wait_for is None and not given.over_selection:
        raise ParameterError(
            f"late = {given.late!r} needs rounds that end early. Set round_deadline_s, wait_for or over_selection too"
        )
    if given.late != "use" and given.late_scale_coff != 1.0:
        raise ParameterError("late_scale_coff is for late = 'use'. Use that, or leave it out")
    scheme = given.averaging or selector.paper_options.get("averaging", "mean")
    if given.filter is not None or "filter" in selector.paper_options or scheme not in ("mean", "fedpdp"):
        raise ParameterError(
            f"late = {given.late!r} adds updates to a plain mean, which FedCA's filter and averaging = {scheme!r} are "
            "not. Leave late out, or use averaging = 'mean' without a filter"
        )
    if payload != "model" or given.compare_models is False:
        raise ParameterError(
            f"late = {given.late!r} moves updates to the current model, so that clients must return the model that "
            "they got. Leave late out, or use a base that averages models, and no compare_models = False"
        )


def check_keep_arrivals(given: Options) -> None:
    """Refuse to keep replies where a restarted server could not use them."""
    wanted = given.checkpoint_dir is not None and given.clock == "server" and given.concurrency is None
    if given.keep_arrivals and not (wanted and given.checkpoint_every == 1):
        raise ParameterError(
            "keep_arrivals needs checkpoint_dir, checkpoint_every = 1, clock = 'server' and no concurrency. Set these"
        )


def set_once(name: str, given: Number | None, own: Number | None) -> Number | None:
    """Return a number that the strategy or its selector may set; refuse two different ones."""
    if given is not None and own is not None and own != given:
        raise ParameterError(f"{name} is {given} for the strategy but {own} for the selector. Set it only once")
    return own if given is None else given


def check_warmup(selector: Selector, rounds: int) -> None:
    """Refuse a warm-up as long as the run, if the selector knows the length of the run."""
    total = to_float(getattr(selector, "total_rounds", None))
    if rounds and total is not None and rounds >= total:
        raise ParameterError(
            f"warmup_rounds = {rounds} leaves {selector.name} no round of total_rounds = {total:g}. Lower the first"
        )


def check_fairness(selector: Selector, max_participation: float | None) -> None:
    """Refuse a ``max_participation`` below a share that the selector guarantees to a client."""
    fairness = getattr(selector, "fairness", None)
    # ClientValues show only registered clients; ``given`` also has clients that will join later.
    shares = getattr(fairness, "given", fairness)
    if max_participation is None or not isinstance(shares, Mapping) or not shares:
        return
    client, share = max(shares.items(), key=lambda item: item[1])
    if share > max_participation:
        raise ParameterError(
            f"max_participation = {max_participation:g} is below the fairness {share:g} of client {client}. Raise it"
        )
