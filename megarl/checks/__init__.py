"""All that can be said of a job before a device is touched: `megarl check`, and the first thing that `megarl
train` does.

On top of the rules of megarl/config: the first rows of the data through the tokenizer, the plan of every
weight sync, disk space, memory. Reads config.json files, tokenizers and a few rows; no weights; imports no
torch."""
