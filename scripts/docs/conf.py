"""How sphinx builds the documentation; `scripts/docs/build` calls it."""

import fxq

project = "fxq"
author = "the fxq authors"
copyright = author
release = version = fxq.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser"]
exclude_patterns = ["**/build"]
html_theme = "furo"
html_title = "fxq"
html_copy_source = False
html_static_path, html_css_files = ["static"], ["page.css"]

myst_heading_anchors = 3
default_role = "code"  # docstrings write code between single backticks, as Markdown does
autodoc_member_order = "bysource"
# A page shows what a class inherits from other classes of fxq, and nothing from these:
not_fxq = ("GraphModule", "Module", "Tensor", "TensorBase", "Bindable", "BaseException", "Sequence", "Mapping", "int")
autodoc_default_options = {"inherited-members": ", ".join(not_fxq)}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_use_ivar = True
napoleon_custom_sections = ["Source", ("Before", "Source"), "Keeps", "After"]
