"""A method as a sum of parts: hooks, what they are given, numbers that are schedules, local work, simulated faults."""
