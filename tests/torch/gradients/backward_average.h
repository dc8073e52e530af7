// What the tests of averages at the end of backward() share.
#pragma once

#include <gtest/gtest.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <string>

#include "tests/torch/gradients/part.h"

namespace sirtaki::tests {

// What it throws; empty if nothing.
inline std::string TextOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

// The mean of 1, 2, ... of the ranks.
inline float MeanOfRanks() { return static_cast<float>(size() + 1) / 2; }
inline float Mine() { return static_cast<float>(rank() + 1); }

// All ranks go on together, so that one's failure is not the others' to find out.
inline void ExpectStillTrains(Part& part) {
  for (int step = 0; step < 3; ++step) {
    part.optimizer.zero_grad();
    part.Loss(Mine()).backward();
    part.ExpectGradient(MeanOfRanks());
    part.optimizer.step();
  }
  check_parameters(*part.layer);
}

// Runs a backward() within its backward, as re-entrant checkpointing does.
struct Inner : torch::autograd::Function<Inner> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                               std::int64_t call) {
    context->saved_data["call"] = call;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the graph stores numbers only
    (*reinterpret_cast<std::function<void()>*>(context->saved_data["call"].toInt()))();
    return {gradients[0], torch::Tensor()};
  }
};

}  // namespace sirtaki::tests
