"""The end of a failed run: the message alone, the run still failed, other exceptions untouched."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from flwr.common import Context, RecordDict
from flwr.common.logger import log

from fedsel_flwr.errors import ParameterError, RunError
from fedsel_flwr.simulations.on_flower import app
from fedsel_flwr.simulations.on_flower.app import log_message_only


class Lines(logging.Handler):
    """Everything that is logged, as a console shows it."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(f"{record.levelname} {self.format(record)}")


@pytest.fixture
def lines() -> Iterator[Lines]:
    """Listens to Flower's logger, which must have no filter left at the end."""
    logger, handler = logging.getLogger("flwr"), Lines()
    before = logger.filters[:]
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    assert logger.filters == before


def as_flower_does(error: Exception) -> None:
    """Flower 1.41 catches what a server app raises, and says so with the traceback; then comes its exit code."""
    log(logging.ERROR, "%s raised an exception", "Simulation", exc_info=error)
    log(logging.ERROR, "Exit Code: 700")


def test_the_message_stands_alone_and_the_error_is_still_raised(lines: Lines) -> None:
    error = RunError("10 clients are wanted, 100 % of them:\n\n    use this")
    with pytest.raises(RunError) as raised, log_message_only():
        raise error
    assert raised.value is error
    as_flower_does(error)
    (debug, said, code) = lines.said
    assert debug.startswith("DEBUG where the error was raised:\nTraceback")
    assert said == "ERROR 10 clients are wanted, 100 % of them:\n\n    use this"
    assert code == "ERROR Exit Code: 700"
    as_flower_does(error)  # once only
    assert "Traceback" in lines.said[3]


def test_a_program_fault_keeps_its_traceback(lines: Lines) -> None:
    with pytest.raises(KeyError) as raised, log_message_only():
        raise KeyError("gone")
    as_flower_does(raised.value)
    assert len(lines.said) == 2
    assert "Traceback" in lines.said[0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"scenario": "smoke", "rounds": 0},
            "scenario 'smoke': rounds = 0: Input should be greater than or equal to 1",
        ),
        ({"scenario": "nosuch"}, "unknown scenario 'nosuch'"),
    ],
)
def test_the_app_ends_with_the_message_of_a_bad_value(config: dict[str, object], message: str, lines: Lines) -> None:
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)  # type: ignore[arg-type]
    with pytest.raises(ParameterError) as raised:
        app.main(None, context)  # type: ignore[arg-type]
    as_flower_does(raised.value)
    assert lines.said[1].startswith(f"ERROR {message}")
    assert "Traceback" not in "".join(lines.said[1:])
