// The state of optimizers whose parameters are on GPUs, which are fakes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "frameworks/torch/state/optimizer_device.h"
#include "sirtaki/torch.h"
#include "tests/torch/gpu/gpu_ranks.h"

namespace sirtaki::tests {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamState;
using Make = std::function<std::unique_ptr<Optimizer>(std::vector<at::Tensor>)>;

class GpuOptimizerStateTest : public GpuRanksTest {};

// Towards 1, 2, 3, … by the square of the distance.
void Step(Optimizer& optimizer) {
  optimizer.step([&optimizer] {
    const at::NoGradGuard no_grad;
    at::Tensor loss = torch::zeros({});
    for (at::Tensor& parameter : optimizer.param_groups()[0].params()) {
      const at::Tensor distance =
          parameter.detach() - torch::arange(1, parameter.numel() + 1).to(parameter.device());
      parameter.mutable_grad() = 2 * distance;
      loss += distance.cpu().pow(2).sum();
    }
    return loss;
  });
}

std::vector<at::Tensor> Parameters(const std::vector<at::Device>& devices) {
  std::vector<at::Tensor> parameters;
  for (const at::Device device : devices) {
    parameters.push_back(torch::full({3}, 0.5F).to(device).set_requires_grad(true));
  }
  return parameters;
}

template <class Algorithm, class Options>
Make Maker(const Options& options) {
  return [options](std::vector<at::Tensor> parameters) {
    return std::make_unique<Algorithm>(std::move(parameters), options);
  };
}

std::vector<Make> AllOptimizers() {
  using namespace torch::optim;
  return {Maker<SGD>(SGDOptions(0.1).momentum(0.9)),
          Maker<Adam>(AdamOptions(0.1).amsgrad(true)),
          Maker<AdamW>(AdamWOptions(0.1)),
          Maker<Adagrad>(AdagradOptions(0.1)),
          Maker<RMSprop>(RMSpropOptions(0.1).momentum(0.9).centered(true)),
          Maker<LBFGS>(LBFGSOptions(0.1).max_iter(3).history_size(2))};
}

// What steps on the CPU make of the parameters.
std::vector<at::Tensor> Reference(const Make& make, std::size_t count, int steps) {
  std::vector<at::Tensor> parameters = Parameters(std::vector<at::Device>(count, at::kCPU));
  const auto optimizer = make(parameters);
  for (int step = 0; step < steps; ++step) Step(*optimizer);
  return parameters;
}

TEST_F(GpuOptimizerStateTest, ArrivesWhereTheParametersAre) {
  const std::vector<Make> all = AllOptimizers();
  for (std::size_t which = 0; which < all.size(); ++which) {
    const Make& make = all[which];
    const bool is_lbfgs = which == 5;  // which takes parameters of one device
    RunRanks(2, [&](GpuRank& rank) {
      std::vector<at::Device> devices = {Cuda(rank.device())};
      if (!is_lbfgs) devices.emplace_back(at::kCPU);
      std::vector<at::Tensor> parameters = Parameters(devices);
      const auto optimizer = make(parameters);
      if (rank.number() == 0) {
        Step(*optimizer);
        Step(*optimizer);
      }
      broadcast_parameters(parameters, 0);
      broadcast_optimizer_state(*optimizer, 0);
      Step(*optimizer);
      const auto expected = Reference(make, parameters.size(), 3);
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_TRUE(parameters[i].detach().cpu().equal(expected[i].detach()))
            << "optimizer " << which << ", parameter " << i << ", rank " << rank.number();
      }
    });
  }
  EXPECT_EQ(gpus_.devices_with_context().count(0), 0u) << "nobody's GPU";
}

struct OwnState : torch::optim::SGDParamState {};

struct Mute : OptimizerParamState {
  std::unique_ptr<OptimizerParamState> clone() const override { return std::make_unique<Mute>(); }
};

TEST_F(GpuOptimizerStateTest, OfAnUnknownClassIsMovedByItsOwnSerialize) {
  at::Tensor parameter = torch::zeros({2}).to(Cuda(3));
  torch::optim::SGD optimizer({parameter}, torch::optim::SGDOptions(0.1));
  auto own = std::make_unique<OwnState>();
  own->momentum_buffer(torch::tensor({4.0F, 5.0F}));
  const OwnState& state = *own;
  optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(own);
  detail::PutStateOnDevices(optimizer);
  EXPECT_EQ(state.momentum_buffer().device(), Cuda(3));
  EXPECT_TRUE(state.momentum_buffer().cpu().equal(torch::tensor({4.0F, 5.0F})));

  optimizer.state()[parameter.unsafeGetTensorImpl()] = std::make_unique<Mute>();
  EXPECT_THAT([&] { detail::PutStateOnDevices(optimizer); },
              ThrowsMessage<std::runtime_error>(HasSubstr("Mute cannot be moved to cuda:3")));
}

}  // namespace
}  // namespace sirtaki::tests
