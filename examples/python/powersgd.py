"""PowerSGD (Vogels, Karimireddy, Jaggi, 2019) as a communication hook: of each gradient that is a matrix, only two thin
factors travel. train_digits.py uses it:

    sirtakirun -np 2 python train_digits.py --powersgd 2

Its twin in C++, ../powersgd.h, gives the same bits for the same gradients.
"""

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
        matrices, travelling = [], []
        for name, gradient in zip(bucket.parameter_names(), bucket.gradients()):
            self.steps[name] = self.steps.get(name, 0) + 1
            if self.steps[name] > self.start and self._shrinks(gradient):
                matrix = self._matrix_of(name, gradient)
                p = matrix @ self._q_of(name, matrix)
                matrices.append((name, gradient, matrix, p))
                travelling.append(p)
            else:
                travelling.append(gradient)
        if not matrices:
            travelling = [bucket.buffer()]
        handle = hvd.grouped_allreduce_async_(travelling, name=bucket.name() + "/p", op=hvd.Average)

        def finish():
            hvd.synchronize(handle)
            # All ranks call the functions of their buckets in one order, so these may communicate too.
            if matrices:
                self._approximate(matrices, bucket.name() + "/q")
            return bucket.buffer()  # of which the gradients are views

        return finish

    def _approximate(self, matrices, name):
        bases = [torch.linalg.qr(p)[0] for _, _, _, p in matrices]
        factors = [matrix.T @ base for (_, _, matrix, _), base in zip(matrices, bases)]
        hvd.grouped_allreduce_(factors, name=name, op=hvd.Average)
        for (parameter, gradient, matrix, _), base, factor in zip(matrices, bases, factors):
            approximation = base @ factor.T
            gradient.copy_(approximation.reshape(gradient.shape))
            if factor.isfinite().all():  # else it is not on any rank: the step is lost, and must leave no trace
                self.left_out[parameter] = matrix.sub_(approximation)
                self.q[parameter] = factor

    def _shrinks(self, gradient):
        if gradient.dim() < 2 or gradient.numel() == 0:
            return False
        return 2 * self.rank * (gradient.shape[0] + gradient[0].numel()) < gradient.numel()

    def _matrix_of(self, name, gradient):
        # The matrix is a copy in memory of its own: the last bits of a product depend on how its factors are aligned, and
        # gradients lie elsewhere in the first step. It has 4 bytes a number at least, since LAPACK orthogonalizes no half
        # types.
        matrix = gradient.reshape(gradient.shape[0], -1).to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        return matrix.add_(self.left_out[name].to(matrix)) if name in self.left_out else matrix

    def _q_of(self, name, matrix):
        if name not in self.q or self.q[name].shape[1] != self.rank:
            generator = torch.Generator().manual_seed(self.seed)
            self.q[name] = torch.randn(matrix.shape[1], self.rank, generator=generator)
        return self.q[name].to(matrix)

    def state_dict(self):
        """For a checkpoint of rank 0. Collective. What is left out differs between the ranks, but only its mean counts:
        every rank goes on with that, as a resumed run does, on any number of ranks."""
        if self.left_out:
            hvd.grouped_allreduce_(list(self.left_out.values()), name="powersgd", op=hvd.Average)
        return {"steps": dict(self.steps), "left_out": dict(self.left_out), "q": dict(self.q)}

    def load_state_dict(self, state):
        """Takes what rank 0 has. Collective."""
        state = hvd.broadcast_object(state, root_rank=0, name="powersgd")
        self.steps, self.left_out, self.q = state["steps"], state["left_out"], state["q"]
