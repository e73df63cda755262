"""Answers in texts: which one a text has (`extract`), and which are equal (`equality`)."""
