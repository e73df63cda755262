"""Constants that the kernels of the exact attention and the reference of its work list share."""

from csd.state.kv_cache import PAGE
from csd.state.pool import MAX_DEPTH

# keys that may be nodes: a row's own and those on its path; the tail's most keys
NEAR = MAX_DEPTH + 1
TAIL = NEAR + PAGE - 1
# pages of a cut of a prompt, more where there would be over PROMPT_CUTS; of a slot's tokens
PROMPT_PAGES, PROMPT_CUTS, SLOT_PAGES = 8, 16, 16
