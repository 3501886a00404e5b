"""Multi-turn episodes: the tokens of a conversation, and the environments that answer the model."""
