"""The inventories of other sites for intersphinx, made from ``docs/inventories/names.toml`` without a network."""

from __future__ import annotations

import tomllib
import zlib
from pathlib import Path

NAMES = Path(__file__).resolve().parent.parent / "inventories" / "names.toml"


def write(folder: Path) -> dict[str, tuple[str, str]]:
    """Write an inventory for each site, and return Sphinx's setting ``intersphinx_mapping``.

    Args:
        folder: Folder for the inventories, which is made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for site, table in tomllib.loads(NAMES.read_text("utf-8")).items():
        url = table.pop("url")
        rows = "".join(f"{name} py:class 1 {page} -\n" for name, page in table.items())
        head = f"# Sphinx inventory version 2\n# Project: {site}\n# Version: \n"
        head += "# The remainder of this file is compressed using zlib.\n"
        file = folder / f"{site}.inv"
        file.write_bytes(head.encode() + zlib.compress(rows.encode()))
        mapping[site] = (url, str(file))
    return mapping
