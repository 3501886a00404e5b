"""The task of the quickstart and its model: chained additions, answered with or without the steps.

With `examples/` on the path: `from sums.files import make_sums; make_sums("data/sums")`."""
