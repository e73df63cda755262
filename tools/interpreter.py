"""Triton's interpreter, without what it does again in every call, or for every element alone."""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def patch_once_a_launch():
    """A launch puts what the interpreter runs in the place of the language's functions.

    Each call within the launch would go through all of them again, only to find that this is done:
    half of the time of these tests.
    """
    if not hasattr(interpreter, "_LangPatchScope"):
        # another Triton's, whose tests take longer
        return
    patch = interpreter._patch_lang
    # the last of what is replaced in a module
    original = {lang: lang.max_constancy for lang in (tl, tl.core)}

    def patch_lang(fn):
        langs = [x for x in fn.__globals__.values() if x is tl or x is tl.core]
        if langs and all(lang.max_constancy is not original[lang] for lang in langs):
            return interpreter._LangPatchScope()
        return patch(fn)

    interpreter._patch_lang = patch_lang


def patch_loop_bounds():
    """Triton 3.6 takes a loop's bound for an integer as it is, an array of one element.

    NumPy has refused that since 2.4; Triton 3.7 takes the element.
    """
    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor


def patch_exclusive_or():
    """A sort's exclusive ors, of whole tensors: the interpreter combines two elements at a time."""
    slow = interpreter.ReduceOps.generic_reduce

    def generic_reduce(self, input):
        if self.combine_fn != tl.standard._xor_combine or self.axis is None:
            return slow(self, input)
        data = input[0].handle.data
        out = np.bitwise_xor.reduce(data, axis=self.axis, keepdims=self.keep_dims)
        return [self.to_tensor(out, input[0].dtype)]

    interpreter.ReduceOps.generic_reduce = generic_reduce


def ordered_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    """A product added up in the order of its inner dimension, for the builder's `create_dot`.

    NumPy's own takes an order that changes with the number of rows and columns, as a GPU's
    instruction does not.
    """
    total = d.data.copy()
    for k in range(a.data.shape[-1]):
        left, right = a.data[..., k, None], b.data[..., None, k, :]
        total += left.astype(total.dtype) * right.astype(total.dtype)
    return interpreter.TensorHandle(total, d.dtype.scalar)
