"""Comparisons: several selectors on the same seeds of one scenario.

Modules, in the order in which a comparison uses them:

====================  ===========================================================================================
``comparing``         :func:`~fedsel_flwr.simulations.comparisons.comparing.compare`, the entry point
``contenders``        the selectors to compare, and the selectors that can run in a scenario
``plan``              the plan: check it, run it, and resume it from its folder
``plan_files``        ``plan.json``: writing, reading and comparing it; the lock of the folder
``flower_agreement``  the first rounds on Flower and Ray, to check that both engines choose the same clients
``parallel_runs``     several runs at a time in worker processes, and reports of their progress
``cluster_tasks``     calls on the nodes of a Ray cluster, with retries and progress; what travels to the nodes
``cluster_runs``      runs on the nodes of a Ray cluster, which come back as files
``comparison``        the result: table, summary, verdict, pictures, folder
``report_page``       the comparison on the terminal, as JSON, and as the page ``report.html``
====================  ===========================================================================================
"""
