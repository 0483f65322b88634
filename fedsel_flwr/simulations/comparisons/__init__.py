"""Comparisons: several selectors on the same seeds of one scenario.

Modules, in the order in which a comparison uses them:

=======================  ========================================================================================
``comparing``            :func:`~fedsel_flwr.simulations.comparisons.comparing.compare`, and the course of a plan
``contenders``           the selectors to compare, and the selectors that can run in a scenario
``plan``                 the plan: its checks, its file ``plan.json``, and the code that it names
``parallel_runs``        runs in other processes: the protocol of executors, worker processes, reports of progress
``cluster``              the executor on a Ray cluster, whose runs come back as files
``runtime_environment``  what travels to the nodes of the cluster: code, files and data sets
``comparison``           the result: table, summary, verdict, pictures; agreement with Flower
``report_page``          files and page of a comparison, and its table on the terminal or as JSON
=======================  ========================================================================================
"""
