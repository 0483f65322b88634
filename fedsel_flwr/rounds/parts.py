"""Parts of a run: the owners of its lasting state, which a checkpoint saves."""

from __future__ import annotations

from fedsel_flwr.rounds.cold_starts import ColdStarts
from fedsel_flwr.rounds.eligibility import Busy, Cooldown, NewcomerQuota, Participation
from fedsel_flwr.rounds.history import History
from fedsel_flwr.rounds.measuring import Measurer
from fedsel_flwr.rounds.missing_columns import ColumnWatch
from fedsel_flwr.rounds.registration import Registrar
from fedsel_flwr.rounds.reply_structure import ReplyStructure
from fedsel_flwr.rounds.roll_call import Probing, RollCall
from fedsel_flwr.rounds.roster import ClientValues, Roster
from fedsel_flwr.rounds.round import Reporter
from fedsel_flwr.rounds.settings import Settings
from fedsel_flwr.rounds.state_dicts import Stateful
from fedsel_flwr.selectors import Selector


class Parts:
    """The owners of a run's state; each attribute's name is the key in the checkpoint, in this order.

    Args:
        selector: The selector.
        settings: The resolved options of the strategy.
        roster: Connections, client ids and rows.
        client_values: Selector parameters by client id, bound to ``roster``.
    """

    def __init__(
        self, selector: Selector, settings: Settings, roster: Roster, client_values: tuple[ClientValues, ...]
    ) -> None:
        measurer, watch = Measurer(selector, settings), ColumnWatch(selector, settings)
        self.selector, self.roster = selector, roster
        self.roll_call = RollCall(settings.roll_call_timeout)
        self.registrar = Registrar(selector, settings, roster, measurer, client_values)
        self.probing = Probing(selector, roster, settings, watch)
        self.missing_columns = watch
        self.busy = Busy(settings.busy_timeout)
        self.cooldown = Cooldown(settings.cooldown)
        self.newcomer_quota = NewcomerQuota(roster)
        self.participation = Participation(settings.max_participation)
        self.cold_starts = ColdStarts()
        self.measurer = measurer
        self.reply_structure = ReplyStructure(settings)
        self.reporter = Reporter(selector, roster, settings.max_latency)
        self.history = History()

    @property
    def by_name(self) -> dict[str, Stateful]:
        """Return the parts by name."""
        return vars(self)
