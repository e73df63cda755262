"""Rules that change a row's logits before verification: by tables on the device, or on the host."""
