"""Old addresses of the site: a page that was merged or renamed leads to its new place.

A section keeps its anchor if the new page has it. Otherwise, the reader comes to the place that :data:`MOVED` names.
"""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

MOVED = {
    "observing": "operating#watch-a-run",
    "stopping": "operating#stop-a-run-early",
    "restarting": "operating#resume-after-a-crash",
    "reliability": "operating#faults",
    "statistics": "comparing#statistics",
    "advising": "comparing#does-selection-shorten-your-rounds",
    "beyond-one-machine": "scaling",
    "performance": "scaling#what-things-cost",
    "devices": "simulations#your-own-devices-and-links",
    "secure-aggregation": "security#secure-aggregation",
    "from-openfl": "coming-from#openfl",
    "from-fedscale": "coming-from#fedscale-and-oort",
    "wishes": "coming-from#what-flower-users-ask-for",
    "errors": "command-line#errors",
}
"""Old page -> new page, with the anchor of its section."""
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<noscript><meta http-equiv="refresh" content="0; url={target}"></noscript>
<link rel="canonical" href="{target}">
<title>This page has moved</title>
<script>location.replace(location.hash ? "{page}" + location.hash : "{target}")</script>
</head>
<body><p>This page has moved: <a href="{target}">{target}</a></p></body>
</html>
"""


def write(app: Sphinx, error: Exception | None) -> None:
    """Write a page for each old address, with the same kind of address as the builder's pages."""
    if error or app.builder.format != "html":
        return
    for old, new in MOVED.items():
        page, _, anchor = new.partition("#")
        file = Path(app.builder.get_outfilename(old))
        url = Path(os.path.relpath(app.builder.get_outfilename(page), file.parent)).as_posix()
        url = escape(url.removesuffix("index.html") if app.builder.name == "dirhtml" else url)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(PAGE.format(page=url, target=f"{url}#{anchor}" if anchor else url), "utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register this extension."""
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
