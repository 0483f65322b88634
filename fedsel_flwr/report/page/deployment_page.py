"""Page and text of a deployment: which clients cost the rounds, what fails, and whether the run still proceeds.

All figures are those of :class:`~fedsel_flwr.report.page.deployment_tables.Deployment`. Ids and problems come from
clients. They are shown as printable text of limited length (:func:`shown_text`), and never as markup.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedsel_flwr.errors import RunError
from fedsel_flwr.report.page import charts
from fedsel_flwr.report.page.deployment_tables import (
    DEPLOYMENT_PARTS,
    ClientFigures,
    Deployment,
    read_deployment,
)
from fedsel_flwr.report.page.document import (
    Chart,
    Code,
    Columns,
    Document,
    Grid,
    Section,
    missing_packages,
    write_page,
)

PAGE = "report.html"
"""Name of the page."""
ID_LENGTH, PROBLEM_LENGTH = 48, 100
"""Largest number of characters of an id and of a problem."""
MOST_CLIENTS = 200
"""Number of clients in the page's table."""
BARS = 20
"""Number of clients in the chart."""
MOST_ROUNDS = 1_000
"""Number of rounds in the chart of the slowest clients."""
TEXT_CLIENTS = 10
"""Number of clients in the text."""
MOST_REASONS = 5
"""Number of reasons of failure in a line."""
JOURNAL_NOTE = "round {:,} is the last round in the journal"
CLIENT_HEAD = (
    "client", "slowest in", "beyond median (s)", "beyond second (s)", "mean (s)", "95 % (s)", "failures", "selected",
    "last seen", "last problem",
)  # fmt: skip
EXPLANATION = (
    "Slowest in: number of rounds in which the client was the slowest. Beyond median: seconds by which these rounds "
    "would have been shorter if the client had been as fast as the median client. Beyond second: the same for the "
    "second slowest client. Mean, 95 %: mean and 95th percentile of the measured latencies of usable updates. "
    "Selected: share of the rounds. Last seen: the last round with a usable update."
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
        ParameterError: The journal cannot be read, or has no finished round.
        RunError: The page cannot be written.
    """
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
    waiting, failed = found.waiting, sum(found.reasons.values())
    rows = [
        ("as of", f"{_time(found)}, {_ago((found.read - found.as_of).total_seconds())} before this report; "
                  f"{JOURNAL_NOTE.format(found.last_round)}"),
        ("rounds", f"{found.rounds:,} rounds of {_s(found.mean_s)} on average (95 % take at most {_s(found.p95_s)}), "
                   f"{_s(found.seconds)} in total"),
        ("clients", f"{len(found.clients):,} clients were selected, {found.selections / found.rounds:.1f} per round"),
        ("updates", f"{found.updates:,} usable updates, {failed:,} failure{'' if failed == 1 else 's'}{_reasons(found)}"
                    + (f", {found.spares:,} spares" if found.spares else "")),
    ]  # fmt: skip
    if found.checkpoint:
        one = found.checkpoint
        behind = found.last_round - one.round
        later = f" ({behind:,} round{'' if behind == 1 else 's'} before the last one)" if behind > 0 else ""
        rows.append(
            ("newest checkpoint", f"after round {one.round}{later}, written {_ago(one.age_s)} before this report")
        )
    else:
        rows.append(("newest checkpoint", "none in this folder"))
    rows.append(("accuracy", _accuracy(found)))
    if waiting.rounds:
        rows += [
            ("waiting", f"the slowest client costs {_s(waiting.beyond_median_s)} per round beyond the median client "
                        f"({_percent(waiting.share)} of all seconds), and {_s(waiting.beyond_second_s)} beyond the "
                        "second slowest"),
            ("failed and slowest", f"a failed client was the slowest in {waiting.slowest_failed:,} of "
                                   f"{waiting.rounds:,} rounds; a failed client counts with max_latency"
                                   + (f" ({found.max_latency_s:g} s)" if found.max_latency_s > 0 else "")),
        ]  # fmt: skip
    else:
        rows.append(("waiting", "no round waited for two clients or more, so waiting has no cost"))
    return rows


def deployment_lines(found: Deployment, columns: int = 80) -> list[str]:
    """Return the figures as lines for a terminal.

    Args:
        found: The figures.
        columns: Number of columns of the terminal.
    """
    rows = figure_rows(found)
    width = max(len(name) for name, _ in rows)
    lines = [f"deployment in {shown_text(found.folder, 200)}", ""]
    lines += [f"{name:{width}}  {text}" for name, text in rows]
    parts = _mean_parts(found)
    lines += [f"{'mean round':{width}}  " + ", ".join(f"{name} {_s(seconds)}" for name, seconds in parts), ""]
    shown = found.clients[:TEXT_CLIENTS]
    cells = [list(CLIENT_HEAD), *(_client_cells(one, 32, 60) for one in shown)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines += ["  ".join(cell.ljust(own) for cell, own in zip(row, widths, strict=True)).rstrip() for row in cells]
    if len(found.clients) > len(shown):
        lines.append(f"The {len(shown)} costliest of {len(found.clients):,} clients. --json prints all of them.")
    advice = found.advice.sentence if found.advice else f"no advice: {found.refusal}"
    lines += [*textwrap.wrap(EXPLANATION, max(40, columns)), "", "fedsel advise:"]
    return lines + textwrap.wrap(shown_text(advice, 2_000), max(40, columns))


def deployment_document(found: Deployment) -> Document:
    """Return the page of a deployment."""
    tables: dict[str, Columns] = {"durations": found.parts, "clients": client_table(found.clients)}
    shown = min(MOST_CLIENTS, len(found.clients))
    bars = max(1, min(BARS, sum(one.beyond_median_s > 0 for one in found.clients)))
    table_title = f"The {shown:,} costliest of {len(found.clients):,} clients"
    if shown == len(found.clients):
        table_title = f"All {shown:,} clients, the costliest first"
    waiting: list[str | Chart | Grid | Code] = [
        Chart(
            name="clients",
            title="Seconds that waiting for a client cost",
            text=f"The {bars} costliest clients: the seconds beyond the median client, in all rounds in which the "
            "client was the slowest. Equally slow clients share the seconds. The CSV has all clients.",
            table="clients",
            spec=charts.cost_chart(bars),
        ),
        Grid(
            title=table_title,
            head=CLIENT_HEAD,
            rows=[_client_cells(one, ID_LENGTH, PROBLEM_LENGTH) for one in found.clients[:shown]],
        ),
        EXPLANATION,
    ]
    present = [part for part, seconds in _mean_parts(found) if seconds > 0]
    means = [part for part in present if part in DEPLOYMENT_PARTS[:5]] or ["latency"]
    rounds: list[str | Chart | Grid | Code] = [
        Chart(
            name="durations",
            title="Duration of the rounds",
            text=f"Mean seconds of a round{_grouped(found)}. {', '.join(means).capitalize()}: means over the usable "
            "updates. Failures: the round waits for failed clients alone. Waiting is the rest of the round, for the "
            "slowest client.",
            table="durations",
            spec=charts.duration_chart(present),
        )
    ]
    if found.slowest["round"]:
        tables["slowest"] = _slowest(found.slowest)
        limit = f" Only the last {MOST_ROUNDS:,} rounds." if len(found.slowest["round"]) > MOST_ROUNDS else ""
        rounds.append(
            Chart(
                name="slowest",
                title="The slowest client of each round",
                text="A point per round. Point at it, or open the table, for the slowest client, the seconds beyond "
                f"the median client, and the problem.{limit}",
                table="slowest",
                spec=charts.slowest_chart(),
            )
        )
    if found.failures["reason"]:
        tables["failures"] = found.failures
        text = f"Failed clients per round by reason{_grouped(found)}."
        rounds.append(
            Chart(
                name="failures",
                title="Failures",
                text=text,
                table="failures",
                spec=charts.failure_chart(found.last_round),
            )
        )
    else:
        rounds.append("No client failed.")
    if any(map(math.isfinite, found.accuracy["accuracy"])):
        tables["accuracy"] = found.accuracy
        text = "Accuracy of the global model in the rounds with a central evaluation."
        rounds.append(
            Chart(name="accuracy", title="Accuracy", text=text, table="accuracy", spec=charts.evaluation_chart())
        )
    return Document(
        title=f"Deployment {shown_text(Path(found.folder).resolve().name, ID_LENGTH)}",
        lead=[
            f"As of {_time(found)}: {JOURNAL_NOTE.format(found.last_round)}. The page was written at "
            f"{found.read:%Y-%m-%d %H:%M:%S} UTC, and does not change by itself. For newer rounds, run fedsel report "
            "again."
        ],
        sections=[
            Section(
                name="figures",
                title="Figures",
                parts=[Grid(head=["figure", "value"], rows=[list(row) for row in figure_rows(found)])],
            ),
            Section(name="waiting", title="Clients", parts=waiting),
            Section(name="rounds", title="Rounds", parts=rounds),
            Section(name="advice", title="Advice", parts=_advice(found)),
        ],
        tables=tables,
    )


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
        **{
            name: np.array([math.nan if (value := getattr(one, name)) is None else value for one in clients], float)
            for name in (
                "slowest", "beyond_median_s", "beyond_second_s", "mean_s", "p95_s", "failures", "selections", "share",
                "last_seen", "last_selected", "problem_round",
            )
        },
        "problem": [shown_text(one.problem, PROBLEM_LENGTH) for one in clients],
    }  # fmt: skip


def _slowest(columns: Columns) -> Columns:
    """Return the newest rounds, with texts that can be shown."""
    newest = {name: values[:MOST_ROUNDS] for name, values in columns.items()}
    for name, most in (("client", 2 * ID_LENGTH), ("problem", PROBLEM_LENGTH)):
        newest[name] = [shown_text(text, most) for text in newest[name]]
    return newest


def _grouped(found: Deployment) -> str:
    """Return how many rounds are in a group of the charts; empty for groups of one round."""
    length = found.parts["round_end"][0] - found.parts["round"][0]
    return f", in groups of {length:,} rounds" if length > 1 else ""


def _advice(found: Deployment) -> list[str | Chart | Grid | Code]:
    if found.advice is None:
        return [f"There is no advice on this history: {shown_text(found.refusal, 500)}"]
    text = "\n".join(shown_text(line, 500) for line in found.advice.lines())
    return [found.advice.sentence, Code(title="Output of fedsel advise", text=text, closed=True)]


def _client_cells(one: ClientFigures, id_length: int, problem_length: int) -> list[str]:
    problem = f"round {one.problem_round:,}: {one.problem}" if one.problem_round else ""
    return [
        shown_text(one.client_id, id_length),
        f"{one.slowest:,}",
        *(_s(own, "") for own in (one.beyond_median_s, one.beyond_second_s, one.mean_s, one.p95_s)),
        f"{one.failures:,}",
        _percent(one.share),
        "never" if one.last_seen is None else f"{one.last_seen:,}",
        shown_text(problem, problem_length),
    ]


def _mean_parts(found: Deployment) -> list[tuple[str, float]]:
    """Return the parts of a mean round over all rounds; groups count with their number of rounds."""
    weights = np.array(found.parts["round_end"]) - np.array(found.parts["round"])
    names, seconds = np.array(found.parts["part"]), np.array(found.parts["seconds"], dtype=np.float64)
    return [
        (part, float(np.average(seconds[names == part], weights=weights[names == part])))
        for part in DEPLOYMENT_PARTS
        if (names == part).any()
    ]


def _reasons(found: Deployment) -> str:
    named = [f"{count:,} {shown_text(reason, 40)}" for reason, count in found.reasons.items()]
    if len(named) > MOST_REASONS:
        named[MOST_REASONS:] = [f"{sum(list(found.reasons.values())[MOST_REASONS:]):,} other"]
    return f" ({', '.join(named)})" if named else ""


def _accuracy(found: Deployment) -> str:
    known = [
        (value, number)
        for number, value in zip(found.accuracy["round"], found.accuracy["accuracy"], strict=True)
        if math.isfinite(value)
    ]
    if not known:
        return "no round has a central evaluation"
    best = max(known)
    return f"{known[-1][0]:.3f} after round {known[-1][1]}; the highest is {best[0]:.3f} after round {best[1]}"


def _time(found: Deployment) -> str:
    return f"{found.as_of:%Y-%m-%d %H:%M:%S} UTC"


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
