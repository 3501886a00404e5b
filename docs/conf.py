"""Sphinx builds the site from the Markdown files as they are: `make docs`.

The source folder is the repository's root, so that links between README.md, CONTRIBUTING.md, docs/ and the files
beside them mean the same here as in a repository browser. The navigation is the list in docs/index.md."""

import re

project = "megarl"
author = "the megarl authors"
copyright = author

extensions = ["myst_parser"]
myst_heading_anchors = 4  # links to #headings are checked, and work
root_doc = "docs/index"
include_patterns = ["README.md", "CONTRIBUTING.md", "docs/*.md", "tools/benchmarks/README.md"]
exclude_patterns = [".*", "build", "runs", "tests", "megarl", "**/*.egg-info"]

html_theme = "furo"
html_title = "megarl"
html_extra_path = ["index.html"]
html_copy_source = False
html_show_sphinx = False


def add_navigation(app, docname, source):
    """Append a toctree for each section of docs/index.md to what Sphinx reads of it."""
    if docname != root_doc:
        return
    for section in re.split(r"^## ", source[0], flags=re.MULTILINE)[1:]:
        caption = section.splitlines()[0]
        pages = re.findall(r"^- \[.*?\]\((.*?)\.md\)", section, re.MULTILINE)
        lines = ["```{toctree}", ":hidden:", f":caption: {caption}", *pages, "```"]
        source[0] += "\n" + "\n".join(lines) + "\n"


def setup(app):
    app.connect("source-read", add_navigation)
