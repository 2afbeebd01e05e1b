"""What must hold on a GPU: `python -m tests.gpu`, or `make gpu`."""
