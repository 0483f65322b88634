"""Page of a deployment: which clients cost the rounds, what fails, and whether the run still proceeds.

All figures are those of :class:`~fedsel_flwr.report.page.deployment_tables.Deployment`. Ids and problems come from
clients. They are shown as printable text of limited length (:func:`shown_text`), and never as markup.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedsel_flwr.errors import RunError
from fedsel_flwr.report.page import charts
from fedsel_flwr.report.page.deployment_tables import (
    DEPLOYMENT_PARTS,
    Deployment,
    read_deployment,
)
from fedsel_flwr.report.page.deployment_texts import (
    CLIENT_HEAD,
    EXPLANATION,
    ID_LENGTH,
    JOURNAL_NOTE,
    PROBLEM_LENGTH,
    advice_sentences,
    client_cells,
    count_text,
    deployment_lines,
    figure_rows,
    mean_parts,
    shown_text,
    status_sentence,
    time_text,
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
from fedsel_flwr.report.page.glossary import CEILING, JAIN, WORDS_OF_FAILURES
from fedsel_flwr.report.page.waiting_costs import ClientFigures
from fedsel_flwr.rounds.storage import check_entries

PAGE = "report.html"
"""Name of the page."""
MOST_CLIENTS = 200
"""Number of clients in the page's table."""
BARS = 20
"""Number of clients in the chart."""
MOST_ROUNDS = 1_000
"""Number of rounds in the chart of the slowest clients."""


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
            series="client",
            spec=charts.cost_chart(bars),
        ),
        Grid(
            title=table_title,
            head=CLIENT_HEAD,
            rows=[client_cells(one, found.last_round, ID_LENGTH, PROBLEM_LENGTH) for one in found.clients[:shown]],
        ),
        EXPLANATION,
    ]
    present = [part for part, seconds in mean_parts(found) if seconds > 0]
    means = [part for part in present if part in DEPLOYMENT_PARTS[:5]] or ["latency"]
    rounds: list[str | Chart | Grid | Code] = [
        Chart(
            name="durations",
            title="Duration of the rounds",
            text=f"Seconds of each round{_grouped(found)}. {', '.join(means).capitalize()}: means over the usable "
            "updates. Waiting: until the slowest usable update. Up to there, the duration is measured. Failures "
            "(counted, paler): the seconds after it, because failed clients count with max_latency.",
            table="durations",
            spec=charts.duration_chart(
                present,
                "seconds per round" if not _grouped(found) else "mean seconds per round",
                _line_at(found, max(found.slowest["round_s"], default=found.mean_s)),
            ),
        )
    ]
    if found.slowest["round"]:
        tables["slowest"] = _slowest(found.slowest)
        limit = f" Only the last {MOST_ROUNDS:,} rounds." if len(found.slowest["round"]) > MOST_ROUNDS else ""
        longest = max(found.slowest["round_s"])
        rounds.append(
            Chart(
                name="slowest",
                title="The slowest client of each round",
                text="A point per round. Point at it, or open the table, for the slowest client, the seconds beyond "
                "the median client, and the problem. A thin line ends at the last measured second; above it, a failed "
                f"client counts with max_latency.{limit}",
                table="slowest",
                spec=charts.slowest_chart(longest, _line_at(found, longest)),
            )
        )
    if found.failures["reason"]:
        tables["failures"] = found.failures
        text = f"Failed clients per round by reason{_grouped(found)}. " + " ".join(
            f"{reason}: {WORDS_OF_FAILURES[reason]}." for reason in found.reasons
        )
        rounds.append(
            Chart(
                name="failures",
                title="Failures",
                text=text,
                table="failures",
                series="reason",
                spec=charts.failure_chart(found.last_round, None if _grouped(found) else _most_failures(found)),
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
            f"{status_sentence(found)[:1].upper()}{status_sentence(found)[1:]}.",
            f"As of {time_text(found)}: {JOURNAL_NOTE.format(found.last_round)}. The page was written at "
            f"{found.read:%Y-%m-%d %H:%M:%S} UTC, and does not change by itself. For newer rounds, run fedsel report "
            "again.",
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
                "last_seen", "last_reply", "last_selected", "problem_round",
            )
        },
        "reasons": [count_text(one.reasons) for one in clients],
        "problem": [shown_text(one.problem, PROBLEM_LENGTH) for one in clients],
    }  # fmt: skip


def _slowest(columns: Columns) -> Columns:
    """Return the newest rounds, with texts that can be shown."""
    newest = {name: values[:MOST_ROUNDS] for name, values in columns.items()}
    for name, most in (("client", 2 * ID_LENGTH), ("problem", PROBLEM_LENGTH)):
        newest[name] = [shown_text(text, most) for text in newest[name]]
    return newest


def _most_failures(found: Deployment) -> int:
    """Return the largest number of failed clients in a group of rounds."""
    counts = Counter[int]()
    for number, clients in zip(found.failures["round"], found.failures["clients_per_round"], strict=True):
        counts[number] += round(clients)
    return max(counts.values())


def _grouped(found: Deployment) -> str:
    """Return how many rounds are in a group of the charts; empty for groups of one round."""
    length = found.parts["round_end"][0] - found.parts["round"][0]
    return f", in groups of {length:,} rounds" if length > 1 else ""


def _advice(found: Deployment) -> list[str | Chart | Grid | Code]:
    if found.advice is None:
        return [f"There is no advice on this history: {shown_text(found.refusal, 500)}"]
    text = "\n".join(shown_text(line, 500) for line in found.advice.lines())
    return [*advice_sentences(found), CEILING, JAIN, Code(title="Output of fedsel advise", text=text, closed=True)]


def _line_at(found: Deployment, longest: float) -> float:
    """Return max_latency if a line there leaves the bars readable."""
    return found.max_latency_s if found.max_latency_s <= 2 * longest else math.nan
