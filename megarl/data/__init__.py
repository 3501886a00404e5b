"""Read prompts and load tokenizers. The driver imports this package, so it imports no torch and no engine."""
