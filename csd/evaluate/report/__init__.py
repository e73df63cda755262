"""`csd report`: a self-contained HTML page that shows a run."""

from csd.evaluate.report.eval_page import eval_page
from csd.evaluate.report.page import page, page_of

__all__ = ["eval_page", "page", "page_of"]
