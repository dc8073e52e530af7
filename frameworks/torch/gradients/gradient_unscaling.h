// GradScaler divides gradients by its scale, wherever they are.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <torch/optim/optimizer.h>

#include <cstddef>
#include <memory>

namespace sirtaki::detail {

// Divides all gradients by the scale, in one pass over them. float32 [3]: 1 if one of them is
// infinite or NaN, else 0; and the scale and its negative, whose greatest over the ranks tell whether
// all have the same. It is on the GPU of the first parameter that is on one, which all ranks have
// alike, or on the CPU if none is. Nobody waits for a GPU.
at::Tensor Unscale(torch::optim::Optimizer& optimizer, double scale);

// The elements of a tensor of float32, of one dimension, which may be on a GPU that has not computed
// them yet. Used by one thread.
class LateFlag {
 public:
  // Reads the flag as the calling thread's stream finds it.
  explicit LateFlag(const at::Tensor& flag);

  // Waits for that place of the stream, and not for what came into it later.
  float At(std::size_t index);
  // Whether the first is not 0.
  bool Get() { return At(0) != 0; }
  bool is_of_gpu() const { return ready_ != nullptr; }

 private:
  at::Tensor on_host_;
  std::shared_ptr<c10::Event> ready_;  // on_host_ is written; of a flag on a GPU
};

}  // namespace sirtaki::detail
