"""What must hold on a GPU: `python -m gpu`, or `make gpu`."""
