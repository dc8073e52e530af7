// Collective operations on tensors; this header includes them all:
//
//   reductions.h  allreduce, reduce, reducescatter, sparse_allreduce
//   movement.h    broadcast, allgather, allgather_into, gather, scatter, alltoall
//   barrier.h     barrier, monitored_barrier, join
//   messages.h    send, recv_ and their kin, between two ranks
//
// Every rank of the process set calls the same operation, under the same name, with the same type
// and shape; what differs is found and thrown as `mismatch` on all of them, and the name may be
// used again. Ranks may call named operations in different orders. Operations without a name are
// matched by the order in which the ranks call them, and all come from one thread a set: a second
// thread is refused with invalid_argument. Names of the form `#7.grad` are the library's own.
//
// Tensors: dense, in host memory or on GPUs of CUDA (docs/gpu.md); uint8, int8, int16, int32,
// int64, float16, bfloat16, float32, float64, complex64, complex128, bool; float8 types for moving.
// What a reduction takes stands at ReduceOp. Views, non-contiguous and empty ones are fine,
// 0-dimensional ones where rows do not matter.
//
// Each comes in several forms: `f(t)` returns a new tensor; `f_(t)` overwrites t and returns it;
// `f_async(t)` and `f_async_(t)` return a Handle at once; see handle.h. `grouped_f` takes a list of
// tensors, which is one operation under one name: none of them starts before all are there on every
// rank, an error of one is the error of all; the options hold for each of them. An empty list is
// refused.
//
// Autograd sees the blocking forms that return a new tensor: `f(t)` and `grouped_f`. The others
// work on the detached data. backward() through them is collective, under the name `NAME.grad`: all
// ranks of the set must run it, in the same order, so if one rank's tensor requires a gradient,
// those of all must, and each must use the result in what it calls backward() on. A rank whose
// result got no gradient takes part with zeros.
//
// Everything may be called from any thread. All throw Error; see error.h for the codes.
#pragma once

#include "sirtaki/barrier.h"
#include "sirtaki/handle.h"
#include "sirtaki/messages.h"
#include "sirtaki/movement.h"
#include "sirtaki/process_set.h"
#include "sirtaki/reductions.h"
