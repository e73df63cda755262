"""The decoder that runs the user's own module, with csd's attention.

decoder.py     `ModuleDecoder`, and one pass of the module over a pool's rows
probe.py       a test pass that records the module's calls of attention and mixers
spec.py        properties of an attention call
mixers.py      calls of layers with a state
sizes.py       sizes of a module, from its config and its probe
admit.py       admission: csd's results against the module's own
compare.py     the comparisons of single calls
host_reads.py  passes that read on the host, which no graph can record
"""
