"""Page of a deployment: which clients cost the rounds, what fails, and whether the run still proceeds.

All figures are those of :class:`~fedsel_flwr.report.page.deployment_tables.Deployment`. Page and terminal show the same
sentences and cells. The other texts of the page are in ``deployment.html``. Ids and problems come from clients. They
are shown as printable text of limited length (:func:`shown_text`), and never as markup.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedsel_flwr.errors import RunError
from fedsel_flwr.report.advice import aligned
from fedsel_flwr.report.page import charts
from fedsel_flwr.report.page.deployment_tables import DEPLOYMENT_PARTS, Deployment, read_deployment
from fedsel_flwr.report.page.document import Chart, Columns, Document, missing_packages, write_page
from fedsel_flwr.report.page.waiting_costs import ClientFigures
from fedsel_flwr.rounds.storage import check_entries

PAGE = "report.html"
"""Name of the page."""
SECTIONS = {"figures": "Figures", "waiting": "Clients", "rounds": "Rounds", "advice": "Advice"}
"""Name of a section -> its heading."""
MOST_CLIENTS = 200
"""Number of clients in the page's table."""
BARS = 20
"""Number of clients in the chart."""
MOST_ROUNDS = 1_000
"""Number of rounds in the chart of the slowest clients."""
TEXT_CLIENTS = 10
"""Number of clients in the text."""
ID_LENGTH, PROBLEM_LENGTH = 48, 100
"""Largest number of characters of an id and of a problem."""
MOST_REASONS = 5
"""Number of reasons of failure in a line."""
PART_NAMES = {"failures": "failures (counted)"}
"""Part of a round -> its name in the text, if it differs."""
CLIENT_HEAD = (
    "client", "slowest in", "beyond median (s)", "beyond second (s)", "mean (s)", "95 % (s)", "failed of selected",
    "selected", "last update", "last reply", "reasons of failure", "last problem",
)  # fmt: skip
CLIENT_NUMBERS = (
    "slowest", "beyond_median_s", "beyond_second_s", "mean_s", "p95_s", "failures", "selections", "share", "last_seen",
    "last_reply", "last_selected", "problem_round",
)  # fmt: skip
"""Figures of a client in the chart's table."""
EXPLANATION = (
    "Slowest in: number of rounds in which the client was the slowest. Beyond median: seconds by which these rounds "
    "would have been shorter if the client had been as fast as the median client. Beyond second: the same for the "
    "second slowest client. Mean, 95 %: mean and 95th percentile of the measured latencies of usable updates. Late "
    "replies and failures are not in these two columns. Failed of selected: number of rounds in which the client "
    "failed, and in which it was selected. Selected: share of the rounds. Last update: the last round with a usable "
    "update. Last reply: the last round with any reply, also a late one or one without a usable update. In "
    "parentheses: how many rounds ago."
)


def report_deployment(folder: Path, out: str | None, *, as_json: bool) -> Path | None:
    """Print a deployment's figures, and write its page.

    Args:
        folder: The deployment's folder.
        out: Folder of the page; None for the deployment's folder.
        as_json: Whether the figures are printed as JSON. Then the page is written only if there is ``out``.

    Returns:
        Folder of the page; None if no page was asked for.

    Raises:
        ParameterError: The journal cannot be read, or has no finished round. Or the folder has a link or a pipe.
        RunError: The page cannot be written.
    """
    check_entries(folder)
    found = read_deployment(folder)
    if as_json:
        print(json.dumps(found.facts(), indent=2, allow_nan=False))
    else:
        text = "\n".join(deployment_lines(found, shutil.get_terminal_size().columns))
        # Ids may hold letters that the terminal cannot show.
        print(text.encode(sys.stdout.encoding or "utf-8", "backslashreplace").decode(sys.stdout.encoding or "utf-8"))
    if as_json and out is None:
        return None
    target = Path(out or folder)
    if not missing_packages():
        try:
            path = write_page(deployment_document(found), target / PAGE)
        except OSError as error:
            raise RunError(
                f"{PAGE} cannot be written to {str(target)!r}: {error.strerror}. Choose another folder with --out DIR"
            ) from error
        if not as_json:
            print(path.resolve())
    return target


def deployment_document(found: Deployment) -> Document:
    """Return the page of a deployment."""
    bars = max(1, min(BARS, sum(one.beyond_median_s > 0 for one in found.clients)))
    present = [part for part, seconds in mean_parts(found) if seconds > 0]
    length = found.parts["round_end"][0] - found.parts["round"][0]
    longest = max(found.slowest["round_s"], default=found.mean_s)
    # A line far above the bars would make them unreadable.
    limit = found.max_latency_s if found.max_latency_s <= 2 * longest else math.nan
    title = "mean seconds per round" if length > 1 else "seconds per round"
    drawn = [
        Chart(name="clients", rows=client_table(found.clients), series="client", spec=charts.cost_chart(bars)),
        Chart(name="durations", rows=found.parts, spec=charts.duration_chart(present, title, limit)),
    ]
    if found.slowest["round"]:
        drawn.append(Chart(name="slowest", rows=_slowest(found.slowest), spec=charts.slowest_chart(longest, limit)))
    if found.failures["reason"]:
        spec = charts.failure_chart(found.last_round, whole=length == 1)
        drawn.append(Chart(name="failures", rows=found.failures, series="reason", spec=spec))
    if any(map(math.isfinite, found.accuracy["accuracy"])):
        drawn.append(Chart(name="accuracy", rows=found.accuracy, spec=charts.evaluation_chart()))
    status, advice = status_sentence(found), found.advice.lines() if found.advice else ()
    as_of = (
        f"As of {as_of_text(found)}. The page was written at {found.read:%Y-%m-%d %H:%M:%S} UTC, and does not change "
        "by itself. For newer rounds, run fedsel report again."
    )
    facts = {
        "found": found, "figures": figure_rows(found), "bars": bars, "client_head": CLIENT_HEAD,
        "clients": [client_cells(one, found.last_round) for one in found.clients[:MOST_CLIENTS]],
        "explanation": EXPLANATION, "most_rounds": MOST_ROUNDS, "advice": advice_sentences(found),
        "grouped": f", in groups of {length:,} rounds" if length > 1 else "",
        "means": [part for part in present if part in DEPLOYMENT_PARTS[:5]] or ["latency"],
        "advice_output": "\n".join(shown_text(line, 500) for line in advice),
        "refusal": shown_text(found.refusal, 500),
    }  # fmt: skip
    return Document(
        title=f"Deployment {shown_text(Path(found.folder).resolve().name, ID_LENGTH)}", charts=drawn, facts=facts,
        lead=[f"{status[:1].upper()}{status[1:]}.", as_of], template="deployment.html", sections=SECTIONS,
    )  # fmt: skip


def client_table(clients: Sequence[ClientFigures]) -> Columns:
    """Return all clients as a table of the page, the costliest first."""
    labels, seen = list[str](), set[str]()
    for place, one in enumerate(clients, start=1):
        label = shown_text(one.client_id, ID_LENGTH)
        # Two long ids may look alike after the cut.
        labels.append(f"{label} ({place})" if label in seen else label)
        seen.add(label)
    return {
        "place": np.arange(1, len(clients) + 1),
        "client": labels,
        # An unknown round is None, which becomes NaN.
        **{name: np.array([getattr(one, name) for one in clients], dtype=np.float64) for name in CLIENT_NUMBERS},
        "reasons": [count_text(one.reasons) for one in clients],
        "problem": [shown_text(one.problem, PROBLEM_LENGTH) for one in clients],
    }


def _slowest(columns: Columns) -> Columns:
    """Return the newest rounds, with texts that can be shown."""
    newest = {name: values[:MOST_ROUNDS] for name, values in columns.items()}
    for name, most in (("client", 2 * ID_LENGTH), ("problem", PROBLEM_LENGTH)):
        newest[name] = [shown_text(text, most) for text in newest[name]]
    return newest


def shown_text(text: str, most: int) -> str:
    r"""Return a text from outside as printable characters, cut in the middle if it is long.

    >>> shown_text("two\nlines", 48), shown_text("0123456789" * 3, 16)
    ('two\\nlines', '012345678...6789')
    """
    start, end = (_printable(part) for part in (text[:most], text[most:][-most:]))
    if len(text) <= 2 * most and len(start + end) <= most:
        return start + end
    return f"{start[: most - most // 4 - 3]}...{(start + end)[-(most // 4) :]}"


def _printable(text: str) -> str:
    """Escape all characters that change a terminal, or the direction of writing."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def figure_rows(found: Deployment) -> list[tuple[str, str]]:
    """Return the figures of the whole deployment, each with its name."""
    waiting, point, failed = found.waiting, found.checkpoint, sum(found.reasons.values())
    is_counted, spares = found.counted_s > 0, f", {found.spares:,} spares" if found.spares else ""
    slow = f"{_s(found.p95_s)}{' = max_latency' * (found.p95_s == found.max_latency_s)}"
    (first, last), measured = map(_s, found.quarters_s), " and ".join(map(_s, found.quarters_measured_s))
    longest = f" ({found.max_latency_s:g} s)" if found.max_latency_s > 0 else ""
    later = f" ({_count(found.last_round - point.round, 'round')} before the last one)" if point else ""
    # Whether a figure is shown, its name, and its text.
    rows = [
        (True, "status", status_sentence(found)),
        (True, "as of", as_of_text(found, "; ")),
        (True, "settings", settings_text(found)),
        (True, "rounds", f"{found.rounds:,} rounds: median {_s(found.median_s)}, mean {_s(found.mean_s)}, 95 % take at "
         f"most {slow}; {_s(found.seconds)} in total"),
        (is_counted, "measured", f"{_s(found.mean_s - found.counted_s)} of the mean {_s(found.mean_s)} are measured, "
         f"up to the slowest usable update. {_s(found.counted_s)} are counted, because a failed client counts with "
         "max_latency; the real wait may have been shorter"),
        (math.isfinite(found.quarters_s[0]), "trend", f"mean round: {first} in the first quarter of the rounds, {last} "
         "in the last" + f" (only measured: {measured})" * is_counted),
        (True, "clients", f"{len(found.clients):,} clients were selected, {found.selections / found.rounds:.1f} per "
         "round"),
        (True, "updates", f"{found.updates:,} usable updates, {_count(failed, 'failure')}{_reasons(found)}{spares}"),
        (math.isfinite(found.staleness), "staleness",
         f"buffered rounds: an update is {found.staleness:.2f} steps old on average"),
        *((True, "remark", f"{remark.partition(': ')[2]} ({rounds:,} of {found.rounds:,} rounds)")
          for remark, rounds in found.remarks.items()),
        (found.late, "late updates", f"{found.late:,} counted in later rounds"),
        *((True, f"round {number:,}", shown_text(note, 3 * PROBLEM_LENGTH)) for number, note in found.notes.items()),
        (True, "newest checkpoint", f"after round {point.round}{later * (point.round < found.last_round)}, written "
         f"{_ago(point.age_s)} before this report" if point else "none in this folder"),
        (True, "accuracy", _accuracy(found)),
        (True, "waiting", f"the slowest client costs {_s(waiting.beyond_median_s)} per round beyond the median client "
         f"({_percent(waiting.share)} of all seconds), and {_s(waiting.beyond_second_s)} beyond the second slowest"
         if waiting.rounds else "no round waited for two clients or more, so waiting has no cost"),
        (waiting.rounds, "failed and slowest", f"a failed client was the slowest in {waiting.slowest_failed:,} of "
         f"{waiting.rounds:,} rounds; a failed client counts with max_latency{longest}"),
    ]  # fmt: skip
    return [(name, text) for is_shown, name, text in rows if is_shown]


def status_sentence(found: Deployment) -> str:
    """Return whether the run is running, finished or stalled."""
    one, total = found.status, found.settings.total_rounds
    rounds = f"{found.last_round:,} of {total:,} rounds" if total else f"{found.last_round:,} rounds"
    ago, usual = _ago(one.since_s), f"a round usually takes {_ago(one.usual_s)}"
    if one.word == "finished":
        return f"finished: {rounds}. The last round ended {ago} before this report"
    if one.word == "running":
        return f"running: {rounds}. The last round ended {ago} before this report, and {usual}"
    if one.word == "no new round":
        return f"no new round for {ago}, although {usual}: the run has ended, or it is stalled; {rounds}"
    return f"{rounds}. The last round ended {ago} before this report. Whether the run still proceeds is unknown"


def settings_text(found: Deployment) -> str:
    """Return the selector in use, the clients per round and max_latency."""
    one = found.settings
    name = shown_text(one.selector, ID_LENGTH) if one.selector else "unknown selector (there is no checkpoint)"
    mean = f"{found.selections / found.rounds:.1f}"
    clients = mean if one.clients_per_round is None else f"{one.clients_per_round:,}"
    limit = f"{found.max_latency_s:g} s" if math.isfinite(found.max_latency_s) else "unknown"
    clock = {"server": ", durations measured by the server", "virtual": ", durations as the clients report them"}
    return f"{name}, {clients} clients per round, max_latency {limit}{clock.get(one.clock, '')}"


def deployment_lines(found: Deployment, columns: int = 80) -> list[str]:
    """Return the figures as lines for a terminal.

    Args:
        found: The figures.
        columns: Number of columns of the terminal.
    """
    rows = figure_rows(found)
    parts = [f"{PART_NAMES.get(name, name)} {_s(seconds)}" for name, seconds in mean_parts(found)]
    width = max(len(name) for name, _ in rows)
    lines = [f"deployment in {shown_text(found.folder, 200)}", ""]
    lines += [*(f"{name:{width}}  {text}" for name, text in (*rows, ("mean round", ", ".join(parts)))), ""]
    shown = found.clients[:TEXT_CLIENTS]
    lines += aligned([CLIENT_HEAD, *(client_cells(one, found.last_round, 32, 60) for one in shown)])
    if len(found.clients) > len(shown):
        lines.append(f"The {len(shown)} costliest of {len(found.clients):,} clients. --json prints all of them.")
    advice = " ".join(advice_sentences(found)) if found.advice else f"no advice: {found.refusal}"
    lines += [*textwrap.wrap(EXPLANATION, max(40, columns)), "", "fedsel advise:"]
    return lines + textwrap.wrap(shown_text(advice, 3_000), max(40, columns))


def advice_sentences(found: Deployment) -> list[str]:
    """Return the advice with the settings now in use, and with what it is predicted from."""
    one = found.advice
    if one is None:
        return []
    same = " The run already uses this selector." if one.preferred and one.preferred == found.settings.selector else ""
    return [
        f"Now in use: {settings_text(found)}.",
        f"The following is a prediction, no measurement. A model of {one.num_clients:,} clients was fitted to "
        f"{one.measured:,} measured latencies. It selects {one.clients_per_round:,} clients in each of {one.rounds:,} "
        "rounds.",
        one.sentence + same,
    ]


def count_text(reasons: Mapping[str, int]) -> str:
    """Return reasons of failure with their counts, for example "5 model, 1 exception"."""
    return ", ".join(f"{count:,} {reason}" for reason, count in reasons.items())


def _back(number: int | None, last: int) -> str:
    """Return a round with the number of rounds since.

    >>> _back(75, 80), _back(80, 80), _back(None, 80)
    ('75 (5 ago)', '80 (0 ago)', 'never')
    """
    return "never" if number is None else f"{number:,} ({last - number:,} ago)"


def client_cells(
    one: ClientFigures, last: int, id_length: int = ID_LENGTH, problem_length: int = PROBLEM_LENGTH
) -> list[str]:
    """Return the cells of a client, in the order of :data:`CLIENT_HEAD`."""
    reason = f"{one.problem_reason}, " if one.problem_reason and not one.problem.startswith(one.problem_reason) else ""
    problem = f"round {one.problem_round:,}: {reason}{one.problem}" if one.problem_round else ""
    seconds = one.beyond_median_s, one.beyond_second_s, one.mean_s, one.p95_s
    return [
        shown_text(one.client_id, id_length), f"{one.slowest:,}", *(_s(own, "") for own in seconds),
        f"{one.failures:,} of {one.selections:,}", _percent(one.share), _back(one.last_seen, last),
        _back(one.last_reply, last), count_text(one.reasons), shown_text(problem, problem_length),
    ]  # fmt: skip


def mean_parts(found: Deployment) -> list[tuple[str, float]]:
    """Return the parts of a mean round over all rounds; groups count with their number of rounds."""
    weights = np.array(found.parts["round_end"]) - np.array(found.parts["round"])
    names, seconds = np.array(found.parts["part"]), np.array(found.parts["seconds"], dtype=np.float64)
    return [
        (part, float(np.average(seconds[names == part], weights=weights[names == part])))
        for part in DEPLOYMENT_PARTS
        if (names == part).any()
    ]


def _count(number: int, what: str) -> str:
    """Return a number with its noun, for example "1 round" or "2,000 rounds"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _reasons(found: Deployment) -> str:
    named = [f"{count:,} {shown_text(reason, 40)}" for reason, count in found.reasons.items()]
    if len(named) > MOST_REASONS:
        named[MOST_REASONS:] = [f"{sum(list(found.reasons.values())[MOST_REASONS:]):,} other"]
    return f" ({', '.join(named)})" if named else ""


def _accuracy(found: Deployment) -> str:
    pairs = zip(found.accuracy["accuracy"], found.accuracy["round"], strict=True)
    if not (known := [pair for pair in pairs if math.isfinite(pair[0])]):
        return "no round has a central evaluation"
    return "{:.3f} after round {}; the highest is {:.3f} after round {}".format(*known[-1], *max(known))


def as_of_text(found: Deployment, colon: str = ": ") -> str:
    """Return the time of the journal's last change, and its last round."""
    return f"{found.as_of:%Y-%m-%d %H:%M:%S} UTC{colon}round {found.last_round:,} is the last round in the journal"


def _s(seconds: float, unit: str = " s") -> str:
    """Return seconds as text.

    >>> _s(0.25), _s(12.34), _s(1234.5), _s(math.nan)
    ('0.25 s', '12.3 s', '1,234 s', '-')
    """
    if not math.isfinite(seconds):
        return "-"
    return f"{seconds:,.{2 if abs(seconds) < 10 else 1 if abs(seconds) < 1_000 else 0}f}{unit}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if math.isfinite(share) else "-"


def _ago(seconds: float) -> str:
    """Return a duration in its usual unit.

    >>> _ago(5), _ago(600), _ago(9_000), _ago(400_000)
    ('5 s', '10.0 min', '2.5 hours', '4.6 days')
    """
    for unit, length, end in (("s", 1, 120), ("min", 60, 7_200), ("hours", 3_600, 172_800)):
        if seconds < end:
            return f"{seconds / length:.{0 if length == 1 else 1}f} {unit}"
    return f"{seconds / 86_400:.1f} days"
