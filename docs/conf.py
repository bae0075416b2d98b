"""Sphinx: ``make docs`` builds the pages into docs/_build/html."""

import re
import sys
from pathlib import Path

from docutils import nodes
from docutils.statemachine import StringList
from docutils.utils.math import latex2mathml
from sphinx.util.docutils import SphinxDirective

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import kernel_tables
import measured
from sphinx_gallery.sorting import ExplicitOrder

import fa_cupy

project = "fa_cupy"
author = "fa_cupy contributors"
project_copyright = author
release = fa_cupy.__version__
version = re.sub(r"(?<=\.dev).*", "", release)  # of a checkout, without its commit

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "numpydoc",
]
exclude_patterns = ["_build", "_templates", "gallery"]
templates_path = ["_templates"]
nitpicky = True
# numpydoc turns the names of types into references; those of other projects are not built here.
nitpick_ignore_regex = [("py:.*", r"(numpy|cupy|ml_dtypes|matplotlib)\..*")]

# The recipes, from the simplest on. `-D plot_gallery=0` makes their pages without running them.
sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "generated/gallery",
    "backreferences_dir": "generated/backreferences",
    "doc_module": ("fa_cupy",),
    "filename_pattern": r"\.py$",
    "within_subsection_order": ExplicitOrder(
        [
            "kernel_regression.py",
            "non_local_means.py",
            "graph_attention.py",
            "packed_documents.py",
            "decoding.py",
            "streaming.py",
            "bandwidth.py",
            "larger_than_memory.py",
            "masks.py",
        ]
    ),
    "image_srcset": ["2x"],
    "thumbnail_size": (640, 448),
    "download_all_examples": False,
    "write_computation_times": False,
    "show_signature": False,
    "abort_on_example_error": True,
    "run_stale_examples": True,  # what they call may have changed
    "log_level": {"backreference_missing": "debug"},  # not every function is in a recipe
}

html_theme = "furo"
html_title = f"fa_cupy {version}"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_copy_source = False
html_math_renderer = "mathml"
# A copied example has neither prompts nor results.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
html_show_sourcelink = False

autodoc_mock_imports = ["torch", "jax", "dask"]  # which the adapters import, and pages do without
autodoc_typehints = "none"  # the numpydoc sections say it in words
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
autosummary_ignore_module_all = False
highlight_language = "none"


class Generated(SphinxDirective):
    """A directive that is replaced by the reStructuredText that its function returns."""

    def nested(self, text, origin):
        parent = nodes.section()
        parent.document = self.state.document
        self.state.nested_parse(StringList(text.splitlines(), origin), self.content_offset, parent)
        return parent.children


class Measured(Generated):
    """``.. measured:: NAME`` is replaced by what measured.NAME() returns."""

    required_arguments = 1

    def run(self):
        name = self.arguments[0]
        return self.nested(getattr(measured, name)(), f"measured.{name}")


class KernelTable(Generated):
    """``.. kernel:: STEM``, ``variants``, ``registers`` and ``barriers``: see kernel_tables."""

    required_arguments = 1
    has_content = True

    def run(self):
        function = getattr(kernel_tables, self.name)
        given = [self.arguments[0], *([self.content] if self.content else [])]
        try:
            return self.nested(function(*given), f"kernel_tables.{self.name}")
        except LookupError as error:
            raise self.error(str(error)) from error


class KernelCode(SphinxDirective):
    """``.. kernel-code:: STEM NAME``: the definition of NAME in a kernel, or in a header."""

    required_arguments = 2

    def run(self):
        try:
            text = kernel_tables.code(*self.arguments)
        except LookupError as error:
            raise self.error(str(error)) from error
        return [nodes.literal_block(text, text, language="cuda")]


def constant(name, rawtext, text, lineno, inliner, options=None, content=()):
    """``:constant:`kName```: a constant of the kernels with its value."""
    try:
        shown = kernel_tables.constant(text)
    except LookupError as error:
        message = inliner.reporter.error(str(error), line=lineno)
        return [inliner.problematic(rawtext, rawtext, message)], [message]
    return [nodes.literal(rawtext, shown)], []


BARRED = re.compile(
    r"<munderover>\s*(<mi>[^<]*</mi>)(.*?)(<mo[^<]*>\u02c9</mo>)\s*</munderover>", re.DOTALL
)


def visit_math(writer, node):
    """Write a formula as MathML, which browsers draw without a script from elsewhere."""
    block = isinstance(node, nodes.math_block)
    formula = latex2mathml.tex2mathml(node.astext(), as_block=block)
    # docutils takes the index of a letter with a bar for a limit, and puts it below the letter.
    formula = BARRED.sub(r"<msub><mover>\1\3</mover>\2</msub>", formula)
    # A bar that more fonts have; as an accent it would touch the letter.
    formula = formula.replace("\u02c9", "\u00af").replace('<mover accent="true">', "<mover>")
    writer.body.append(f'<div class="math">{formula}</div>' if block else formula)
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
    app.add_directive("measured", Measured)
    for name in ("kernel", "variants", "registers", "barriers"):
        app.add_directive(name, KernelTable)
    app.add_directive("kernel-code", KernelCode)
    app.add_role("constant", constant)
