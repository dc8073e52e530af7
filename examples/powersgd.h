// This header has PowerSGD (Vogels, Karimireddy, Jaggi, 2019) as a communication hook: of each
// gradient that is a matrix, only two thin factors travel. train_digits uses it. Its twin in
// Python, python/powersgd.py, gives the same bits for the same gradients.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Dict.h>
#include <sirtaki/torch.h>
#include <torch/serialize/archive.h>
#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

namespace examples {

// PowerSGD approximates each matrix M of n x m numbers by P Q^T, with P of n x rank and Q of
// m x rank numbers. What the approximation leaves out is added to the next gradient (error
// feedback), and Q begins where it ended in the step before (warm start). Gradients that would not
// shrink to half, biases for one, are averaged as they are, and so is each gradient in its first
// steps, `start` of them: what is left out of a gradient comes some steps late, which does the most
// harm while the learning rate still rises.
//
// The state belongs to the parameters, by their names, since buckets may change. All ranks compute
// the same bases from the same numbers, to the bit where their processors are of one kind.
//
// A PowerSGD outlives the optimizer that it is given to, as options.hook(std::ref(powersgd)).
class PowerSGD {
 public:
  PowerSGD(std::int64_t rank, std::int64_t start, std::uint64_t seed)
      : rank_(rank), start_(start), seed_(seed) {}

  std::function<torch::Tensor()> operator()(const sirtaki::GradientBucket& bucket) {
    std::vector<Matrix> matrices;
    std::vector<torch::Tensor> travelling;
    for (std::size_t i = 0; i < bucket.gradients.size(); ++i) {
      const torch::Tensor& gradient = bucket.gradients[i];
      const std::string& name = bucket.parameters[i];
      const std::int64_t step = steps_.contains(name) ? steps_.at(name) + 1 : 1;
      steps_.insert_or_assign(name, step);
      if (step > start_ && shrinks(gradient)) {
        matrices.push_back(first_factor(name, gradient));
        travelling.push_back(matrices.back().p);
      } else {
        travelling.push_back(gradient);
      }
    }
    if (matrices.empty()) travelling = {bucket.buffer};
    const auto handle =
        sirtaki::allreduce_async_(travelling, sirtaki::AllreduceOptions().name(bucket.name + "/p"));
    return [this, handle, matrices, name = bucket.name + "/q", buffer = bucket.buffer] {
      sirtaki::synchronize(handle);
      // All ranks call the functions of their buckets in one order, so these may communicate too.
      if (!matrices.empty()) approximate(matrices, name);
      return buffer;  // the gradients are views of it
    };
  }

  // The state in a checkpoint is rank 0's, so call this before each one. What is left out differs
  // between the ranks, but only its mean counts: every rank goes on with that, as a resumed run
  // does, on any number of ranks. Collective.
  void average_left_out() {
    std::vector<torch::Tensor> tensors;
    for (const auto& entry : left_out_) tensors.push_back(entry.value());
    if (tensors.empty()) return;
    sirtaki::allreduce_(tensors, sirtaki::AllreduceOptions().name("powersgd"));
  }
  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("steps", c10::IValue(steps_));
    archive.write("left_out", c10::IValue(left_out_));
    archive.write("q", c10::IValue(q_));
  }
  void load(torch::serialize::InputArchive& archive) {
    read(archive, "steps", steps_);
    read(archive, "left_out", left_out_);
    read(archive, "q", q_);
  }

 private:
  struct Matrix {
    std::string name;
    torch::Tensor gradient;
    torch::Tensor numbers;  // the gradient and what was left out before
    torch::Tensor p;
  };

  bool shrinks(const torch::Tensor& gradient) const {
    if (gradient.dim() < 2 || gradient.numel() == 0) return false;
    const std::int64_t rows = gradient.size(0);
    return 2 * rank_ * (rows + gradient.numel() / rows) < gradient.numel();
  }

  Matrix first_factor(const std::string& name, const torch::Tensor& gradient) {
    // The matrix is a copy in memory of its own: the last bits of a product depend on how its
    // factors are aligned, and gradients lie elsewhere in the first step. It has at least 4 bytes a
    // number, since LAPACK orthogonalizes no half types.
    const auto type = torch::promote_types(gradient.scalar_type(), torch::kFloat);
    const torch::Tensor matrix =
        gradient.reshape({gradient.size(0), -1}).to(type, /*non_blocking=*/false, /*copy=*/true);
    if (left_out_.contains(name)) matrix.add_(left_out_.at(name).to(matrix.options()));
    if (!q_.contains(name) || q_.at(name).size(1) != rank_) {
      q_.insert_or_assign(name, torch::randn({matrix.size(1), rank_},
                                             torch::make_generator<at::CPUGeneratorImpl>(seed_)));
    }
    return {name, gradient, matrix, matrix.mm(q_.at(name).to(matrix.options()))};
  }

  void approximate(const std::vector<Matrix>& matrices, const std::string& name) {
    std::vector<torch::Tensor> bases;
    std::vector<torch::Tensor> factors;
    for (const Matrix& matrix : matrices) {
      bases.push_back(std::get<0>(torch::linalg_qr(matrix.p)));
      factors.push_back(matrix.numbers.t().mm(bases.back()));
    }
    sirtaki::allreduce_(factors, sirtaki::AllreduceOptions().name(name));
    for (std::size_t i = 0; i < matrices.size(); ++i) {
      const Matrix& matrix = matrices[i];
      const torch::Tensor approximation = bases[i].mm(factors[i].t());
      matrix.gradient.copy_(approximation.view_as(matrix.gradient));
      // A factor that is not finite is so on all ranks. The step is lost, and must leave no trace.
      if (!factors[i].isfinite().all().item<bool>()) continue;
      left_out_.insert_or_assign(matrix.name, matrix.numbers.sub_(approximation));
      q_.insert_or_assign(matrix.name, factors[i]);
    }
  }

  template <class State>
  static void read(torch::serialize::InputArchive& archive, const char* key, State& state) {
    c10::IValue value;
    archive.read(key, value);
    state = value.to<State>();
  }

  using Tensors = c10::Dict<std::string, torch::Tensor>;
  const std::int64_t rank_;
  const std::int64_t start_;
  const std::uint64_t seed_;
  c10::Dict<std::string, std::int64_t> steps_;  // that each gradient has made
  Tensors left_out_;                            // by this rank
  Tensors q_;                                   // the same on all ranks
};

}  // namespace examples
