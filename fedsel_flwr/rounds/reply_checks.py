"""Checks of all replies of a round: whether they have one structure, and the columns that the selector reads.

Control variates, packed updates and personal layers have another structure than the model. Without a comparison with
the global model (``compare_models``), all replies of a run must have one structure. This is that of the arrays that
each client received, or another one that most replies of the first round have.

A run ends if no client reports what the selector reads (:class:`ColumnWatch`), because it would learn nothing.
"""

from __future__ import annotations

import difflib
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np

from fedsel_flwr.errors import RunError
from fedsel_flwr.rounds import state_dicts
from fedsel_flwr.rounds.models import Arrays
from fedsel_flwr.rounds.replies import ClientResult, Reply
from fedsel_flwr.rounds.settings import Settings
from fedsel_flwr.rounds.untrusted import one_line
from fedsel_flwr.selectors import Selector
from fedsel_flwr.selectors.columns import ASKED, COLUMNS

logger = logging.getLogger("fedsel_flwr")
Structure = tuple[str, ...]
"""Name, type and shape of each array of a reply, and the names of its records of metrics, in one order."""
STRUCTURAL = ("arrays: expected", "arrays: cannot be decoded", "metrics: expected one MetricRecord")
"""Beginnings of the faults in a reply's structure."""
Asked = Literal["answer to the probe", "reply"]
"""Whether clients answered a probe, or replied after training."""
MAX_KEYS = 20
"""Largest number of arrived metrics that a message names."""
MOD = "add this package's mod to the clients, ClientApp(mods=[telemetry])"
REPORTING = {
    "latency": 'let the clients report the seconds of a round, or set clock="server"',
    **dict.fromkeys(("energy", "energy_score", "compute"), MOD),
    **dict.fromkeys(ASKED, "let the clients answer it (fedsel_flwr.clients.answering does so for torch models)"),
}
"""Column -> how the clients can report it."""


def structure_of(names: Iterable[object], arrays: Arrays, metric_records: Iterable[str] = ()) -> Structure:
    """Return the structure of a reply.

    Args:
        names: The names of its arrays, or their numbers.
        arrays: The arrays.
        metric_records: The names of its records of metrics.

    >>> structure_of(["bias"], [np.zeros(2)], ["train"])
    ('bias: float64 (2,)', 'train: MetricRecord')
    """
    texts = [f"{name}: {array.dtype} {array.shape}" for name, array in zip(names, arrays, strict=True)]
    # Sorted, because clients may send their arrays in any order.
    return tuple(sorted([*texts, *(f"{name}: MetricRecord" for name in metric_records)]))


class ReplyStructure(state_dicts.SavedFields):
    """The structure of a run's replies: that of the arrays sent, or another one that its first round fixes.

    Args:
        settings: Whether replies are held against the global model, and the names of what requires that.

    Attributes:
        decided: Whether a round has aggregated replies, so that the structure cannot change any more.
    """

    saved: ClassVar = {
        "decided": state_dicts.flag,
        "_structure": state_dicts.optional(lambda name, value: tuple(state_dicts.texts(name, value))),
    }

    def __init__(self, settings: Settings) -> None:
        self._settings, self.decided = settings, False
        self._structure: Structure | None = None

    def expected(self, replies: Iterable[Reply], model: Arrays) -> Structure | None:
        """Return the structure that the replies of a round must have; None for that of the arrays sent to each client.

        Args:
            replies: The replies of the round that have no other fault.
            model: The global model.
        """
        if self.decided:
            return self._structure
        decoded = [reply for reply in replies if reply.arrays is not None]
        if any(_is_as_sent(reply, model) for reply in decoded):
            return None
        structures = Counter(map(_structure, decoded))
        usual, count = structures.most_common(1)[0] if structures else ((), 0)
        # A single reply shows nothing about the others.
        return usual if count > max(1, structures.total() / 2) else None

    def decide(self, expected: Structure | None) -> None:
        """Keep the structure of the first round that aggregates."""
        if not self.decided:
            self.decided, self._structure = True, expected

    def check_any_usable(self, results: Mapping[str, ClientResult], number: int) -> None:
        """End a run whose first replies all fail for the same reason in their structure.

        Args:
            results: Connection -> its reply after reading.
            number: The absolute round.

        Raises:
            RunError: No reply is usable, and none would be usable in later rounds.
        """
        problems = [result.problems[0] for result in results.values() if result.problems and not result.completed]
        reasons = [problem for problem in problems if problem.startswith(STRUCTURAL)]
        # A reply that is only late has no such fault. One of several clients may be broken, and must not end the run.
        fitting = any(result.completed or result.num_examples for result in results.values())
        same = len({reason.partition(", got")[0] for reason in reasons}) == 1
        if self.decided or fitting or not same or len(reasons) < min(2, len(results)):
            return
        cure = "If the base aggregates such updates, set compare_models=False"
        if reader := self._settings.update_reader:
            cure = f"{reader} needs updates like that model. Do without it, and set compare_models=False"
        elif not self._settings.compare_models:
            cure = "Without compare_models, more than half of at least two updates must be alike. Select more clients"
        raise RunError(
            f"round {number}: no update has the structure of the global model, all for one reason: {reasons[0]}. {cure}"
        )


def with_fault(reply: Reply, expected: Structure | None) -> Reply:
    """Return a reply, with an error if its structure is not the expected one, or if a float is not finite there.

    Args:
        reply: The reply.
        expected: The structure that it must have; None for that of the arrays that were sent to the client. Only the
            names are then compared here.
    """
    fault = reply.error or (reply.misfit if expected is None else "")
    if not fault and expected is not None:
        fault = "arrays: cannot be decoded" if reply.arrays is None else ""
        if not fault and (got := _structure(reply)) != expected:
            missing = next((text for text in expected if text not in got), "no further array")
            surplus = next((text for text in got if text not in expected), "none")
            fault = f"arrays: expected {missing} as in the first round, got {surplus}"
        bad = [i for i, a in enumerate(reply.arrays or ()) if a.dtype.kind in "fc" and not np.isfinite(a).all()]
        fault = fault or (f"arrays: not finite at {bad[0]}" if bad else "")
    return replace(reply, error=fault)


def _structure(reply: Reply) -> Structure:
    arrays = reply.arrays or ()
    return structure_of(range(len(arrays)), arrays) if reply.structure is None else reply.structure


def _is_as_sent(reply: Reply, model: Arrays) -> bool:
    """Return whether a reply has the names, types and shapes of the arrays that its client received."""
    own, sent = ([(a.dtype, a.shape) for a in arrays] for arrays in (reply.arrays or (), reply.sent or model))
    return not reply.misfit and own == sent


class ColumnWatch(state_dicts.SavedFields):
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

    saved: ClassVar = {"_reported": state_dicts.texts, "_lacked": state_dicts.texts}

    def __init__(self, selector: Selector, settings: Settings) -> None:
        self._selector, self._keys = selector, settings.keys
        self._goes_on = settings.missing_columns == "random"
        # The number of examples comes with every usable update. On the server's clock no client needs to be believed.
        reported = {name for name in selector.needs if COLUMNS[name].source == "reply"} - {"num_examples"}
        virtual = {"latency"} if settings.clock == "virtual" else set[str]()
        self._read, self._in_replies = reported | (virtual & selector.needs), reported | virtual
        self.needed = self._read & (selector.requires | ASKED | virtual)
        # Columns that some client has reported, and question with column of those that all last replies lacked.
        self._reported, self._lacked = list[str](), list[str]()

    def check(
        self, round: int, answers: Sequence[Mapping[str, object]],
        probed: Collection[str] | None = None, errors: Sequence[str] = (),
    ) -> frozenset[str]:  # fmt: skip
        """Check the metrics of a round's usable replies, or of answers to a probe, and return what none of them has.

        Args:
            round: The absolute round.
            answers: The metrics of each usable reply, or of each client that answered.
            probed: The columns that the probe asked for; None for replies.
            errors: The reasons of the clients whose app answered a probe with an error.

        Raises:
            RunError: No client has ever reported one of the columns that the selector reads, or that the probe asked
                for.
        """
        if not answers and not errors:
            return frozenset()
        asked: Asked = "reply" if probed is None else "answer to the probe"
        columns, needed = (self._in_replies, self.needed) if probed is None else (probed, probed)
        lacking = sorted(name for name in columns if not any(self._has(asked, name, one) for one in answers))
        self._reported = sorted({*self._reported, *columns}.difference({*lacking} - {*self._reported}))
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
                self._lacked.remove(key)
            elif name in lacking and key not in self._lacked:
                read = name in self._read or name in needed
                effect = f"{name_of} chooses without it" if read else "Each client counts with max_latency"
                logger.warning("round %d: %s%s. %s", round, self._problem(asked, [name], arrived), why, effect)
                self._lacked.append(key)
        return frozenset(lacking)

    def remark(self, probed: Collection[str], replied: Collection[str]) -> str:
        """Return the remark of a round on the columns that all answers and all replies lacked; empty if none."""
        names = sorted({*probed, *(self._read & {*replied})})
        return f"missing_columns: no client reported {', '.join(names)}" if names else ""

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
