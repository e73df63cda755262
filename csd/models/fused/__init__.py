"""The fused decoder: families whose layers csd computes itself.

decoder.py      `Decoder` and its layers; models with attention and states
config.py       sizes and options of a model, read from a `transformers` config
families.py     differences of the families from Llama
rope.py         rotary embeddings
linear.py       products
lora.py         adapters added to the products
experts.py      feed-forward layers of experts
delta_net.py    layers with a gated delta net
fuse.py         a `transformers` model as a decoder that shares its memory
layer_parts.py  modules and values of a `transformers` layer, by their role in the decoder
fusable.py      checks that rule a model out
"""
