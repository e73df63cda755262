"""The fused decoder: families whose layers csd computes itself."""
