"""Report pages: a comparison to explore, a deployment to watch; self-contained HTML (Altair, Vega, Jinja).

=====================  =============================================================================================
``document``           the page: sections, charts, tables, menus, and its HTML with the Content-Security-Policy
``charts``             the charts as Vega-Lite specifications
``comparison_tables``  the rows of a comparison's charts
``comparison_page``    the sections of a comparison's page
``deployment_tables``  figures of a deployment: clients, what waiting costs, parts of a round, newest checkpoint
``deployment_page``    the sections of a deployment's page, and its text for the terminal
=====================  =============================================================================================

``page.html``, ``page.css`` and ``page.js`` are the template, the style and the script of every page.
"""
