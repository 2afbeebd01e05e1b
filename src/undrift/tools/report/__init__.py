"""Reports of runs: a page of charts, a live page, and figures for a paper."""
