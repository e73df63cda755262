"""csd inside `transformers`.

generate.py    `generate` with `custom_generate=csd.hf_generate`, its scores, and refused options
attention.py   `attn_implementation="csd_tree"`
tree.py        draft trees for one forward pass of a model
packed_tree.py whole samples for one forward pass with gradients
tree_cache.py  the paged keys and values that these trees attend to
swap.py        csd's norms, rotary embedding and SwiGLU in a stock model
"""
