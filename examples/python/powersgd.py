"""PowerSGD (Vogels, Karimireddy, Jaggi, 2019) as a communication hook: of each gradient that is a matrix, only two thin
factors travel. train_digits.py uses it:

    sirtakirun -np 2 python train_digits.py --powersgd 2
"""

import zlib

import torch

import sirtaki.torch as hvd


class PowerSGD:
    """Approximates each matrix M of n x m numbers by P Q^T, with P of n x rank and Q of m x rank numbers. What the
    approximation leaves out is added to the next gradient (error feedback), and Q begins where it ended in the step
    before (warm start). Gradients that would not become smaller, biases for one, are averaged as they are.

    What it remembers belongs to the parameters, by their names: buckets may change."""

    def __init__(self, rank, seed=1):
        self.rank, self.seed = rank, seed
        self.left_out = {}  # by this rank
        self.q = {}         # the same on all ranks

    def __call__(self, bucket):
        matrices, others = [], []
        for name, gradient in zip(bucket.parameter_names(), bucket.gradients()):
            if self._is_compressed(gradient):
                # A copy, for products round by where their factors lie, which is elsewhere in the first step.
                matrix = gradient.reshape(gradient.shape[0], -1).clone()
                if name in self.left_out:
                    matrix += self.left_out[name]
                matrices.append((name, gradient, matrix))
            else:
                others.append(gradient)
        p = _Together([matrix @ self._q_of(name, matrix) for name, _, matrix in matrices], bucket.name() + "/p")
        rest = _Together(others, bucket.name() + "/rest")

        def finish():
            # All ranks come here in the order of the buckets, so that these may communicate and wait as well.
            bases = [torch.linalg.qr(average)[0] for average in p.averages()]
            q = _Together([matrix.T @ base for (_, _, matrix), base in zip(matrices, bases)], bucket.name() + "/q")
            for (name, gradient, matrix), base, factor in zip(matrices, bases, q.averages()):
                approximation = base @ factor.T
                self.left_out[name] = matrix - approximation
                self.q[name] = factor
                gradient.copy_(approximation.reshape(gradient.shape))
            for gradient, average in zip(others, rest.averages()):
                gradient.copy_(average)
            return bucket.buffer()  # of which the gradients are views

        return finish

    def _is_compressed(self, gradient):
        if gradient.dim() < 2 or gradient.numel() == 0:
            return False
        return self.rank * (gradient.shape[0] + gradient[0].numel()) < gradient.numel()

    def _q_of(self, name, matrix):
        if name not in self.q:
            generator = torch.Generator().manual_seed(self.seed + zlib.crc32(name.encode()))
            self.q[name] = torch.randn(matrix.shape[1], self.rank, generator=generator).to(matrix)
        return self.q[name]

    def state_dict(self):
        """For a checkpoint of rank 0. Collective, since what is left out differs between the ranks."""
        return {"left_out": hvd.allgather_object(self.left_out, name="powersgd"), "q": self.q}

    def load_state_dict(self, state):
        """Takes what rank 0 has. Collective. Another number of ranks begins with nothing left out."""
        state = hvd.broadcast_object(state, root_rank=0, name="powersgd")
        self.q = state["q"]
        known = state["left_out"]
        self.left_out = known[hvd.rank()] if len(known) == hvd.size() else {}


class _Together:
    """Tensors that are averaged in one call."""

    def __init__(self, tensors, name):
        self.tensors = tensors
        self.handle = None
        if tensors:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            self.handle = hvd.allreduce_async_(flat, name=name, op=hvd.Average)

    def averages(self):
        if self.handle is None:
            return []
        pieces = hvd.synchronize(self.handle).split([tensor.numel() for tensor in self.tensors])
        return [piece.reshape(tensor.shape).clone() for piece, tensor in zip(pieces, self.tensors)]
