def packed_attention_triton(*args): raise NotImplementedError
def packed_attention_backward_triton(*args): raise NotImplementedError
