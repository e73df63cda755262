"""Text of prompts, messages and samples."""
