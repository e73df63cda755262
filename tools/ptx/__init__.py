"""Compiled kernels run without a GPU: what Triton writes for one, instruction by instruction.

Triton's interpreter runs a kernel's Python, one program after another, each a whole: it models
nothing of threads. What runs on a GPU is PTX, in which the compiler has laid every tensor out over
the threads, moves it between them through shared memory, and joins loads to vectors. `launch.py`
runs that, on the memory of tensors of the CPU:

    with emulated("sm_90"):
        rms_norm_triton(x, weight, 1e-5)    # as compiled for an H100

Beyond wrong results it finds what corrupts memory or differs from run to run on a GPU, and names
the line of the kernel: an address outside of the tensors given or not aligned to its load, threads
that leave a warp before the rest exchange registers, and two programs, or two warps without a
barrier between them, of which one writes what the other touches in global or shared memory.

PTX is assembled further into the chip's own instructions, and times are not simulated: neither is
shown. Instructions are defined in NVIDIA's "PTX ISA" manual, section 9.7.
"""
