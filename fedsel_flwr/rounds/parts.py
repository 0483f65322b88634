"""Who owns what outlives a round."""

from __future__ import annotations

from typing import NamedTuple

from fedsel_flwr.aggregation.schemes import COUNT_EVERYBODY
from fedsel_flwr.rounds.busy import Busy
from fedsel_flwr.rounds.client_values import ClientValues
from fedsel_flwr.rounds.cooldown import Cooldown
from fedsel_flwr.rounds.enrolment import Enrolment
from fedsel_flwr.rounds.first_times import FirstTimes
from fedsel_flwr.rounds.history import History
from fedsel_flwr.rounds.measuring import Measurer
from fedsel_flwr.rounds.participation import Participation
from fedsel_flwr.rounds.probing import Probing
from fedsel_flwr.rounds.reporting import Reporter
from fedsel_flwr.rounds.rollcall import RollCall
from fedsel_flwr.rounds.roster import Roster
from fedsel_flwr.rounds.settings import Settings
from fedsel_flwr.rounds.trial import Trial
from fedsel_flwr.selectors import Selector


class Parts(NamedTuple):
    """The owners of what outlives a round."""

    selector: Selector
    roster: Roster
    rollcall: RollCall
    enrolment: Enrolment
    probing: Probing
    busy: Busy
    cooldown: Cooldown
    trial: Trial
    participation: Participation
    first_times: FirstTimes
    measurer: Measurer
    reporter: Reporter
    history: History


def make_parts(
    selector: Selector,
    settings: Settings,
    roster: Roster,
    client_values: tuple[ClientValues, ...],
    roll_call_timeout: float,
) -> Parts:
    """The owners of a new run."""
    s = settings
    measurer = Measurer(selector, s.validation, s.filter, s.learning_rate, s.momentum)
    return Parts(
        selector=selector,
        roster=roster,
        rollcall=RollCall(roll_call_timeout),
        enrolment=Enrolment(
            selector, roster, measurer, client_values, s.max_examples, counts_everybody=s.averaging in COUNT_EVERYBODY
        ),
        probing=Probing(selector, roster, settings),
        busy=Busy(settings.busy_timeout),
        cooldown=Cooldown(settings.cooldown),
        trial=Trial(roster),
        participation=Participation(settings.max_participation),
        first_times=FirstTimes(),
        measurer=measurer,
        reporter=Reporter(selector, roster, settings.max_latency),
        history=History(),
    )
