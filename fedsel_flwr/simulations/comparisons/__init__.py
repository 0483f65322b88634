"""Several selectors on the same seeds: plan, runs, result."""
