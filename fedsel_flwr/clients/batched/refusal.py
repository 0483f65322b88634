"""Why a model cannot be trained in one way or another."""

from __future__ import annotations


class Refused(Exception):
    """A model does not fit a way of training; the message says why, and the next way is tried."""
