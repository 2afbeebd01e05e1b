"""A method as a sum of parts: hooks, their arguments, schedules, local training and simulated faults."""
