"""The kernels of the packed attention and of its gradients."""
