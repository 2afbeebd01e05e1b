"""Runs as a page, as figures for a paper, and as a page that follows them."""
