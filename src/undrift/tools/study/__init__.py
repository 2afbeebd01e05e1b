"""Studies: methods × settings × partitions × seeds, from one file to the tables and figures of a paper."""
