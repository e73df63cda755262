"""Engines of a tiny random model, on a simulated GPU too."""

import torch

import csd
from bench.lib.shapes import random_model


def engine(device, **options):
    model = random_model("tiny", device, torch.float32)
    return csd.Engine(model, **dict(max_slots=4, self_check=False) | options)
