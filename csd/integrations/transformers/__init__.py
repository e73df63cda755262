"""csd inside transformers: generation, attention, trees and kernels."""
