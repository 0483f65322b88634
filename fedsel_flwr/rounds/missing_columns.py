"""Missing columns: ends a run in which no client reports what the selector reads, so that it would learn nothing."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.settings import Settings
from fedsel_flwr.rounds.untrusted import one_line
from fedsel_flwr.selectors import Selector
from fedsel_flwr.selectors.columns import ASKED, COLUMNS

logger = logging.getLogger("fedsel_flwr")
Asked = Literal["answer to the probe", "reply"]
"""Whether clients answered a probe, or replied after training."""
MAX_KEYS = 20
"""Largest number of arrived metrics that a message names."""
ALL_REPORTED: state_dicts.State = {"reported": sorted(COLUMNS), "lacked": []}
"""The state of a run in which clients have reported every column."""
MOD = "add this package's mod to the clients, ClientApp(mods=[telemetry])"
REPORTING = {
    "latency": 'let the clients report the seconds of a round, or set clock="server"',
    **dict.fromkeys(("energy", "energy_score", "compute"), MOD),
    **dict.fromkeys(ASKED, "let the clients answer it (fedsel_flwr.clients.answering does so for torch models)"),
}
"""Column -> how the clients can report it."""


class ColumnWatch(state_dicts.NotByClient):
    """Checks after every probe and every round that some client has reported the columns that the selector reads.

    A column counts as reported if a usable reply has its key, even if the value cannot be used. The run ends if no
    client has reported a column by the first round with usable replies, or by the first probe with answers. This
    concerns the columns that the selector requires or asks for, and the latency on the virtual clock. With
    ``missing_columns="random"`` the run continues. For every column, the log has one line when all replies lack it, and
    one line when it arrives again.

    Args:
        selector: The selector. Its ``needs`` name the columns that it reads.
        settings: The names of the metrics, the clock and ``missing_columns``.

    Attributes:
        needed: Columns of replies without which a run ends.
    """

    def __init__(self, selector: Selector, settings: Settings) -> None:
        self._selector, self._keys = selector, settings.keys
        self._goes_on = settings.missing_columns == "random"
        # The number of examples comes with every usable update. On the server's clock no client needs to be believed.
        reported = {name for name in selector.needs if COLUMNS[name].source == "reply"} - {"num_examples"}
        virtual = {"latency"} if settings.clock == "virtual" else set[str]()
        self._read, self._in_replies = reported | (virtual & selector.needs), reported | virtual
        self.needed = self._read & (selector.requires | ASKED | virtual)
        # Columns that some client has reported, and question with column of those that all last replies lacked.
        self._reported, self._lacked = set[str](), set[str]()

    def check_replies(self, round: int, replies: Sequence[Mapping[str, object]]) -> frozenset[str]:
        """Check the metrics of a round's usable replies, and return the columns that none of them has.

        Raises:
            RunError: No client has ever reported one of the columns that the selector reads.
        """
        return self._check("reply", round, self._in_replies, self.needed, replies)

    def check_answers(
        self, round: int, columns: Collection[str], answers: Sequence[Mapping[str, object]], errors: Sequence[str]
    ) -> frozenset[str]:
        """Check the answers to a probe, and return the columns that none of them has.

        Args:
            round: The round about to be chosen.
            columns: The columns that the probe asked for.
            answers: The metrics of each client that answered.
            errors: The reasons of the clients whose app answered with an error.

        Raises:
            RunError: No client has ever reported one of these columns.
        """
        return self._check("answer to the probe", round, columns, columns, answers, errors)

    def remark(self, probed: Collection[str], replied: Collection[str]) -> str:
        """Return the remark of a round on the columns that all answers and all replies lacked; empty if none."""
        names = sorted({*probed, *(self._read & {*replied})})
        return f"missing_columns: no client reported {', '.join(names)}" if names else ""

    def state_dict(self) -> state_dicts.State:
        """Return the columns that clients have reported, and those that the last replies lacked."""
        return {"reported": sorted(self._reported), "lacked": sorted(self._lacked)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state; nothing changes if it does not fit."""
        state_dicts.expect_keys(state, self.state_dict())
        reported, lacked = (set(state_dicts.texts(key, state[key])) for key in ("reported", "lacked"))
        self._reported, self._lacked = reported, lacked

    def _check(
        self, asked: Asked, round: int, columns: Collection[str], needed: Collection[str],
        answers: Sequence[Mapping[str, object]], errors: Sequence[str] = (),
    ) -> frozenset[str]:  # fmt: skip
        if not answers and not errors:
            return frozenset()
        lacking = sorted(name for name in columns if not any(self._has(asked, name, one) for one in answers))
        self._reported |= {*columns} - {*lacking}
        arrived = sorted({str(key) for one in answers for key in one}) if lacking else []
        why = f". {len(errors)} clients answered with an error (probe: {errors[0]})" if errors else ""
        never = [name for name in lacking if name in needed and name not in self._reported]
        if never and not self._goes_on:
            what = f"{self._problem(asked, never, arrived)}{why}"
            raise RunError(f"round {round}: {what}. {self._remedies(never, arrived, errors)}")
        name_of = self._selector.name
        for name in sorted(columns):
            if (key := f"{asked}: {name}") in self._lacked and name not in lacking:
                logger.warning("round %d: clients report %s again", round, name)
                self._lacked.discard(key)
            elif name in lacking and key not in self._lacked:
                read = name in self._read or name in needed
                effect = f"{name_of} chooses without it" if read else "Each client counts with max_latency"
                logger.warning("round %d: %s%s. %s", round, self._problem(asked, [name], arrived), why, effect)
                self._lacked.add(key)
        return frozenset(lacking)

    def _has(self, asked: Asked, name: str, metrics: Mapping[str, object]) -> bool:
        # The same substitutes as in probes and reports: Flower's own name, and scores from joules.
        substitute = {"energy_score": self._keys.of("energy")}
        if asked != "reply":
            substitute["local_accuracy"] = "accuracy"
        return self._keys.of(name) in metrics or substitute.get(name) in metrics

    def _problem(self, asked: Asked, names: Sequence[str], arrived: Sequence[str]) -> str:
        wanted = " and ".join(f"{name} (metric {self._keys.of(name)!r})" for name in names)
        reader = "" if {*names} == {"latency"} - self._read else f", which {self._selector.name} reads"
        shown = ", ".join(one_line(key)[:40] for key in arrived[:MAX_KEYS]) or "none"
        more = f" and {len(arrived) - MAX_KEYS} more" if len(arrived) > MAX_KEYS else ""
        return f"no {asked} has {wanted}{reader}. Metrics that arrived: {shown}{more}"

    def _remedies(self, names: Sequence[str], arrived: Sequence[str], errors: Sequence[str]) -> str:
        likely = {name: found for name in names if (found := likely_key(name, self._keys.of(name), arrived))}
        named = ", ".join(f"{name}={found!r}" for name, found in likely.items()) or f"{names[0]}=..."
        report = dict.fromkeys(REPORTING.get(name, f"let the clients report {name}") for name in names)
        case = "one of these is meant" if arrived else "it has another name"
        return (
            f"{'Correct this error. ' if errors else ''}If {case}, set metric_keys=MetricKeys({named}). Else "
            f'{", and ".join(report)}. Or use another selector, such as random. With missing_columns="random", '
            f"{self._selector.name} chooses without it"
        )


def likely_key(column: str, key: str, arrived: Sequence[str]) -> str:
    """Return the arrived metric that is most likely the column; empty if none is likely.

    >>> likely_key("rms_loss", "rms_loss", ["eval_acc", "eval_loss", "num-examples"])
    'eval_loss'
    >>> likely_key("latency", "latency_s", ["acc"])
    ''
    """
    known = [alias for alias in COLUMNS[column].aliases if alias in arrived]
    return next(iter([*known, *difflib.get_close_matches(key, arrived, n=1)]), "")
