"""Every method, a file a family. A file's docstring is the paper and the equation."""
