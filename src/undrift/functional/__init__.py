"""A module as a pure function: keyed draws, layers, per-sample gradients, and lanes' convolutions and recurrences."""
