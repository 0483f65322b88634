"""A Flower app that compares selectors on the clients of a federation."""
