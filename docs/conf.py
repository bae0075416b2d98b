"""Sphinx: ``make docs`` builds the pages into docs/_build/html."""

import sys
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import measured

import fa_cupy

project = "fa_cupy"
author = "fa_cupy contributors"
project_copyright = author
version = release = fa_cupy.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.mathjax", "numpydoc"]
exclude_patterns = ["_build"]
nitpicky = True
# numpydoc turns the names of types into references; those of other projects are not built here.
nitpick_ignore_regex = [("py:.*", r"(numpy|cupy|ml_dtypes|matplotlib)\..*")]

html_theme = "furo"
html_title = f"fa_cupy {release}"
html_static_path = ["_static"]
html_copy_source = False
html_show_sourcelink = False

autodoc_mock_imports = ["torch", "jax"]  # which the adapters import, and pages do without
autodoc_typehints = "none"  # the numpydoc sections say it in words
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
highlight_language = "none"


class Measured(SphinxDirective):
    """``.. measured:: NAME`` is replaced by what measured.NAME() returns, as reStructuredText."""

    required_arguments = 1

    def run(self):
        text = getattr(measured, self.arguments[0])()
        parent = nodes.section()
        parent.document = self.state.document
        lines = StringList(text.splitlines(), f"measured.{self.arguments[0]}")
        self.state.nested_parse(lines, self.content_offset, parent)
        return parent.children


def setup(app):
    app.add_directive("measured", Measured)
