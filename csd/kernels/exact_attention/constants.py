"""Constants that the kernels of the exact attention and the reference of its work list share."""

from csd.state.kv_cache import PAGE
from csd.state.pool import MAX_DEPTH

# keys that may be nodes: a row's own and those on its path; the most keys of a tail
NEAR = MAX_DEPTH + 1
TAIL = NEAR + PAGE - 1
# pages per cut of a prompt, more if there were over PROMPT_CUTS; pages per cut of a slot's tokens
PROMPT_PAGES, PROMPT_CUTS, SLOT_PAGES = 8, 16, 16
