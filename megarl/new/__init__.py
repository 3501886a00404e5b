"""Lay out a task of the user's own: `megarl new` writes its files, `megarl tiny-model` a model for it."""
