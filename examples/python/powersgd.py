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
    before (warm start). Gradients that would not shrink to half, biases for one, are averaged as they are, and so is
    each gradient in its first steps, `start` of them: what is left out of a gradient comes some steps late, which does
    the most harm while the learning rate still rises.

    What it remembers belongs to the parameters, by their names: buckets may change. All ranks compute the same bases
    from the same numbers, to the bit where their processors are of one kind."""

    def __init__(self, rank, start, seed=1):
        self.rank, self.start, self.seed = rank, start, seed
        self.steps = {}     # that each gradient has made
        self.left_out = {}  # by this rank
        self.q = {}         # the same on all ranks

    def __call__(self, bucket):
        matrices, others = [], []
        for name, gradient in zip(bucket.parameter_names(), bucket.gradients()):
            self.steps[name] = self.steps.get(name, 0) + 1
            if self.steps[name] > self.start and self._shrinks(gradient):
                matrices.append((name, gradient, self._matrix_of(name, gradient)))
            else:
                others.append(gradient)
        if not matrices:
            return hvd.allreduce_async_(bucket.buffer(), name=bucket.name(), op=hvd.Average)
        p = _Together([matrix @ self._q_of(name, matrix) for name, _, matrix in matrices], bucket.name() + "/p")
        rest = _Together(others, bucket.name() + "/rest")

        def finish():
            # All ranks come here in the order of the buckets, so that these may communicate and wait as well.
            bases = [torch.linalg.qr(average)[0] for average in p.averages()]
            q = _Together([matrix.T @ base for (_, _, matrix), base in zip(matrices, bases)], bucket.name() + "/q")
            for (name, gradient, matrix), base, factor in zip(matrices, bases, q.averages()):
                approximation = base @ factor.T
                gradient.copy_(approximation.reshape(gradient.shape))
                if factor.isfinite().all():  # else the program leaves out this step, on all ranks alike
                    self.left_out[name] = matrix.sub_(approximation)
                    self.q[name] = factor
            for gradient, average in zip(others, rest.averages()):
                gradient.copy_(average)
            return bucket.buffer()  # of which the gradients are views

        return finish

    def _shrinks(self, gradient):
        if gradient.dim() < 2 or gradient.numel() == 0:
            return False
        return 2 * self.rank * (gradient.shape[0] + gradient[0].numel()) < gradient.numel()

    def _matrix_of(self, name, gradient):
        # A copy, for products round by where their factors lie, which is elsewhere in the first step; of 4 bytes a number
        # at least, which orthogonalizing takes.
        matrix = gradient.reshape(gradient.shape[0], -1).to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        return matrix.add_(self.left_out[name].to(matrix)) if name in self.left_out else matrix

    def _q_of(self, name, matrix):
        if name not in self.q:
            generator = torch.Generator().manual_seed(self.seed + zlib.crc32(name.encode()))
            self.q[name] = torch.randn(matrix.shape[1], self.rank, generator=generator)
        return self.q[name].to(matrix)

    def state_dict(self):
        """For a checkpoint of rank 0. Collective. What is left out differs between the ranks, but only its mean counts:
        every rank goes on with that, as a resumed run does, on any number of ranks."""
        means = {name: hvd.allreduce(self.left_out[name], name="powersgd/" + name, op=hvd.Average)
                 for name in sorted(self.left_out)}
        self.left_out = means
        return {"steps": dict(self.steps), "left_out": dict(means), "q": dict(self.q)}

    def load_state_dict(self, state):
        """Takes what rank 0 has. Collective."""
        state = hvd.broadcast_object(state, root_rank=0, name="powersgd")
        self.steps, self.left_out, self.q = state["steps"], state["left_out"], state["q"]


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
