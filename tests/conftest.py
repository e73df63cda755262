import os

# read when triton is imported, so before anything else imports it
os.environ.setdefault("TRITON_INTERPRET", "1")
