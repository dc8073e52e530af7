// The recipes of the documents take this for granted.
#pragma once

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <sirtaki/mpi.h>
#include <sirtaki/torch.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <future>
#include <memory>
#include <string>
#include <vector>

namespace recipes {

struct Batch {
  torch::Tensor x;
  torch::Tensor y;
};

struct Net : torch::nn::Module {
  Net() {
    register_module("hidden", hidden);
    register_module("output", output);
  }
  torch::Tensor forward(const torch::Tensor& x) { return output(torch::tanh(hidden(x))); }
  torch::nn::Linear hidden{4, 8};
  torch::nn::Linear output{8, 2};
};

inline torch::Tensor loss_of(const std::shared_ptr<Net>& model, const Batch& batch) {
  return torch::mse_loss(model->forward(batch.x).to(torch::kFloat), batch.y);
}

// A model with the weights of rank 0, this rank's batches, and a folder for its files.
struct Surroundings {
  Surroundings() {
    torch::manual_seed(static_cast<std::uint64_t>(sirtaki::rank()));
    sirtaki::broadcast_parameters(*model, 0);
    for (int i = 0; i < 6; ++i) loader.push_back({torch::randn({8, 4}), torch::randn({8, 2})});
    const auto path =
        std::filesystem::temp_directory_path() / ("sirtaki-recipes-" + std::to_string(getpid()));
    std::filesystem::create_directories(path);
    folder = path.string();
  }
  ~Surroundings() { std::filesystem::remove_all(folder); }

  std::shared_ptr<Net> model = std::make_shared<Net>();
  std::vector<Batch> loader;
  std::string folder;
};

}  // namespace recipes
