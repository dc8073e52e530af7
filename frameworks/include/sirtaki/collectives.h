// This header includes all collective operations on tensors, and the messages between two ranks:
//
//   reductions.h  allreduce, reduce, reducescatter, sparse_allreduce
//   movement.h    broadcast, allgather, allgather_into, gather, scatter, alltoall
//   barrier.h     barrier, monitored_barrier, join
//   messages.h    send, recv_ and their kin, between two ranks
//
// Every rank of the process set calls the same operation, under the same name, with the same type
// and shape. If the ranks differ, all of them throw `Mismatch`, and the name may be used again.
// Ranks may call named operations in different orders. Operations without a name are matched by the
// order in which the ranks call them, and all come from one thread a set: a second thread is
// refused with InvalidArgument. Names of the form `#7.grad` are the library's own.
//
// Tensors are dense, in host memory or on CUDA GPUs (docs/gpu.md), of type uint8, int8, int16,
// int32, int64, float16, bfloat16, float32, float64, complex64, complex128 or bool; float8 types
// can be moved, not reduced. ReduceOp says which types a reduction takes. Views, non-contiguous and
// empty tensors are allowed, 0-dimensional ones where rows do not matter.
//
// Each operation comes in several forms. `f(t)` returns a new tensor; `f_(t)` overwrites t and
// returns it; `f_async(t)` and `f_async_(t)` return a Handle at once, see handle.h. Each form takes a
// list of tensors as well, also one in braces, which is one operation under one name: none of them
// starts before all are there on every rank, and an error of one is the error of all. The options
// hold for each tensor. An empty list is refused. `grouped_f` is an older name of `f` for lists.
//
// Autograd sees the blocking forms that return new tensors; the other forms work on the detached
// data. backward() through them is collective, under the name `NAME.grad`: all ranks of the set
// must run it, in the same order. So if one rank's tensor requires a gradient, those of all ranks
// must, and each rank must use the result in what it calls backward() on. A rank whose result got no
// gradient takes part with zeros.
//
// Every operation may be called from any thread and throws Error; see error.h for the codes.
#pragma once

#include "sirtaki/barrier.h"
#include "sirtaki/handle.h"
#include "sirtaki/messages.h"
#include "sirtaki/movement.h"
#include "sirtaki/process_set.h"
#include "sirtaki/reductions.h"
