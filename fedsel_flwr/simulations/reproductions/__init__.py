"""Reproductions: the papers' figures and tables, each with a verdict (``fedsel reproduce``).

The rooms, in the order in which a reproduction uses them:

====================  ==============================================================================================
``paper_figure``      the file of a figure: what to run, and what the paper claims
``rows``              the runs of a figure, and the finished ones in a CSV file, with their fingerprints
``choice_runs``       runs of choices: drawn latencies, a selector, its regret
``training_runs``     runs of training by the vectorized engine
``solver_runs``       runs of solvers: ALSA, simulated annealing and the exact solver of BSFL
``claims``            the verdict on a figure
``figure_pictures``   the pictures
``reproducing``       the missing runs, the table of checks, smoke tests, the list of figures
====================  ==============================================================================================
"""
