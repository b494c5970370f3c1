"""The command line and what it runs: training, comparison, reports, benchmarks."""
