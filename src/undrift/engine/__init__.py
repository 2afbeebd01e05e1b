"""The engines: how the local training of a cohort runs. All of them run the program in `client.py`."""
