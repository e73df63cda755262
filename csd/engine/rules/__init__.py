"""Rules that change a row's logits before verification."""
