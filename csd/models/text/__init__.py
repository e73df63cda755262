"""Text of prompts, messages and samples.

prompts.py          prompts to token ids
messages.py         messages in the form that a chat template reads, and fields that it leaves out
context.py          text and tokens behind a prompt
streamed.py         text of a sample while it grows, and its stop strings
token_bytes.py      bytes of the tokens of a vocabulary
"""
