"""`python -m undrift` is the command `undrift`."""

from undrift.cli import main

main()
