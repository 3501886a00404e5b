"""Check a job before any device is used: `megarl check`, and the first action of `megarl train`.

These checks add to the rules of megarl/config. They pass the first rows of the data through the tokenizer,
plan every weight sync, and estimate disk space and memory. They read config.json files, tokenizers, headers
of weight files and a few rows. They read no weights and import no torch."""
