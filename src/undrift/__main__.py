"""`python -m undrift` is the command `undrift`."""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]  # Python put the working directory first; the command does not, so that no file there is imported

from undrift.tools.cli import main

main()
