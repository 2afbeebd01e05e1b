"""The papers' experiments, run again: `undrift reproduce`, or `python -m papers` in a clone without installation.

The parts that run on a GPU machine only need torch, numpy and safetensors. `experiments/*.toml` define the experiments
and list the published numbers; `catalogue` reads them into cells (setting × method × seed); `work` runs one cell;
`runner` runs many within a time budget; `results` stores their results in `results/`; `verdict` judges the papers'
claims and `page` writes `docs/papers.md`.
"""
