"""The parts of an engine that its calls share: model, caches and step times.

model.py       `EngineModel`: a loaded model and the operations that run it
caches.py      `Caches`: a step over caches and slots, and the drafter
sizes.py       sizes and bytes of the caches; the slots that fit into memory
step_times.py  `StepTimes`: seconds of steps by their rows, for automatic budgets
weights.py     state of the weights, to detect changes, and their fingerprint
held_bytes.py  bytes of the tensors that an engine holds
"""
