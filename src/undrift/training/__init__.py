"""A run: built, trained round by round, watched, saved and resumed."""
