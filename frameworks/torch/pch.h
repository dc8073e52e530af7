// Precompiled for the library's sources: what most of them include, and no more. See
// cmake/SirtakiTorch.cmake.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>
