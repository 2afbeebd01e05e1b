"""How undrift scales: populations, cohorts, processes, runs side by side, data that stay on the host."""
