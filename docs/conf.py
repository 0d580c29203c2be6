"""How Sphinx builds the site: ``make docs`` writes it to ``site/``, and fails at a broken link."""  # noqa: INP001

from __future__ import annotations

import importlib
import re
import urllib.request
from html import escape
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import torchguard
from torchguard.cli import DOCUMENTATION

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = re.findall(
    r'^Repository = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE
)[0]

project = "torchguard"
author = "The torchguard authors"
copyright = author  # noqa: A001 - Sphinx reads this name
release = version = torchguard.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
]
exclude_patterns = ["*.py"]
html_extra_path = ["img/card.png"]  # at the same address always, for those who share a page
nitpicky = True  # a reference that leads nowhere is a warning, and `make docs` fails at a warning

# Pages are read on GitHub too: links between them name files and headings, as GitHub does.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

smartquotes = False  # what is between quotes is often code

html_theme = "furo"
html_title = "torchguard"
html_baseurl = DOCUMENTATION
html_copy_source = False
html_logo = html_favicon = "img/logo.svg"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_js_files = ["copy.js"]
html_theme_options: dict[str, Any] = {
    "source_repository": f"{REPOSITORY}/",
    "source_branch": "main",
    "source_directory": "docs/",
}

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autosummary_generate = False  # only the tables: the texts are below them, on one page
autodoc_class_signature = "separated"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Cost", "Guards", "Upstream"]

_INVENTORIES = {
    "python": "https://docs.python.org/3",
    "torch": "https://pytorch.org/docs/stable",
}


def _reachable(address: str) -> bool:
    """Tell whether an inventory can be fetched; without a network the site has fewer links."""
    request = urllib.request.Request(f"{address}/objects.inv", method="HEAD")  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=3):  # noqa: S310 - both are https
            return True
    except OSError:
        return False


intersphinx_mapping = {
    name: (address, None) for name, address in _INVENTORIES.items() if _reachable(address)
}
# Names of other projects, which lead somewhere only if their inventory was fetched, and names that
# annotations spell and no page documents.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|numpy|collections|typing|types|pathlib|os|contextlib|logging)(\..*)?"),
    (r"py:.*", r"(?!torchguard).*"),
    (r"py:.*", r"torchguard\..*\._?[A-Z]\w*"),
]


def _leave_out(_app: Sphinx, _kind: str, name: str, member: object, *_: Any) -> bool | None:
    """Leave out the constructors of returned objects, and methods that trainers and torch call."""
    owner = getattr(member, "__qualname__", "").partition(".")[0]
    hidden = name == "forward" or name.startswith("on_")
    made_by_us = name in {"__init__", "__new__"} and owner not in torchguard.__all__
    return hidden or made_by_us or None


def _add_card(_app: Sphinx, name: str, _template: str, context: dict[str, Any], page: Any) -> None:
    """Say what a chat or a social network shows of a page: title, first paragraph, picture."""
    nodes = page.findall() if page is not None else ()
    first = next((node for node in nodes if node.tagname == "paragraph"), None)
    about = " ".join(first.astext().split()) if first is not None else ""
    tags = {
        "og:title": re.sub(r"<[^>]+>", "", context.get("title", name)),
        "og:description": about,
        "og:image": f"{DOCUMENTATION}card.png",
        "og:url": f"{DOCUMENTATION}{name}.html",
        "twitter:card": "summary_large_image",
    }
    lines = [f'<meta property="{key}" content="{escape(text)}">' for key, text in tags.items()]
    lines += [f'<meta name="description" content="{escape(about)}">'] if about else []
    context["metatags"] = "\n".join([context.get("metatags", ""), *lines])


def setup(app: Sphinx) -> None:
    """Let autodoc find the public names and what it shows of them; Sphinx calls this."""
    app.connect("autodoc-skip-member", _leave_out)
    app.connect("html-page-context", _add_card)
    # They are imported when they are first used (PEP 562), so that vars() lacks them until then.
    for name in (*torchguard._HOME, "errors"):  # type: ignore[attr-defined]
        found = getattr(torchguard, name)
        if isinstance(found, type):  # the texts of its fields are read from the file it is in
            found.__module__ = f"torchguard.{torchguard._HOME[name]}"  # type: ignore[attr-defined]
    importlib.import_module("torchguard.errors")
