"""The app that runs on the tests' deployments."""
