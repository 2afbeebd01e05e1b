"""The methods, one file per family. Each class's docstring has the reference, the equations and the arguments."""
