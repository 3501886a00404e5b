"""Prompts, tokenizers and the quickstart's task. Imports neither torch nor an engine: the driver loads it."""
