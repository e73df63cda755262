"""`csd report`: one page that shows a run, self-contained."""

from csd.evaluate.report.eval_page import eval_page
from csd.evaluate.report.page import page, page_of

__all__ = ["eval_page", "page", "page_of"]
