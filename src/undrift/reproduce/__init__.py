"""The papers' experiments, run again: `undrift reproduce`, or `python -m undrift.reproduce` where nothing is installed.

Everything that a GPU machine runs needs torch, numpy and safetensors only. `papers/*.toml` define the experiments and
hold the published numbers; `catalogue` reads them into cells (setting × method × seed); `work` runs one cell; `runner`
runs many within a budget; `results` keeps what came out; `verdict` judges the papers' claims and `page` writes
`docs/papers.md`.
"""
