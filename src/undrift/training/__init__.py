"""A run: built, trained round by round, monitored, saved and resumed."""
