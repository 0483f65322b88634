"""Report pages: a comparison to explore, a deployment to watch; self-contained HTML (Altair, Vega, Jinja).

=====================  =============================================================================================
``document``           the page: charts, menus, and its HTML with the Content-Security-Policy
``charts``             the charts as Vega-Lite specifications, for pages and for pictures
``comparison_tables``  the rows of a comparison's charts
``comparison_page``    a comparison's page, and a line about each selector
``waiting_costs``      figures of a deployment's clients, and what waiting for the slowest costs
``deployment_tables``  figures of a deployment: status, parts of a round, failures, trend, advice
``deployment_page``    a deployment's page, and its text for the terminal
=====================  =============================================================================================

``page.html``, ``page.css`` and ``page.js`` are the template, the style and the script of every page. The templates
``comparison.html`` and ``deployment.html`` hold the sections and their texts, and ``parts.html`` their parts.
"""
