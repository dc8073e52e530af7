"""The net of train_transformer.py: a GPT, which foretells the next letter from those before it."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import sirtaki.torch as hvd

BYTES = 128      # that a letter may be
HEAD_WIDTH = 32  # of an attention head


class Block(nn.Module):
    """Lets each letter look at those before it, and then thinks about what it has seen. The ranks of the set share its
    heads, and what it thinks; with one rank the layers are nn.Linear."""

    def __init__(self, width, ranks):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = hvd.ColumnParallelLinear(width, 3 * width, blocks=3, unit=HEAD_WIDTH, process_set=ranks)
        self.projection = hvd.RowParallelLinear(width, width, unit=HEAD_WIDTH, process_set=ranks)
        self.norm2 = nn.LayerNorm(width)
        self.expand = hvd.ColumnParallelLinear(width, 4 * width, process_set=ranks)
        self.contract = hvd.RowParallelLinear(4 * width, width, process_set=ranks)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.contract(F.gelu(self.expand(self.norm2(x))))

    def attention(self, x):
        q, k, v = (part.unflatten(2, (-1, HEAD_WIDTH)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # batch x heads x letters x HEAD_WIDTH
        return self.projection(seen.transpose(1, 2).flatten(2))


class GPT(nn.Module):
    def __init__(self, settings, ranks):
        super().__init__()
        self.recompute = settings.recompute
        self.letters = hvd.ParallelEmbedding(BYTES, settings.width, process_set=ranks)
        self.places = nn.Embedding(settings.context, settings.width)
        self.blocks = nn.ModuleList(Block(settings.width, ranks) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.width)
        self.loss = hvd.ParallelCrossEntropy(BYTES, process_set=ranks)
        for parameter in self.parameters():
            if parameter.dim() == 2:  # for GPT-2's width of 768 this is its 0.02
                hvd.fill_whole(parameter, lambda whole: nn.init.normal_(whole, 0, 0.5 / settings.width**0.5))

    def forward(self, text):
        """For each letter the logits of the next: windows x letters x this rank's part of BYTES."""
        x = self.letters(text) + self.places(torch.arange(text.size(1), device=text.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.letters.logits(self.norm(x))  # one matrix, both ways


class Layer(nn.Module):
    """Some of the net's modules, under the names that they have there, and what is done with them."""

    def __init__(self, run, **modules):
        super().__init__()
        self.run = run
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.run(x, **self._modules)


def pipeline_of(gpt, settings, mesh):
    """All ranks have drawn the same net, and keep the layers of their stage: the letters and their places, the blocks, and the
    logits, which have the matrix of the letters once more."""
    recompute = settings.recompute

    def begin(text, letters, places):
        return letters(text) + places(torch.arange(text.size(1), device=text.device))

    def think(x, block):
        return checkpoint(block, x, use_reentrant=False) if recompute else block(x)

    def end(x, norm, letters):
        return letters.logits(norm(x))

    layers = {"begin": Layer(begin, letters=gpt.letters, places=gpt.places)}
    layers.update((f"block{i}", Layer(think, block=block)) for i, block in enumerate(gpt.blocks))
    layers["end"] = Layer(end, norm=gpt.norm, letters=gpt.letters)
    return hvd.Pipeline(layers, gpt.loss, mesh=mesh, partition="parameters", micro_batches=settings.micro_batches,
                        ties=[["begin.letters.weight", "end.letters.weight"]])


def loss_of(net, windows, train):
    """The mean loss of a letter of these windows, which have the letter after their last one, too. With ``train`` the gradients
    are there as well."""
    inputs, targets = windows[:, :-1], windows[:, 1:]
    if isinstance(net, hvd.Pipeline):
        return net.train_batch(inputs, targets) if train else net.evaluate_batch(inputs, targets)[0]
    loss = net.loss(net(inputs), targets)
    if train:
        loss.backward()
    return loss.detach()
