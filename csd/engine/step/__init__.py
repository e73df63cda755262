"""The step: drafts, one pass, verification.

step.py           `Step`, with shapes that depend on the live slots
static_step.py    `StaticStep`, with fixed shapes, which CUDA graphs capture
prefill.py        prompts, read chunk by chunk between steps
thread_choice.py  number of CPU threads of a step
budget/           number of drafted tokens of a step
"""
