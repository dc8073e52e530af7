// Shows that a gradient is reduced while backward() still runs.
#pragma once

#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <utility>

namespace sirtaki::tests {

// Passes its input on; in backward, waits until `reduced` says true or 20 s have passed, and notes
// which.
struct WaitInBackward : torch::autograd::Function<WaitInBackward> {
  struct Wait {
    std::function<bool()> reduced;
    bool in_time = false;
  };

  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& x,
                               std::int64_t wait) {
    context->saved_data["wait"] = wait;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    // NOLINTNEXTLINE(performance-no-int-to-ptr): the graph stores numbers only
    auto& wait = *reinterpret_cast<Wait*>(context->saved_data["wait"].toInt());
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!wait.reduced() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::yield();
    }
    wait.in_time = wait.reduced();
    return {gradients[0], torch::Tensor()};
  }
};

// Two layers; the first one's backward begins only when the last one's bias gradient, in which each
// rank has its own number, has become the average of all ranks. True if that happened. `steps`:
// that come before.
template <class MakeOptimizer>
bool LastGradientIsReducedBeforeTheFirstExists(int rank, int size,
                                               const MakeOptimizer& make_optimizer, int steps = 0) {
  torch::nn::Linear first(4, 4);
  torch::nn::Linear last(4, 2);
  torch::OrderedDict<std::string, torch::Tensor> names;
  for (auto& item : first->named_parameters()) names.insert("first." + item.key(), item.value());
  for (auto& item : last->named_parameters()) names.insert("last." + item.key(), item.value());
  auto optimizer = make_optimizer(names);

  for (int step = 0; step < steps; ++step) {
    last(first(torch::ones({1, 4}))).sum().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  const float average = static_cast<float>(size + 1) / 2;
  WaitInBackward::Wait wait;
  wait.reduced = [&last, average] {
    const auto gradient = last->bias.grad();
    if (!gradient.defined()) return false;
    // Another thread may be writing it.
    return std::atomic_ref<float>(*gradient.data_ptr<float>()).load() == average;
  };
  const auto hidden = first(torch::ones({1, 4}));
  const auto waited = WaitInBackward::apply(hidden, reinterpret_cast<std::int64_t>(&wait));
  (last(waited).sum() * (rank + 1)).backward();
  optimizer.step();
  return wait.in_time;
}

}  // namespace sirtaki::tests
