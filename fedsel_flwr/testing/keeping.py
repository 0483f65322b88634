"""What the state of any selector must do: be saved, loaded, refused, forgotten."""

from __future__ import annotations

import numpy as np

from fedsel_flwr.errors import StateError
from fedsel_flwr.testing.worlds import SelectorFactory, fleet, play, promise, promise_finite, unlike


def check_save_and_load(make: SelectorFactory) -> None:
    """Save, load into a fresh selector and continue equals never stopping."""
    straight = make(seed=6)
    play(straight, range(17))
    promise_finite(straight, "when clients fail")
    resumed = make(seed=99)
    try:
        resumed.load_state_dict(straight.state_dict())
    except StateError as error:
        raise AssertionError(
            f"broken promise: a selector takes its own state: {error}; arrays keep the declared type, numbers that of "
            "__init__"
        ) from error
    key = unlike(resumed.state_dict(), straight.state_dict())
    promise(not key, f"state {key!r} comes back with its numbers, shape and type")
    promise(
        play(resumed, range(17, 60)) == play(straight, range(17, 60)),
        "save, load, continue equals never stopping: "
        "what is kept for each client belongs into client_state, other numbers into scalar_state",
    )
    for key, value in straight.state_dict().items():
        promise(np.asarray(value).dtype.kind in "biuf", f"state {key!r} is a number or an array of numbers")


def check_state_is_a_copy(make: SelectorFactory) -> None:
    """A saved state does not change as the selector goes on."""
    selector = make(seed=6)
    play(selector, range(5))
    state = selector.state_dict()
    before = {key: np.array(value) for key, value in state.items()}
    play(selector, range(5, 10))
    promise(all(np.array_equal(before[k], state[k], equal_nan=True) for k in state), "a saved state does not change")


def check_foreign_state(make: SelectorFactory) -> None:
    """A state that does not fit is refused, and the selector goes on as it was."""
    selector, twin = make(seed=8), make(seed=8)
    play(selector, range(5))
    play(twin, range(5))
    state = selector.state_dict()
    for foreign in ({}, state | {"surprise": 1}, state | {"registered": np.ones((2, 2), dtype=np.bool_)}):
        try:
            selector.load_state_dict(foreign)
        except StateError:
            continue
        promise(False, f"a state with keys {sorted(foreign)} is refused with StateError")
    promise(play(selector, range(5, 15)) == play(twin, range(5, 15)), "a refused state changes nothing")


def check_forget(make: SelectorFactory) -> None:
    """A row given to a newcomer carries nothing over from the client that had it."""
    selector, gone = make(seed=7), np.array([1, 4])
    num_clients = fleet(selector, 6)
    play(selector, range(25), num_clients=num_clients)
    clients = selector.num_clients
    selector.forget(np.array([4, 1, num_clients + 93]))
    promise(selector.num_clients == clients - 2, "a forgotten client is not registered, an unknown one is ignored")
    state = selector.state_dict()
    for attribute, value in selector.client_state.items():
        rows = state[attribute.lstrip("_")][gone]
        new = np.broadcast_to(np.asarray(value), rows.shape)
        promise(np.array_equal(rows, new, equal_nan=new.dtype.kind == "f"), f"forget resets {attribute!r} of a client")
    stranger = make(seed=8)  # it knows what is declared, so nothing of the clients that are gone
    stranger.load_state_dict(state)
    again, fresh = make(seed=8), make(seed=8)
    again.load_state_dict(state)
    fresh.load_state_dict(state)
    again.inform(gone)
    newcomers = np.array([num_clients, num_clients + 1])
    fresh.inform(newcomers)
    if not any(getattr(selector, name, None) is not None for name in selector.by_client):  # else rows differ by index
        for attribute in selector.client_state:
            old, new = (each.state_dict()[attribute.lstrip("_")] for each in (again, fresh))
            promise(
                np.array_equal(old[gone], new[newcomers], equal_nan=old.dtype.kind == "f"), "a row is given out as new"
            )
    promise(
        play(selector, range(25, 60), num_clients=num_clients)
        == play(stranger, range(25, 60), num_clients=num_clients),
        "a forgotten client is a stranger: what is kept for each client belongs into client_state",
    )
