"""Products by csd's loops, whatever this CPU takes: with AMX bfloat16 is oneDNN's."""


def loops_multiply(monkeypatch):
    """Let the loops of products be taken in float32 and bfloat16 until the test ends."""
    for module in ("cpu_ops", "layers.cpu.linear"):
        monkeypatch.setattr(f"csd.kernels.{module}.multiplies", lambda dtype: True)
    monkeypatch.setattr("csd.kernels.numba.isa.has_amx", lambda: False)
