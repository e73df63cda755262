"""`csd report`: one page that shows a run, self-contained."""

from csd.report.page import page

__all__ = ["page"]
