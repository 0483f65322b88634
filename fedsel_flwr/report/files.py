"""Whole files or none, and packages that only reports need."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType

from fedsel_flwr.errors import RunError


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Write a file completely or not at all.

    Args:
        path: The file to make or replace; its folder is made if needed.

    Yields:
        A path in the same folder to write to. It takes the place of ``path`` when the block ends, and is removed if
        the block raises.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    temporary = folder / target.name
    try:
        yield temporary
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
        folder.rmdir()


def load_optional(module: str) -> ModuleType:
    """Import a module that a bare installation lacks.

    Args:
        module: Its full name.

    Returns:
        The module.

    Raises:
        RunError: If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise RunError(
            f"This report needs {package}, which is not installed. Install it with: pip install 'fedsel-flwr[sim]'"
        ) from error
