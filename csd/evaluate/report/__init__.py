"""`csd report`: one page that shows a run, self-contained."""

from csd.evaluate.report.page import page

__all__ = ["page"]
