"""The engines: how a cohort's local training is carried out. Both run the one program in `client.py`."""
