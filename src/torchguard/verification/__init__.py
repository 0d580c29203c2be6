"""``verified``: a compiled graph is checked against eager before it is trusted."""
