"""Report pages: a comparison to explore, a deployment to watch; self-contained HTML (Altair, Vega, Jinja).

=====================  =============================================================================================
``document``           the page: sections, charts, tables, menus, and its HTML with the Content-Security-Policy
``charts``             the charts as Vega-Lite specifications
``comparison_tables``  the rows of a comparison's charts
``comparison_page``    the sections of a comparison's page
``run_status``         whether a deployment is running or finished; settings in its newest checkpoint
``waiting_costs``      figures of a deployment's clients, and what waiting for the slowest costs
``deployment_tables``  figures of a deployment: parts of a round, failures, trend, advice
``glossary``           the words that the pages need, and a line about each selector
``deployment_texts``   the figures of a deployment as sentences and cells, and its text for the terminal
``deployment_page``    the sections of a deployment's page
=====================  =============================================================================================

``page.html``, ``page.css`` and ``page.js`` are the template, the style and the script of every page.
"""
