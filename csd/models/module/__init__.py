"""The decoder that runs the user's own module, with csd's attention.

decoder.py     `ModuleDecoder`, one pass of the module over a pool's rows, and passes that read on
               the host, which no graph can record
probe.py       a test pass that records the module's calls of attention and mixers
mixers.py      calls of layers with a state
sizes.py       sizes of a module, from its config and its probe
admit.py       admission: csd's results against the module's own
compare.py     the comparisons of single calls
"""
