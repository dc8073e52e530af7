// Trains with optimizers whose state is sharded, saves each, goes on for one step, and saves what came
// of it: checkpoint_tool.py does the same step in Python. checkpoint_tool FOLDER
#include <sirtaki/torch.h>
#include <torch/torch.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace {

using torch::optim::OptimizerParamGroup;

struct Net : torch::nn::Module {
  Net() {
    register_module("hidden", hidden);
    register_module("norm", norm);
    register_module("output", output);
    torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) parameter.copy_(Numbers(parameter.sizes(), 0.3));
  }
  // Numbers that no generator of random numbers has a part in.
  static torch::Tensor Numbers(torch::IntArrayRef shape, double phase) {
    const auto places = torch::arange(c10::multiply_integers(shape), torch::kDouble);
    return torch::sin(places * 1.7 + phase).reshape(shape).to(torch::kFloat);
  }
  torch::Tensor forward(const torch::Tensor& x) { return output(torch::tanh(norm(hidden(x)))); }

  torch::nn::Linear hidden{5, 7};
  torch::nn::BatchNorm1d norm{7};
  torch::nn::Linear output{7, 3};
};

template <class Optimizer, class Options>
void Run(const std::string& path, const Options& options) {
  Net net;
  auto other = std::make_unique<Options>(options);
  other->set_lr(options.get_lr() / 2);
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<torch::Tensor>{net.hidden->weight, net.output->weight});
  groups.emplace_back(std::vector<torch::Tensor>{net.hidden->bias, net.norm->weight, net.norm->bias,
                                                 net.output->bias},
                      std::move(other));
  auto optimizer = sirtaki::DistributedOptimizer(
      Optimizer(groups, options), net.named_parameters(),
      sirtaki::DistributedOptimizerOptions().shard(sirtaki::Shard::OptimizerState));
  std::int64_t epoch = 0;
  for (; epoch < 4; ++epoch) {
    if (epoch == 3) {
      sirtaki::save_checkpoint(path,
                               sirtaki::Checkpoint().model(net).optimizer(optimizer).epoch(epoch));
    }
    optimizer.zero_grad();
    const auto x = Net::Numbers({4, 5}, static_cast<double>(epoch));
    torch::mse_loss(net.forward(x), Net::Numbers({4, 3}, 5)).backward();
    optimizer.step();
  }
  sirtaki::save_checkpoint(path + ".after", sirtaki::Checkpoint().model(net));
}

}  // namespace

int main(int argc, char** argv) {
  sirtaki::init(argc, argv);
  const std::string folder = argv[1];
  using namespace torch::optim;
  Run<Adam>(folder + "/Adam", AdamOptions(0.05).amsgrad(true).weight_decay(0.01));
  Run<AdamW>(folder + "/AdamW", AdamWOptions(0.05));
  Run<SGD>(folder + "/SGD", SGDOptions(0.05).momentum(0.9).nesterov(true));
  Run<RMSprop>(folder + "/RMSprop", RMSpropOptions(0.01).momentum(0.5).centered(true));
  Run<Adagrad>(folder + "/Adagrad", AdagradOptions(0.05).lr_decay(0.1));
  sirtaki::shutdown();
}
