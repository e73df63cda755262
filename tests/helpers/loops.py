"""Products by csd's loops, whatever this CPU takes: with AMX bfloat16 is oneDNN's."""


def loops_multiply(monkeypatch):
    """Let the loops of products be taken in float32 and bfloat16 until the test ends."""
    for module in ("backend", "products"):
        monkeypatch.setattr(f"csd.cpu.{module}.multiplies", lambda dtype: True)
    monkeypatch.setattr("csd.cpu.isa.has_amx", lambda: False)
