"""Prompts and tokenizers. The driver imports this package, so neither torch nor an engine is imported here."""
