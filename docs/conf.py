"""The documentation site: ``make docs`` builds it into docs/_build/html."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "extensions")]
import inventories  # noqa: E402 - found through the path above

PROJECT = tomllib.loads((DOCS.parent / "pyproject.toml").read_text("utf-8"))["project"]

# ---- the project ---------------------------------------------------------------------------------------------------
project = PROJECT["name"]
author = PROJECT["authors"][0]["name"]
copyright = author
version = release = PROJECT["version"]
language = "en"

# ---- reading -------------------------------------------------------------------------------------------------------
extensions = [
    "myst_nb",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "autoapi.extension",
    "public_names",
    "repository",
    "mathml",
    "accessibility",
    "gallery",
    "scenario_reference",
    "generated",
    "redirects",
]
root_doc = "index"
exclude_patterns = ["_build", "README.md"]
myst_heading_anchors = 6
myst_enable_extensions = ["dollarmath"]
# A shell variable is no equation: $HOME and $PATH.
myst_dmath_allow_space = False
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_execution_in_temp = True
nb_merge_streams = True
# The site's notebooks have no widgets. tqdm would print a warning about this, with a path of this machine.
os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"

# ---- the API reference: parsed, not imported -------------------------------------------------------------------------
autoapi_dirs = ["../fedsel_flwr"]
autoapi_root = "api"
autoapi_add_toctree_entry = False
autoapi_options = ["members", "imported-members", "show-inheritance", "show-module-summary"]
autoapi_own_page_level = "class"
autoapi_member_order = "groupwise"
autoapi_python_class_content = "both"
# autoapi does not see names that several assignments or imports of Flower share. None of them is public.
suppress_warnings = ["autoapi.python_import_resolution"]
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# ---- links to other sites: the inventories lie here, so that a build needs no network ------------------------------
intersphinx_mapping = inventories.write(DOCS / "_build" / "inventories")
intersphinx_disabled_reftypes = ["std:*"]
nitpicky = True

# ---- make linkcheck --------------------------------------------------------------------------------------------------
linkcheck_timeout = 20
linkcheck_retries = 2
# Some sixty links lead to GitHub, which slows a reader down who asks too often. Its pages make their anchors by script.
linkcheck_rate_limit_timeout = 120
linkcheck_anchors_ignore_for_url = ["https://github.com/.*"]

# ---- the site ------------------------------------------------------------------------------------------------------
html_theme = "furo"
# Curly quotes, but no dashes: "--resume" stays as it is typed.
smartquotes_action = "qe"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["search_in_files.js", "scroll.js"]
html_search_scorer = str(DOCS / "_static" / "scorer.js")
html_favicon = "_static/icon.svg"
html_math_renderer = "mathml"
html_copy_source = False
html_show_sourcelink = False
