"""Tools built on runs: the command line, experiment files, sweeps, comparisons and reports."""
