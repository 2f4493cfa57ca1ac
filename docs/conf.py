"""How Sphinx builds these pages: `make docs`."""

import nf4tensor

project = "nf4tensor"
copyright = "the nf4tensor authors, Apache-2.0"
release = nf4tensor.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
# Pages link to files of the repository, which are text and no pages here.
myst_url_schemes = ["http", "https", "mailto"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"show-inheritance": True}

# The specification's vectors stand in blocks of kinds of their own, which its test reads.
suppress_warnings = ["misc.highlighting_failure"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"nf4tensor {release}"
