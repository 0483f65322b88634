"""Which texts can be client ids, and their order."""

from __future__ import annotations

from numbers import Integral

import numpy as np

MAX_ID_LENGTH = 256
MAX_ID_DIGITS = 40


def canonical_id(claim: object) -> str | None:
    """Return a reported identity as a string; None if it cannot serve as one.

    >>> canonical_id(7), canonical_id(" phone-7 "), canonical_id(None), canonical_id(float("nan"))
    ('7', 'phone-7', None, None)
    """
    if type(claim) is not int:  # the common case goes by: fleets are large
        if isinstance(claim, bool | np.bool_):
            return None
        if isinstance(claim, Integral) or (isinstance(claim, float | np.floating) and float(claim).is_integer()):
            claim = int(claim)
    if isinstance(claim, int):
        return str(claim) if abs(claim) < 10**MAX_ID_DIGITS else None
    if isinstance(claim, str) and 0 < len(claim.strip()) <= MAX_ID_LENGTH and claim.strip().isprintable():
        return claim.strip()
    return None


def id_order(client_id: str) -> tuple[int, int, str]:
    """Sort key of ids: all-digit ids first, as integers, then the others as text.

    >>> sorted(["b", "10", "9"], key=id_order)
    ['9', '10', 'b']
    """
    digits = client_id.isascii() and client_id.isdigit()
    return (0, int(client_id), client_id) if digits else (1, 0, client_id)
