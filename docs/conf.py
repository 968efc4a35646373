"""The documentation site: ``make docs`` builds it, and treats each warning as an error."""

import gc
import re
from typing import Any

from ddpcore import __version__

# The trees of all pages stay to the end, so that to search them for garbage takes a third of the time.
gc.set_threshold(50_000, 50, 1000)

project = "ddpcore"
author = "the ddpcore contributors"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx-mathjax-offline",
    "sphinx_copybutton",
]
copybutton_exclude = ".linenos, .gp, .go"
myst_enable_extensions = ["dollarmath"]
myst_dmath_double_inline = True
myst_heading_anchors = 4  # links such as page.md#a-heading are checked
exclude_patterns = ["_build"]

# A public name stands where a user imports it from, with the annotations of its signature in short form.
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True  # a dataclass lists its fields once
default_role = "literal"  # docstrings write `name` for code

html_theme = "furo"
html_title = f"ddpcore {version}"
html_favicon = (
    "_static/icon.svg"  # browsers ask for an icon, and print an error without one
)
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False


def parsable(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: str, returns: str
) -> Any:
    """Sphinx cannot parse ``<factory>`` or ``<function f at ...>``, and would show the annotations unformatted."""
    if not signature:
        return None
    return re.sub(
        r"<function (\w+)[^>]*>", r"\1", signature.replace("<factory>", "...")
    ), returns


def with_titles(app: Any, docname: str, source: list[str]) -> None:
    """A link ``[page.md](page.md)`` reads well in the repository. On the site its text is the title of the page."""
    source[0] = re.sub(
        r"\[[\w/-]+\.md\](\((?!http)[^)\s]+\.md(?:#[\w-]+)?\))", r"[]\1", source[0]
    )


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", with_titles)
    app.connect("autodoc-process-signature", parsable)
