"""Ways to give a model other weights, in place and in other memory."""

import torch
from helpers.models import checkpoints


def perturb(model) -> None:
    """Other weights, in place."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=generator).to(param.dtype) * 0.2)


def to_other_dtype(model):
    model.to(torch.float32)


def to_and_back(model):
    model.to(torch.float32)
    model.to(torch.float64)


def assign_other_weights(model):
    other = checkpoints.build("qwen2", dtype=torch.float64, seed=9)
    model.load_state_dict(other.state_dict(), assign=True)


def assign_one_matrix(model):
    proj = model.model.layers[1].self_attn.v_proj
    proj.weight = torch.nn.Parameter(proj.weight.data.flip(0).clone())


def assign_one_bias(model):
    proj = model.model.layers[2].self_attn.k_proj
    proj.bias.data = proj.bias.data + 1


def assign_a_norm(model):
    model.model.layers[0].post_attention_layernorm.weight.data = torch.full((48,), 0.5).double()


def assign_the_head(model):
    model.lm_head.weight.data = model.lm_head.weight.data.flip(0).clone()


def grow_the_vocabulary(model):
    model.resize_token_embeddings(checkpoints.VOCAB + 6, mean_resizing=False)


def drop_a_layer(model):
    del model.model.layers[-1]
    model.config.num_hidden_layers -= 1


REPLACED = [
    to_other_dtype,
    to_and_back,
    assign_other_weights,
    assign_one_matrix,
    assign_one_bias,
    assign_a_norm,
    assign_the_head,
    grow_the_vocabulary,
    drop_a_layer,
]
