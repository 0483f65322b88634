"""Comparisons: several selectors on the same seeds of one scenario.

The rooms, in the order in which a comparison passes through them:

====================  ===========================================================================================
``comparing``         :func:`~fedsel_flwr.simulations.comparisons.comparing.compare`, the entry
``contenders``        the selectors that are compared, and those that can run in a scenario
``plan``              the plan: checked, run, and resumed from its folder
``plan_files``        ``plan.json``: writing, reading and comparing it; the lock of the folder
``flower_agreement``  the first rounds again with Flower on Ray, and whether both engines choose alike
``parallel_runs``     several runs at a time in worker processes, and the reports of their progress
``comparison``        the result: table, summary, verdict, pictures, folder
====================  ===========================================================================================
"""
